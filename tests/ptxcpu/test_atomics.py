"""atom and red on every type, in global and shared memory, on one address and on many, against NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from both import HEAD

from ptxtrain.engine.ptxcpu import load

DTYPES: dict[str, Any] = {
    **{"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64, "b32": np.uint32, "b64": np.uint64},
    **{"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16},
}
THREADS, BLOCKS, PLACES = 80, 3, 7


def kernel(operation: str, type: str, space: str, *, one: bool, returns: bool, guard: str = "") -> str:
    """Thread i applies the operation to place i mod PLACES (or place 0) with its own operand.

    Shared memory starts at zero and is added to `places` by the first thread of each block at the end.
    """
    dtype = np.dtype(DTYPES[type])
    size = dtype.itemsize
    register = f"b{8 * size}"
    copies = "\n".join(
        f"ld.shared.{register} %old, [tile+{size * i}]; st.global.{register} [%each+{size * i}], %old;"
        for i in range(PLACES)
    )
    clear = "\n".join(f"mov.b{8 * size} %old, 0; st.shared.{register} [tile+{size * i}], %old;" for i in range(PLACES))
    target = "%old, " if returns else ""
    where = "[%place]" if space == "global" else "[%spot]"
    return f"""{HEAD.replace("sm_80", "sm_90").replace("8.0", "8.6")}
.shared .align 8 .b8 tile[{PLACES * 8}];
.visible .entry k(.param .u64 places, .param .u64 values, .param .u64 olds, .param .u64 shared)
{{
.reg .b32 %i, %t, %n, %c, %at, %spot; .reg .b64 %place, %value, %out, %each; .reg .{register} %old, %x; .reg .pred %p, %q;
mov.u32 %t, %tid.x; mov.u32 %n, %ntid.x; mov.u32 %c, %ctaid.x; mad.lo.u32 %i, %c, %n, %t;
ld.param.u64 %place, [places]; ld.param.u64 %value, [values]; ld.param.u64 %out, [olds]; ld.param.u64 %each, [shared];
mad.wide.u32 %each, %c, {PLACES * size}, %each;
mad.wide.u32 %value, %i, {size}, %value; mad.wide.u32 %out, %i, {size}, %out;
ld.global.{register} %x, [%value];
{"mov.u32 %at, 0;" if one else f"rem.u32 %at, %i, {PLACES};"}
mov.u32 %spot, tile; mad.lo.u32 %spot, %at, {size}, %spot; mad.wide.u32 %place, %at, {size}, %place;
setp.ne.u32 %p, %t, 0; @%p bra READY;
{clear}
READY: bar.sync 0;
setp.ge.u32 %q, %t, 5;
{guard} {"atom" if returns else "red"}.{space}.{operation}.{type} {target}{where}, %x;
{f"st.global.{register} [%out], %old;" if returns else ""}
bar.sync 0;
@%p bra DONE;
{copies}
DONE: ret;
}}
"""


def run(
    source: str, places: npt.NDArray[Any], values: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """`places` afterwards, the old values, and what shared memory held."""
    places, olds = places.copy(), np.zeros_like(values)
    shared = np.zeros((BLOCKS, PLACES), values.dtype)
    load(source).launch("k", grid=(BLOCKS, 1, 1), block=(THREADS, 1, 1), args=[places, values, olds, shared], threads=2)
    return places, olds, shared


REDUCE: dict[str, Any] = {
    **{"add": lambda a, b: a + b, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or},
    **{"xor": np.bitwise_xor, "inc": lambda a, b: np.uint32(0) if a >= b else a + np.uint32(1)},
    "dec": lambda a, b: b if a == 0 or a > b else a - np.uint32(1),
}
FORMS = [
    *(("add", t) for t in ("u32", "s32", "u64", "f32", "f64")),
    *((op, t) for op in ("min", "max") for t in ("u32", "s32", "u64", "s64")),
    *((op, t) for op in ("and", "or", "xor") for t in ("b32", "b64")),
    *(("add.noftz", t) for t in ("f16", "bf16")),
    *((f"{op}.noftz", t) for op in ("min", "max") for t in ("f16", "bf16")),
]


@pytest.mark.parametrize("one", [True, False], ids=["one place", "many places"])
@pytest.mark.parametrize(("operation", "type"), FORMS)
def test_reductions(operation: str, type: str, one: bool) -> None:
    """Small whole numbers, so that sums are exact in any order; some threads are left out by a guard."""
    dtype = DTYPES[type]
    rng = np.random.default_rng(len(type))
    few = 3 if type in ("f16", "bf16") else 90
    values = rng.integers(0 if type[0] in "ub" and type != "bf16" else -few, few, THREADS * BLOCKS).astype(dtype)
    if type in ("f16", "bf16"):
        values = (np.arange(values.size) % 2).astype(dtype)
    places = np.zeros(PLACES, dtype)
    name = operation.split(".")[0]
    expected, in_shared = places.copy(), np.zeros((BLOCKS, PLACES), dtype)
    for i, value in enumerate(values):
        if i % THREADS < 5:
            continue
        at, block = 0 if one else i % PLACES, i // THREADS
        expected[at] = REDUCE[name](expected[at], value)
        in_shared[block, at] = REDUCE[name](in_shared[block, at], value)
    for space in ("global", "shared"):
        got, _, shared = run(kernel(operation, type, space, one=one, returns=not one, guard="@%q"), places, values)
        np.testing.assert_array_equal(*((got, expected) if space == "global" else (shared, in_shared)))


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("type", ["u32", "f32"])
def test_every_thread_sees_its_own_old_value(type: str, space: str) -> None:
    values = np.ones(THREADS * BLOCKS, DTYPES[type])
    _, olds, _ = run(kernel("add", type, space, one=True, returns=True), np.zeros(PLACES, DTYPES[type]), values)
    if space == "global":
        assert sorted(olds) == list(range(values.size))
    else:
        assert all(sorted(block) == list(range(THREADS)) for block in olds.reshape(BLOCKS, THREADS))


@pytest.mark.parametrize("operation", ["inc", "dec"])
def test_counters_wrap(operation: str) -> None:
    values = np.full(THREADS * BLOCKS, 9, np.uint32)
    places = np.zeros(PLACES, np.uint32)
    got, _, shared = run(kernel(operation, "u32", "global", one=False, returns=True), places, values)
    expected = places.copy()
    for i in range(values.size):
        expected[i % PLACES] = REDUCE[operation](expected[i % PLACES], np.uint32(9))
    assert (got == expected).all()
    _, _, shared = run(kernel(operation, "u32", "shared", one=True, returns=False), places, values)
    assert (shared[:, 0] == (THREADS % 10 if operation == "inc" else (10 - THREADS % 10) % 10)).all()


@pytest.mark.parametrize("type", ["b16", "b32", "b64"])
def test_compare_and_swap_builds_a_counter(type: str) -> None:
    """Each thread adds 1 to one place, again until its exchange comes first; in shared memory and in global."""
    bits = int(type[1:])
    register = f"b{bits}"
    add = "add.u16" if bits == 16 else f"add.u{bits}"
    source = f"""{HEAD}
