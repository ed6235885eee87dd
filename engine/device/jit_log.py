"""The driver's own words on a PTX file that it refuses: CuPy gives only a number, the log has the line.

Called after a failed load, in the same context, through the driver's C interface: CUDA Driver API, "Module Management",
`cuModuleLoadDataEx`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from ptxtrain.engine.device.cuda_errors import LIBCUDA

_ERROR_LOG_BUFFER, _ERROR_LOG_BUFFER_SIZE_BYTES = 5, 6  # CUjit_option
_SIZE = 8192


def jit_log(path: Path, library: Any | None = None) -> str:
    """The first error that the driver's assembler reports for a file, or "" if it has nothing to say."""
    try:
        driver = ctypes.CDLL(LIBCUDA) if library is None else library
        image = ctypes.create_string_buffer(path.read_bytes())
    except (OSError, AttributeError):
        return ""
    log = ctypes.create_string_buffer(_SIZE)
    module = ctypes.c_void_p()
    options = (ctypes.c_int * 2)(_ERROR_LOG_BUFFER, _ERROR_LOG_BUFFER_SIZE_BYTES)
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _SIZE)
    if driver.cuModuleLoadDataEx(ctypes.byref(module), image, ctypes.c_uint(2), options, values) == 0:
        driver.cuModuleUnload(module)
        return ""
    lines = [line.strip() for line in log.value.decode(errors="replace").splitlines()]
    # "ptxas application ptx input, line 12; error   : …", then "fatal   : Ptx assembly aborted due to errors"
    for word in ("error", "fatal"):
        for line in lines:
            if word in line:
                return line.removeprefix("ptxas ").replace("application ptx input, ", "")
    return lines[0] if lines else ""
