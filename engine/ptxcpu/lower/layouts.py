"""Where variables and parameters lie in their windows."""

from __future__ import annotations

from ptxtrain.engine.ptxcpu.tree import Function, Module, Variable


def layout(variables: list[Variable], gap: int = 0) -> tuple[dict[str, int], int]:
    """Offsets of variables one after another at their alignments, and the end; arrays without a size come last.

    `gap` bytes are left free behind each.
    """
    offsets: dict[str, int] = {}
    end = 0
    for variable in sorted(variables, key=lambda v: v.nbytes == 0):
        align = max(variable.align, 16 if variable.nbytes == 0 else 1)
        end = (end + align - 1) // align * align
        offsets[variable.name] = end
        end += variable.nbytes + (gap if variable.nbytes else 0)
    return offsets, end


def layout_params(function: Function) -> tuple[dict[str, int], int]:
    """Byte offsets of an entry's parameters in its argument buffer, and the buffer's size."""
    offsets: dict[str, int] = {}
    end = 0
    for param in function.params:
        end = (end + param.align - 1) // param.align * param.align
        offsets[param.name] = end
        end += param.nbytes
    return offsets, end


def layout_globals(module: Module, function: Function, gap: int = 0) -> tuple[dict[str, int], int]:
    """Byte offsets of all global and constant variables: the module's, then the function's own."""
    variables = [
        v
        for owner in (module.variables, *(f.variables for f in module.functions.values()))
        for v in owner.values()
        if v.space in ("global", "const")
    ]
    return layout(variables, gap)
