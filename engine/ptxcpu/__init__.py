"""A PTX compiler for CPUs: PTX text -> syntax tree -> LLVM IR -> native code. Useful alone:

from ptxtrain.engine.ptxcpu import load

module = load("scale.ptx")
x = np.arange(1000, dtype=np.float32)
module.launch("scale", grid=(4, 1, 1), block=(256, 1, 1), args=[x, np.uint32(x.size), np.float32(2)])
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptxtrain.engine.ptxcpu.module import LoadedModule

__all__ = ["load"]


def load(source: Path | str, *, checked: bool | None = None, schedule: str | None = None) -> LoadedModule:
    """Load a PTX file by path, or PTX text; see `module.load`. Imports LLVM when first called."""
    from ptxtrain.engine.ptxcpu.module import load as load_module

    return load_module(source, checked=checked, schedule=schedule)
