"""CUDA C to PTX with NVRTC, through CuPy. Needs no GPU and no driver, so that both devices run the same references.

The result is cached on disk by source, options and the versions of NVRTC and its headers. NVRTC stamps its own newest PTX
version on everything it writes, and a driver refuses a version newer than itself; the text for sm_80 … sm_90 needs no more
than PTX 8.0, so that is what is written there (any driver that CuPy for CUDA 12 starts on takes it).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ptxtrain.engine.cache import cache_dir, write_once
from ptxtrain.engine.errors import PtxtrainError

PTX_VERSION = (8, 0)  # written for architectures up to `_OLD_ARCH`
_OLD_ARCH = 90


@dataclass(frozen=True)
class Toolchain:
    """The NVRTC that was found. `include` is the folder of CUDA's headers, None without any."""

    nvrtc: ModuleType
    version: str  # NVRTC's, e.g. "12.9"
    cuda: int  # the CUDA major version that CuPy is built for
    include: Path | None
    headers: str  # CUDART_VERSION of the headers, e.g. "12090", or "none"


def package(what: str, cuda: int) -> str:
    """The pip package of `what` ("nvrtc", "runtime") for CUDA 12, or for 13 and later (which have no suffix)."""
    return f"nvidia-cuda-{what}-cu12" if cuda == 12 else f"nvidia-cuda-{what}>={cuda},<{cuda + 1}"


@functools.cache
def toolchain() -> Toolchain:
    """Find NVRTC and the headers that go with it.

    Raises:
        PtxtrainError: CuPy or NVRTC is missing or cannot be loaded.
    """
    if sys.platform == "darwin":
        raise PtxtrainError("macOS is not supported: there is neither CuPy nor NVRTC for it; use Linux or Windows")
    try:
        from cupy.cuda import nvrtc, runtime
    except ImportError as error:
        raise PtxtrainError(
            f"CuPy cannot be imported ({_first_line(error)}); it brings NVRTC, which compiles the reference kernels: "
            "pip install cupy-cuda12x"
        ) from error
    cuda = int(runtime.runtimeGetVersion()) // 1000  # of the runtime linked into CuPy, no driver asked
    _preload(cuda)
    try:
        major, minor = nvrtc.getVersion()
    except Exception as error:
        raise PtxtrainError(
            f"NVRTC {cuda} cannot be loaded ({_first_line(error)}); it compiles the reference kernels: "
            f"pip install '{package('nvrtc', cuda)}'"
        ) from error
    include = _include(cuda)
    return Toolchain(nvrtc, f"{major}.{minor}", cuda, include, _headers_version(include))


def compile_to_file(
    source: str,
    name: str,
    *,
    defines: Mapping[str, str] | None = None,
    arch: str = "compute_80",
    options: Sequence[str] = (),
) -> Path:
    """As `compile_to_ptx`, but the path of the PTX in the cache, for `Device.load`."""
    tools = toolchain()
    flags = [f"-arch={arch}", *options, *(f"-D{key}={value}" for key, value in sorted((defines or {}).items()))]
    title = f"// {name} compiled by NVRTC {tools.version} with headers {tools.headers}: {' '.join(flags)}\n"
    key = hashlib.sha256("\0".join([title, str(PTX_VERSION), source]).encode()).hexdigest()
    path = cache_dir("nvrtc") / f"{Path(name).stem}-{key[:32]}.ptx"
    end = f"// end of {name}\n"  # a file cut short by a crash lacks it
    try:
        text = path.read_text(encoding="utf-8")
        if text.startswith(title) and text.endswith(end):
            return path
    except (OSError, UnicodeDecodeError):
        pass
    ptx = _compile(tools, source, name, flags)
    if int(re.sub(r"\D", "", arch) or 0) <= _OLD_ARCH:
        ptx = lower_version(ptx)
    write_once(path, (title + ptx.rstrip("\0\n") + "\n" + end).encode())
    return path


def compile_to_ptx(
    source: str,
    name: str,
    *,
    defines: Mapping[str, str] | None = None,
    arch: str = "compute_80",
    options: Sequence[str] = (),
) -> str:
    """The PTX of a CUDA C source, from the cache if it was compiled before.

    Args:
        source: the text. It may include what the CUDA runtime's headers have, such as `<cuda_bf16.h>`.
        name: what errors call it, e.g. `"matmul.cu"`.
        defines: macros, as `-DKEY=VALUE`.
        arch: the virtual architecture.
        options: further NVRTC options, e.g. `"-fmad=false"`.

    Raises:
        PtxtrainError: CuPy, NVRTC or a header is missing, or the source has an error; the first one is named.
    """
    return compile_to_file(source, name, defines=defines, arch=arch, options=options).read_text(encoding="utf-8")


