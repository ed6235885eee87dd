"""Run a module or a script, on the fake CuPy in place of the real one: `python tests/gpu/on_fake.py MODULE|FILE.py ARGS…`.

So the scripts for a GPU are tried where there is none: the fake holds each call against what CuPy and CUDA allow, and the CPU
compiler runs the kernels. Its times mean nothing.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "device"))


def shrink(put: Callable[[Any, str, Any], object]) -> None:
    """Sizes of `ptxtrain bench` that a CPU gets through; `put` is `setattr` or a test's."""
    from ptxtrain.engine import gpubench

    put(gpubench, "SQUARE", 128)
    put(gpubench, "ELEMENTS", 1 << 16)
    put(gpubench, "SECONDS", 0.0)
    put(gpubench, "TRIES", 1)


def install() -> None:
    """Put a fake GPU with enough memory for the `tiny` preset in CuPy's place."""
    from fake_cupy import FakeCupy

    from ptxtrain.engine.device import cuda_errors

    fake = FakeCupy()
    fake.state.memory = 2 << 30
    fake.state.shared_optin = 227 << 10
    cuda_errors.import_cupy = lambda: fake


if __name__ == "__main__":
    os.environ.pop("PTXTRAIN_DEVICE", None)
    install()
    shrink(setattr)
    sys.argv = sys.argv[1:]
    if sys.argv[0].endswith(".py"):
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
