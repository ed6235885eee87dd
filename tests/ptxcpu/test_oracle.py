"""The oracle against NumPy, ml_dtypes and Python, so that a mistake in it cannot hide one in the compiler."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import oracle
import oracle_scalar as scalar
import pytest

from ptxtrain.engine.ptxcpu.parser import parse

DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}
UINTS = {"f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64}
SPECIAL = {
    "f32": [
        0,
        1,
        0x7FFFFF,
        0x800000,
        0x3F800000,
        0x3F800001,
        0x7F7FFFFF,
        0x7F800000,
        0x7FC00000,
        0x33800000,
        0x4B000001,
    ],
    "f16": [0, 1, 0x3FF, 0x400, 0x3C00, 0x3C01, 0x7BFF, 0x7C00, 0x7E00],
    "bf16": [0, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7FC0],
    "f64": [0, 1, 0x3FF0000000000000, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FF8000000000000, 0x10000000000000],
}


def samples(type: str, count: int, seed: int) -> list[int]:
    """Special values of both signs, then random bits of middling exponents."""
    rng = np.random.default_rng(seed)
    bits = scalar.BITS[type]
    some = [value | sign << (bits - 1) for value in SPECIAL[type] for sign in (0, 1)]
    normal = rng.normal(size=count).astype(DTYPES[type]).view(UINTS[type])
    return some + [int(v) for v in normal]


def same(type: str, ours: int, theirs: object) -> bool:
    """Equal bits, or NaN both."""
    value = np.array([theirs]).astype(DTYPES[type])
    if np.isnan(value.astype(np.float64))[0]:
        return scalar.unpack(ours, type).size is None
    return ours == int(value.view(UINTS[type])[0])


@pytest.mark.parametrize("type", ["f16", "f32", "f64"])
def test_arithmetic_is_ieee(type: str) -> None:
    ufuncs = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
    left, right = samples(type, 40, 1), samples(type, 40, 2)
    rng = np.random.default_rng(3)
    with np.errstate(all="ignore"):
        for a in left:
            for b in rng.permutation(np.array(right, dtype=np.uint64))[:20]:
                x, y = (np.array([v], dtype=UINTS[type]).view(DTYPES[type])[0] for v in (a, int(b)))
                for opcode, ufunc in ufuncs.items():
                    ours = scalar.evaluate(opcode, (type,), (), [a, int(b)])
                    assert same(type, ours, ufunc(x, y)), (opcode, hex(a), hex(int(b)), hex(ours))
            x = np.array([a], dtype=UINTS[type]).view(DTYPES[type])[0]
            assert same(type, scalar.evaluate("sqrt", (type,), (), [a]), np.sqrt(x)), hex(a)


@pytest.mark.parametrize("to", ["f16", "bf16", "f32"])
def test_conversions_round_like_numpy(to: str) -> None:
    for value in samples("f64", 300, 4) + [
        struct.unpack("<Q", struct.pack("<d", v))[0] for v in (65519.9, 65520.0, 2**-24)
    ]:
        x = np.array([value], dtype=np.uint64).view(np.float64)
        if to == "bf16":  # ml_dtypes goes by way of f32, which rounds twice
            value32 = scalar.convert("f32", "f64", ("rn",), value)
            with np.errstate(all="ignore"):
                theirs = np.array([value32], dtype=np.uint32).view(np.float32).astype(ml_dtypes.bfloat16)[0]
            assert same(to, scalar.convert(to, "f32", ("rn",), value32), theirs), hex(value)
            continue
        with np.errstate(all="ignore"):
            assert same(to, scalar.convert(to, "f64", ("rn",), value), x.astype(DTYPES[to])[0]), hex(value)


def test_directed_rounding_brackets_the_exact_value() -> None:
    for a, b in zip(samples("f32", 60, 5), samples("f32", 60, 6), strict=True):
        down, up, near, zero = (scalar.evaluate("mul", ("f32",), (m,), [a, b]) for m in ("rm", "rp", "rn", "rz"))
        if scalar.unpack(near, "f32").size is None:
            continue
        x, y = (scalar.as_float(scalar.unpack(v, "f32")) for v in (down, up))
        assert x <= y and near in (down, up) and zero in (down, up)
        exact = scalar.as_float(scalar.unpack(a, "f32")) * scalar.as_float(scalar.unpack(b, "f32"))
        assert x <= exact <= y
        assert (down == up) == (x == exact)


def test_fma_rounds_once() -> None:
    one_and_a_bit = 0x3F800001
    product = scalar.evaluate("fma", ("f32",), ("rn",), [one_and_a_bit, one_and_a_bit, 0xBF800002])
    assert scalar.as_float(scalar.unpack(product, "f32")) == 2.0**-46
    assert scalar.evaluate("fma", ("f32",), ("rn",), [0x80000000, 0x3F800000, 0]) == 0
    assert scalar.evaluate("fma", ("f32",), ("rm",), [0x80000000, 0x3F800000, 0]) == 0x80000000


@pytest.mark.parametrize(
    ("opcode", "type", "modifiers", "values", "result"),
    [
        ("shl", "b32", (), [1, 32], 0),
        ("shr", "s32", (), [0x80000000, 99], 0xFFFFFFFF),
        ("shr", "b32", (), [0x80000000, 99], 0),
        ("bfe", "s32", (), [0x80, 4, 4], 0xFFFFFFF8),
        ("bfe", "u32", (), [0xFFFFFFFF, 28, 10], 0xF),
        ("bfi", "b32", (), [0xF, 0, 30, 8], 0xC0000000),
        ("prmt", "b32", (), [0x33221100, 0x77665544, 0x4703], 0x44770033),
        ("prmt", "b32", (), [0x80, 0, 0x8888], 0xFFFFFFFF),
        ("lop3", "b32", (), [0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA, 0x1E], 0x1E1E1E1E),
        ("mul", "s32", ("hi",), [0x80000000, 0x80000000], 0x40000000),
        ("div", "s32", (), [0x80000000, 0xFFFFFFFF], 0x80000000),
        ("rem", "s32", (), [0xFFFFFFF9, 3], 0xFFFFFFFF),
        ("mul", "s32", ("wide",), [0xFFFFFFFF, 3], 0xFFFFFFFFFFFFFFFD),
        ("bfind", "s32", (), [0xFFFFFFFF], 0xFFFFFFFF),
        ("clz", "b64", (), [1], 63),
        ("max", "f32", (), [0x7FC00000, 0x80000000], 0x80000000),
        ("min", "f32", (), [0, 0x80000000], 0x80000000),
        ("max", "f32", ("NaN",), [0x7FC00000, 0], 0x7FFFFFFF),
        ("add", "f32", ("ftz",), [0x00400000, 0x00400000], 0),
        ("add", "f32", ("sat",), [0x3F800000, 0x3F800000], 0x3F800000),
    ],
)
def test_known_answers(opcode: str, type: str, modifiers: tuple[str, ...], values: list[int], result: int) -> None:
    """Worked by hand from the ISA."""
    assert scalar.evaluate(opcode, (type,), modifiers, values) == result


@pytest.mark.parametrize(
    ("to", "of", "modifiers", "value", "result"),
    [
        ("s32", "f32", ("rzi",), 0x7F800000, 0x7FFFFFFF),
        ("s32", "f32", ("rni",), 0x7FC00000, 0),
        ("u8", "f32", ("rzi",), 0xBF800000, 0),
        ("u32", "f32", ("rni",), 0x40200000, 2),
        ("s8", "s32", (), 0x80, 0x80),
        ("u8", "s32", ("sat",), 0xFFFFFFFF, 0),
        ("bf16", "f32", ("rn",), 0x3F808000, 0x3F80),
        ("bf16", "f32", ("rn",), 0x3F818000, 0x3F82),
        ("bf16", "f32", ("rn",), 0x7F800001, 0x7FFF),
        ("f32", "f32", ("rni",), 0xBF000000, 0x80000000),
        ("tf32", "f32", ("rna",), 0x3F801000, 0x3F802000),
    ],
)
def test_known_conversions(to: str, of: str, modifiers: tuple[str, ...], value: int, result: int) -> None:
    assert scalar.convert(to, of, modifiers, value) == result


def test_comparisons_with_nan() -> None:
    nan, one = 0x7FC00000, 0x3F800000
    for op in ("eq", "ne", "lt", "le", "gt", "ge", "num"):
        assert not scalar.compare(op, "f32", nan, one)
    for op in ("equ", "neu", "ltu", "leu", "gtu", "geu", "nan"):
        assert scalar.compare(op, "f32", nan, one)
    assert scalar.compare("hi", "u32", 0xFFFFFFFF, 1) and not scalar.compare("gt", "s32", 0xFFFFFFFF, 1)


def test_launch_with_barriers_and_shuffles() -> None:
    """A block of 40 threads reverses its numbers through shared memory, then each adds its neighbour's."""
    source = """.version 7.0
    .target sm_80
    .address_size 64
    .visible .entry k(.param .u64 p, .param .u32 n) {
        .shared .align 4 .b8 tile[160];
        .reg .b32 %r<9>; .reg .b64 %rd<5>; .reg .pred %p<3>;
        ld.param.u64 %rd1, [p];
        ld.param.u32 %r1, [n];
        mov.u32 %r2, %tid.x;
        mul.wide.u32 %rd2, %r2, 4;
        add.u64 %rd3, %rd1, %rd2;
        ld.global.u32 %r3, [%rd3];
        mov.u32 %r4, tile;
        sub.u32 %r5, %r1, %r2;
        shl.b32 %r5, %r5, 2;
        add.u32 %r5, %r5, %r4;
        st.shared.u32 [%r5+-4], %r3;
        bar.sync 0;
        shl.b32 %r6, %r2, 2;
        add.u32 %r6, %r6, %r4;
        ld.shared.u32 %r7, [%r6];
        setp.ge.u32 %p1, %r2, 32;
        @%p1 bra STORE;
        shfl.sync.down.b32 %r8|%p2, %r7, 1, 31, -1;
        @%p2 add.u32 %r7, %r7, %r8;
    STORE:
        st.global.u32 [%rd3], %r7;
        ret;
    }"""
    data = np.arange(40, dtype=np.uint32) * 10
    oracle.run(parse(source, Path("k.ptx")), "k", (1, 1, 1), (40, 1, 1), [data, np.uint32(40)])
    back = np.arange(40, dtype=np.uint32)[::-1] * 10
    expected = back.copy()
    expected[:31] += back[1:32]
    np.testing.assert_array_equal(data, expected)


def test_approximations_are_rounded_doubles() -> None:
    assert scalar.evaluate("ex2", ("f32",), ("approx",), [0x3F800000]) == 0x40000000
    assert scalar.evaluate("lg2", ("f32",), ("approx",), [0x80000000]) == 0xFF800000
    assert scalar.evaluate("rsqrt", ("f32",), ("approx",), [0x80000000]) == 0xFF800000
    assert math.isnan(scalar.as_float(scalar.unpack(scalar.evaluate("lg2", ("f32",), (), [0xBF800000]), "f32")))
