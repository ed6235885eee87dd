"""One kernel on the CPU device and in the oracle, on copies of the same arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oracle

from ptxtrain.engine.ptxcpu import load
from ptxtrain.engine.ptxcpu.parser import parse

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"

# What most kernels start with: %t the thread in its block, %g in the grid (both linear), %in and %out pointers to it.
PROLOGUE = """
.reg .pred %p<30>; .reg .b16 %h<30>; .reg .b32 %r<60>; .reg .b64 %rd<30>; .reg .f32 %f<30>;
.reg .b32 %t, %g, %lane, %x; .reg .b64 %in, %out, %at;
{ .reg .b32 %a, %b, %c, %d, %e;
mov.u32 %a, %tid.x; mov.u32 %b, %tid.y; mov.u32 %c, %tid.z; mov.u32 %d, %ntid.x; mov.u32 %e, %ntid.y;
mad.lo.u32 %b, %c, %e, %b; mad.lo.u32 %t, %b, %d, %a;
mul.lo.u32 %d, %d, %e; mov.u32 %e, %ntid.z; mul.lo.u32 %d, %d, %e;
mov.u32 %a, %ctaid.x; mov.u32 %b, %ctaid.y; mov.u32 %c, %ctaid.z; mov.u32 %e, %nctaid.y; mad.lo.u32 %b, %c, %e, %b;
mov.u32 %e, %nctaid.x; mad.lo.u32 %a, %b, %e, %a; mad.lo.u32 %g, %a, %d, %t; }
mov.u32 %lane, %laneid;
ld.param.u64 %in, [p_in]; ld.param.u64 %out, [p_out];
mad.wide.u32 %in, %g, 4, %in; mad.wide.u32 %out, %g, 4, %out;
"""


def entry(body: str, declarations: str = "") -> str:
    """A kernel over u32 arrays `p_in` and `p_out`, one element for each thread of the grid."""
    return (
        f"{HEAD}{declarations}.visible .entry k(.param .u64 p_in, .param .u64 p_out)\n{{\n{PROLOGUE}{body}\nret;\n}}\n"
    )


def run_both(
    source: str,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    args: Sequence[Any],
    shared: int = 0,
    threads: int | None = None,
) -> list[Any]:
    """Run `k`; assert that all arrays come out equal; give the compiler's."""
    ours, theirs = ([a.copy() if isinstance(a, np.ndarray) else a for a in args] for _ in range(2))
    load(source).launch("k", grid=grid, block=block, args=ours, shared=shared, threads=threads)
    oracle.run(parse(source, Path("k.ptx")), "k", grid, block, theirs, shared)
    for position, (got, expected) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(got, np.ndarray):
            np.testing.assert_array_equal(got, expected, f"argument {position}\n{source}")
    return ours


def check(
    body: str,
    grid: tuple[int, int, int] = (2, 1, 1),
    block: tuple[int, int, int] = (80, 1, 1),
    declarations: str = "",
    shared: int = 0,
) -> Any:
    """Run the body of `entry` on random numbers; the output."""
    count = int(np.prod(grid) * np.prod(block))
    values = np.random.default_rng(count).integers(0, 1 << 32, count, dtype=np.uint32)
    values[::3] %= 7
    return run_both(entry(body, declarations), grid, block, [values, np.zeros(count, np.uint32)], shared)[1]
