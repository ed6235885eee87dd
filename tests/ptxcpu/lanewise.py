"""Kernels that apply instructions lane by lane, run by the compiler and by the oracle on the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import oracle
import oracle_scalar as scalar
from oracle_scalar import BITS

from ptxtrain.engine.ptxcpu import load
from ptxtrain.engine.ptxcpu.parser import parse

COUNT = 170  # numbers; not a multiple of the block, so the last warps are partial
BLOCK, GRID = 90, 2  # two whole warps and a part

EDGES: dict[str, list[int]] = {
    "f32": [
        *(0, 1, 0x3FFFFF, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F7FFFFF, 0x3F000000, 0x40490FDB, 0x4B7FFFFF),
        *(0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001, 0x33800000, 0x4F000000, 0x5F000000, 0x3FC00000, 0x40200000),
    ],
    "f64": [
        *(0, 1, 1 << 51, 1 << 52, 0x3FF0000000000000, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FF8000000000000),
        *(0x3FE0000000000000, 0x41E0000000000000, 0x36A0000000000000, 0x3FF0000010000000, 0x47EFFFFFF0000000),
    ],
    "f16": [0, 1, 0x3FF, 0x400, 0x3C00, 0x3BFF, 0x3800, 0x7BFF, 0x7C00, 0x7E00, 0x7C01, 0x6400, 0x4248],
    "bf16": [0, 1, 0x7F, 0x80, 0x3F80, 0x3F7F, 0x3F00, 0x7F7F, 0x7F80, 0x7FC0, 0x7F81, 0x4049],
}
SHIFTS = [0, 1, 4, 7, 8, 15, 16, 24, 31, 32, 33, 63, 64, 65, 255, 256, 257, 0x80000000, 0xFFFFFFFF]


def edges(type: str) -> list[int]:
    """Numbers of a type where things go wrong."""
    if type in EDGES:
        return [bits | sign << (BITS[type] - 1) for bits in EDGES[type] for sign in (0, 1)]
    if type in ("f16x2", "bf16x2"):
        halves = edges(type.removesuffix("x2"))
        return [high << 16 | low for high, low in zip(halves, halves[5:] + halves[:5], strict=True)]
    if type == "pred":
        return [0, 1]
    if type == "shift":
        return SHIFTS
    bits = BITS[type]
    near = [0, 1, 2, 3, (1 << bits - 1) - 1, 1 << bits - 1, (1 << bits - 1) + 1, (1 << bits) - 2, (1 << bits) - 1]
    return [*near, 0x55 * ((1 << bits) // 255), 1 << bits // 2, (1 << bits // 2) - 1]


def numbers(type: str, position: int, nonzero: bool = False) -> list[int]:
    """COUNT operands of a type for source `position`: pairs of edges first, then random bits."""
    rng = np.random.default_rng([len(type), *type.encode(), position])
    some = edges(type)
    pairs = list(product(some, some))
    order = np.random.default_rng(len(some)).permutation(len(pairs))[:120]
    chosen = [pairs[i][position % 2] for i in order]
    if position == 2:
        chosen = [some[int(i)] for i in rng.integers(len(some), size=len(chosen))]
    bits = 32 if type == "shift" else BITS[type]
    while len(chosen) < COUNT:
        if type in EDGES and rng.random() < 0.7:  # exponents near each other, so that sums round
            value = scalar.pack(scalar.number(float(rng.normal() * 2.0 ** rng.integers(-3, 4))), type)
        else:
            value = int.from_bytes(rng.bytes(8), "little") & ((1 << bits) - 1)
        chosen.append(value % 70 if type == "shift" and rng.random() < 0.8 else value)
    return [value or 1 for value in chosen[:COUNT]] if nonzero else chosen[:COUNT]


@dataclass(frozen=True)
class Form:
    """One instruction: `$d` is the destination, `$a`, `$b`, `$c`, `$e` sources of the given types."""

    text: str
    to: str
    sources: tuple[str, ...]
    ulps: float = 0  # of the result's type: how far from the oracle
    wide: bool = False  # registers twice as wide as the types
    nonzero: bool = False  # the second source is not 0
    absolute: float = 0  # an error that is no more than this is good as well
    open_zero: bool = False  # a zero may have either sign


def held(type: str, wide: bool = False) -> tuple[str, int]:
    """The register type and the bytes in memory of a value."""
    if type == "pred":
        return "b32", 4
    bits = 32 if type == "shift" else max(16, BITS[type])
    return f"b{min(64, 2 * bits) if wide else bits}", bits // 8


def kernel(forms: Sequence[Form]) -> tuple[str, list[tuple[str, int, bool]]]:
    """The kernel that applies all forms; and its inputs as type, position, nonzero."""
    inputs: list[tuple[str, int, bool]] = []
    body = []
    for j, form in enumerate(forms):
        lines = []
        words = {}
        for position, type in enumerate(form.sources):
            key = (type, position, form.nonzero and position == 1)
            if key not in inputs:
                inputs.append(key)
            register, nbytes = held(type, form.wide)
            name = f"%s{position}"
            lines.append(f".reg .{register} {name};")
            lines.append(f"mad.wide.u32 %at, %i, {nbytes}, %in{inputs.index(key)};")
            lines.append(f"ld.global.b{8 * nbytes} {name}, [%at];")
            if type == "pred":
                lines.append(f".reg .pred %q{position}; setp.ne.b32 %q{position}, {name}, 0;")
                name = f"%q{position}"
            words["abce"[position]] = name
        register, nbytes = held(form.to, form.wide)
        lines.append(f".reg .{register} %d; mad.wide.u32 %at, %i, {BITS[register] // 8}, %out{j};")
        words["d"] = "%d"
        if form.to == "pred":
            lines.append(".reg .pred %q;")
            words["d"] = "%q"
        text = form.text
        for letter, name in words.items():
            text = text.replace(f"${letter}", name)
        lines.append(f"{text};")
        if form.to == "pred":
            lines.append("selp.b32 %d, 1, 0, %q;")
        lines.append(f"st.global.{register} [%at], %d;")
        body.append("{ " + "\n  ".join(lines) + " }")
    names = [f"in{k}" for k in range(len(inputs))] + [f"out{j}" for j in range(len(forms))]
    params = ", ".join(f".param .u64 p_{name}" for name in names)
    loads = "\n".join(f".reg .b64 %{name}; ld.param.u64 %{name}, [p_{name}];" for name in names)
    head = f""".version 8.6