.shared .align 8 .b8 tile[16];
.visible .entry k(.param .u64 place)
{{
.reg .b64 %at; .reg .{register} %old, %new, %seen; .reg .pred %p; .reg .b32 %t;
ld.param.u64 %at, [place]; mov.u32 %t, %tid.x; setp.ne.u32 %p, %t, 0; @%p bra READY;
mov.b{bits} %old, 0; st.shared.{register} [tile], %old; READY: bar.sync 0;
ld.relaxed.gpu.global.{register} %old, [%at];
AGAIN: {add} %new, %old, 1; atom.global.cas.{type} %seen, [%at], %old, %new;
setp.ne.s{bits} %p, %seen, %old; mov.b{bits} %old, %seen; @%p bra AGAIN;
ld.volatile.shared.{register} %old, [tile];
MORE: {add} %new, %old, 1; atom.shared.cas.{type} %seen, [tile], %old, %new;
setp.ne.s{bits} %p, %seen, %old; mov.b{bits} %old, %seen; @%p bra MORE;
bar.sync 0; setp.ne.u32 %p, %t, 0; @%p ret;
ret;
}}
"""
    dtype = {16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    place = np.zeros(4, dtype)
    load(source).launch("k", grid=(BLOCKS, 1, 1), block=(THREADS, 1, 1), args=[place], threads=2)
    assert place[0] == THREADS * BLOCKS and not place[1:].any()


@pytest.mark.parametrize("type", ["f16x2", "bf16x2"])
def test_packed_halves(type: str) -> None:
    dtype = DTYPES[type[:-2]]
    source = f"""{HEAD.replace("sm_80", "sm_90").replace("8.0", "8.6")}
.visible .entry k(.param .u64 places, .param .u64 values)
{{
.reg .b64 %at, %value; .reg .b32 %x, %t;
ld.param.u64 %at, [places]; ld.param.u64 %value, [values]; mov.u32 %t, %tid.x;
mad.wide.u32 %value, %t, 4, %value; and.b32 %t, %t, 1; mad.wide.u32 %at, %t, 4, %at;
ld.global.b32 %x, [%value]; red.global.add.noftz.{type} [%at], %x;
ret;
}}
"""
    values = np.random.default_rng(1).integers(-3, 4, (64, 2)).astype(dtype)
    places = np.zeros((2, 2), dtype)
    load(source).launch("k", grid=(1, 1, 1), block=(64, 1, 1), args=[places.view(np.uint32), values.view(np.uint32)])
    assert (places == np.stack([values[0::2].sum(0), values[1::2].sum(0)])).all()


def test_vectors() -> None:
    source = f"""{HEAD.replace("sm_80", "sm_90").replace("8.0", "8.6")}
.visible .entry k(.param .u64 places, .param .u64 olds)
{{
.reg .b64 %at, %out; .reg .f32 %a, %b, %x, %y; .reg .b32 %t;
ld.param.u64 %at, [places]; ld.param.u64 %out, [olds]; mov.u32 %t, %tid.x; cvt.rn.f32.u32 %x, %t; mad.wide.u32 %out, %t, 8, %out;
atom.global.add.v2.f32 {{%a, %b}}, [%at], {{%x, 0f3F800000}};
st.global.v2.f32 [%out], {{%a, %b}};
red.global.add.v2.f32 [%at+8], {{%x, %x}};
ret;
}}
"""
    places, olds = np.zeros(4, np.float32), np.zeros((32, 2), np.float32)
    load(source).launch("k", grid=(1, 1, 1), block=(32, 1, 1), args=[places, olds])
    total = 31 * 32 / 2
    assert places.tolist() == [total, 32, total, total]
    assert sorted(olds[:, 1]) == list(range(32))


def test_sums_in_global_memory_flush_subnormal_numbers_and_those_in_shared_memory_do_not() -> None:
    values = np.full(THREADS * BLOCKS, 1e-40, np.float32)
    got, _, _ = run(kernel("add", "f32", "global", one=True, returns=False), np.zeros(PLACES, np.float32), values)
    assert got[0] == 0
    _, _, shared = run(kernel("add", "f32", "shared", one=True, returns=False), np.zeros(PLACES, np.float32), values)
    assert (shared[:, 0] > 0).all()