def lower_version(ptx: str) -> str:
    """PTX text whose `.version` is at most `PTX_VERSION`."""

    def lower(match: re.Match[str]) -> str:
        found = (int(match[2]), int(match[3]))
        return "{}{}.{}".format(match[1], *min(found, PTX_VERSION))

    return re.sub(r"^(\s*\.version\s+)(\d+)\.(\d+)", lower, ptx, count=1, flags=re.MULTILINE)


def _compile(tools: Toolchain, source: str, name: str, flags: list[str]) -> str:
    nvrtc = tools.nvrtc
    if tools.include is not None:
        flags = [*flags, f"-I{tools.include}"]
    program = nvrtc.createProgram(source, name, [], [])
    try:
        try:
            nvrtc.compileProgram(program, flags)
        except Exception as error:
            log = str(nvrtc.getProgramLog(program)).strip("\0\n ")
            raise PtxtrainError(_explain(tools, name, log, error)) from error
        ptx = nvrtc.getPTX(program)
        return ptx.decode() if isinstance(ptx, bytes) else str(ptx)
    finally:
        nvrtc.destroyProgram(program)


def _explain(tools: Toolchain, name: str, log: str, error: Exception) -> str:
    """One line from NVRTC's log: the first error, and what to do where that is known."""
    lines = [line.strip() for line in log.splitlines() if "error" in line.lower()]
    errors = [line for line in lines if "detected in the compilation" not in line]
    first = errors[0] if errors else f"{name}: {_first_line(error)}"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    if re.search(r"(could|can) ?not open source file", first):
        wanted = f"pip install '{package('runtime', tools.cuda)}'"
        where = f"not in {tools.include}" if tools.include else "CUDA's headers were not found"
        return f"{first} ({where}); {wanted}"
    if "builtins" in first or "BUILTIN" in str(error):
        return f"{first}; NVRTC {tools.version} is incomplete: pip install --force-reinstall '{package('nvrtc', tools.cuda)}'"
    return f"{first}{more} [NVRTC {tools.version}]"


def _wheel_folders(cuda: int, kind: str) -> list[Path]:
    """Folders of NVIDIA's wheels. CUDA 12 has one per component, 13 and later one for all (`nvidia/cu13`)."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    if kind == "include":
        parts = ["cuda_runtime/include"] if cuda == 12 else [f"cu{cuda}/include"]
    elif sys.platform == "win32":
        parts = ["cuda_nvrtc/bin"] if cuda == 12 else [f"cu{cuda}/bin/x86_64", f"cu{cuda}/bin/x64", f"cu{cuda}/bin"]
    else:
        parts = ["cuda_nvrtc/lib"] if cuda == 12 else [f"cu{cuda}/lib"]
    return [folder for root in roots for part in parts if (folder := root / part).is_dir()]


def _preload(cuda: int) -> None:
    """Load the NVRTC of pip's wheels for CuPy's own CUDA version, if it is there, before CuPy looks for one.

    Beside a PyTorch for CUDA 13, CuPy for CUDA 12 would be given the other NVRTC; CuPy 13 does not look into wheels at all.
    Where this finds nothing CuPy searches by itself (a CUDA toolkit, conda).
    """
    library = f"nvrtc64_{cuda}0_0.dll" if sys.platform == "win32" else f"libnvrtc.so.{cuda}"
    for folder in _wheel_folders(cuda, "library"):
        if (path := folder / library).is_file():
            try:
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue  # CuPy says why when it fails as well
            return


def _include(cuda: int) -> Path | None:
    """The folder with `cuda_bf16.h`: pip's wheel for this CUDA, else conda's or a toolkit's."""
    for folder in _wheel_folders(cuda, "include"):
        if (folder / "cuda_bf16.h").is_file():
            return folder
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
        found = pathfinder.find_nvidia_header_directory("cudart")
    except (
        Exception
    ):  # CuPy 13 does not bring it; and a broken toolkit is as good as none: the compiler names the header
        return None
    return Path(found) if found and (Path(found) / "cuda_bf16.h").is_file() else None


def _headers_version(include: Path | None) -> str:
    if include is None:
        return "none"
    try:
        text = (include / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "unknown"
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return match[1] if match else "unknown"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