.target sm_90
.address_size 64
.visible .entry lanewise({params}, .param .u32 n)
{{
.reg .b32 %i, %n, %t, %c; .reg .b64 %at; .reg .pred %more;
mov.u32 %t, %tid.x; mov.u32 %n, %ntid.x; mov.u32 %c, %ctaid.x; mad.lo.u32 %i, %c, %n, %t;
ld.param.u32 %n, [n]; setp.lt.u32 %more, %i, %n;
@!%more bra DONE;
{loads}
"""
    return head + "\n".join(body) + "\nDONE: ret;\n}\n", inputs


def memory(values: Sequence[int], nbytes: int) -> npt.NDArray[np.generic]:
    return np.array(values, dtype=np.uint64).astype(f"u{nbytes}")


def compare(forms: Sequence[Form]) -> list[str]:
    """Run the forms in one kernel on the CPU device and in the oracle; what differs, as lines."""
    source, inputs = kernel(forms)
    arrays = [memory(numbers(type, position, nonzero), held(type)[1]) for type, position, nonzero in inputs]
    outputs = []
    for run in ("oracle", "compiler"):
        made = [np.zeros(COUNT, f"u{BITS[held(form.to, form.wide)[0]] // 8}") for form in forms]
        args = [*(a.copy() for a in arrays), *made, np.uint32(COUNT)]
        if run == "oracle":
            oracle.run(parse(source, Path("lanewise.ptx")), "lanewise", (GRID, 1, 1), (BLOCK, 1, 1), args)
        else:
            load(source).launch("lanewise", grid=(GRID, 1, 1), block=(BLOCK, 1, 1), args=args)
        outputs.append(made)
    wrong = []
    for form, expected, got in zip(forms, *outputs, strict=True):
        bad = [i for i in range(COUNT) if not close(form, int(expected[i]), int(got[i]))]
        for i in bad[:5]:
            given = [arrays[inputs.index((t, k, form.nonzero and k == 1))][i] for k, t in enumerate(form.sources)]
            shown = ", ".join(hex(int(v)) for v in given)
            wrong.append(
                f"{form.text}: ({shown}) gave {got[i]:#x}, expected {expected[i]:#x}; {len(bad)} of {COUNT} differ"
            )
    return wrong


def close(form: Form, expected: int, got: int) -> bool:
    """Equal bits; or both NaN; or within the form's ulps."""
    if expected == got:
        return True
    if form.to in ("f16x2", "bf16x2"):
        half = replace(form, to=form.to.removesuffix("x2"))
        return all(close(half, expected >> s & 0xFFFF, got >> s & 0xFFFF) for s in (0, 16))
    if form.to not in scalar.FORMATS:
        return False
    x, y = scalar.unpack(expected, form.to), scalar.unpack(got, form.to)
    if x.size is None or y.size is None:
        return x.size is y.size
    if x.size == y.size == 0:
        return form.open_zero
    if abs(scalar.as_float(x) - scalar.as_float(y)) <= form.absolute:
        return True
    if not form.ulps or x.sign != y.sign:
        return False
    low = (1 << (BITS[form.to] - 1)) - 1  # neighbours of one sign have neighbouring bits
    return abs((expected & low) - (got & low)) <= form.ulps
