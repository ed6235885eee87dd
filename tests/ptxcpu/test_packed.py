"""Instructions on packed values and other rare forms, lane by lane, against NumPy and ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ptxtrain.engine.ptxcpu import load

HEAD = ".version 8.8\n.target sm_100a\n.address_size 64\n"
REGISTERS = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}


def apply(text: str, dtype: Any, *sources: Any) -> Any:
    """`text` with `$d` and `$a`, `$b`, `$c` for the result and the sources, for each element."""
    count, size = sources[0].size, np.dtype(dtype).itemsize
    arrays = [np.ascontiguousarray(s) for s in sources]
    lines = []
    for name, array in zip("abc", arrays, strict=False):
        width = array.dtype.itemsize
        lines.append(f".reg .{REGISTERS[width]} %{name}; mad.wide.u32 %at, %i, {width}, %{name}_p;")
        lines.append(f"ld.global.b{8 * width} %{name}, [%at];")
    for name in ("d", *"abc"[: len(arrays)]):
        text = text.replace(f"${name}", f"%{name}")
    params = ", ".join(f".param .u64 {name}" for name in ("d", *"abc"[: len(arrays)]))
    loads = "\n".join(
        f".reg .b64 %{name}_p; ld.param.u64 %{name}_p, [{name}];" for name in ("d", *"abc"[: len(arrays)])
    )
    source = f"""{HEAD}.visible .entry k({params}, .param .u32 n)
{{
.reg .b32 %i, %n; .reg .b64 %at; .reg .pred %p; .reg .{REGISTERS[size]} %d;
{loads}
mov.u32 %i, %tid.x; ld.param.u32 %n, [n]; setp.ge.u32 %p, %i, %n; @%p ret;
{chr(10).join(lines)}
{text};
mad.wide.u32 %at, %i, {size}, %d_p; st.global.b{8 * size} [%at], %d;
ret;
}}
"""
    out = np.zeros(count, dtype)
    threads = -(-count // 32) * 32
    module = load(source)
    for start in range(0, count, 1024):
        part = [a[start : start + 1024] for a in arrays]
        piece = np.zeros(part[0].size, dtype)
        module.launch("k", grid=(1, 1, 1), block=(min(threads, 1024), 1, 1), args=[piece, *part, np.uint32(piece.size)])
        out[start : start + 1024] = piece
    return out


def words(rng: np.random.Generator, count: int = 200) -> Any:
    some = np.array([0, 0xFFFF, 0x8000, 0x7FFF, 1], np.uint16)
    mixed = np.where(rng.random((count, 2)) < 0.3, rng.choice(some, (count, 2)), rng.integers(0, 1 << 16, (count, 2)))
    return mixed.astype(np.uint16).view(np.uint32)[:, 0]


@pytest.mark.parametrize("sign", ["u", "s"])
@pytest.mark.parametrize("operation", ["add", "min", "max", "min.relu", "max.relu"])
def test_pairs_of_integers(operation: str, sign: str) -> None:
    if "relu" in operation and sign == "u":
        pytest.skip("unsigned numbers have no .relu")
    rng = np.random.default_rng(1)
    a, b = words(rng), words(rng)
    dtype = np.uint16 if sign == "u" else np.int16
    x, y = a.view(dtype), b.view(dtype)
    name = operation.split(".")[0]
    with np.errstate(over="ignore"):
        expected = {"add": x + y, "min": np.minimum(x, y), "max": np.maximum(x, y)}[name]
    if "relu" in operation:
        expected = np.maximum(expected, 0)
    got = apply(f"{operation}.{sign}16x2 $d, $a, $b", np.uint32, a, b)
    np.testing.assert_array_equal(got.view(dtype), expected)


def test_relu_of_integers() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.integers(-99, 99, (2, 200), dtype=np.int32)
    np.testing.assert_array_equal(apply("min.relu.s32 $d, $a, $b", np.int32, a, b), np.maximum(np.minimum(a, b), 0))


@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("sign", ["u", "s"])
def test_distances(pieces: int, sign: str) -> None:
    rng = np.random.default_rng(3)
    a, b, c = words(rng), words(rng), words(rng)
    dtype = np.dtype(f"{'u' if sign == 'u' else ''}int{32 // pieces}")
    distance = np.abs(a.view(dtype).astype(np.int64) - b.view(dtype).astype(np.int64)).reshape(-1, pieces)
    got = apply(f"vabsdiff{pieces}.u32.{sign}32.{sign}32 $d, $a, $b, $c", np.uint32, a, b, c)
    unsigned = np.dtype(f"uint{32 // pieces}")
    np.testing.assert_array_equal(got.view(unsigned).reshape(-1, pieces), distance.astype(unsigned))
    got = apply(f"vabsdiff{pieces}.u32.{sign}32.{sign}32.add $d, $a, $b, $c", np.uint32, a, b, c)
    np.testing.assert_array_equal(got, (distance.sum(1) + c).astype(np.uint32))


def test_packs_of_clamped_integers() -> None:
    rng = np.random.default_rng(4)
    a, b, c = rng.integers(-(1 << 17), 1 << 17, (3, 300), dtype=np.int32)
    for to, low, high in (("s16", -(1 << 15), (1 << 15) - 1), ("u16", 0, (1 << 16) - 1)):
        x, y = (np.clip(v, low, high).astype(np.int64) & 0xFFFF for v in (a, b))
        got = apply(f"cvt.pack.sat.{to}.s32 $d, $a, $b", np.uint32, a, b)
        np.testing.assert_array_equal(got, (x << 16 | y).astype(np.uint32))
    for to, low, high in (("s8", -128, 127), ("u8", 0, 255)):
        x, y = (np.clip(v, low, high).astype(np.int64) & 0xFF for v in (a, b))
        got = apply(f"cvt.pack.sat.{to}.s32.b32 $d, $a, $b, $c", np.uint32, a, b, c)
        np.testing.assert_array_equal(got, ((c.astype(np.int64) << 16 | x << 8 | y) & 0xFFFFFFFF).astype(np.uint32))


@pytest.mark.parametrize("operation", ["min", "max"])
def test_signs_and_three_operands(operation: str) -> None:
    rng = np.random.default_rng(5)
    a, b, c = rng.normal(size=(3, 200)).astype(np.float32)
    pick = np.minimum if operation == "min" else np.maximum
    sizes = pick(np.abs(a), np.abs(b))
    got = apply(f"{operation}.xorsign.abs.f32 $d, $a, $b", np.float32, a, b)
    np.testing.assert_array_equal(got, np.where(np.signbit(a) != np.signbit(b), -sizes, sizes))
    np.testing.assert_array_equal(apply(f"{operation}.f32 $d, $a, $b, $c", np.float32, a, b, c), pick(pick(a, b), c))


FLOATS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}


def _interesting(largest: float) -> Any:
    rng = np.random.default_rng(6)
    random = rng.normal(size=600) * 10.0 ** rng.uniform(-6, 6, 600)
    ties = np.arange(-300, 300) / 32.0
    tiny = np.arange(-64, 64) * 2.0**-18
    ends = [0.0, -0.0, largest, -largest, largest * 1.01, largest * 1.2, np.inf, -np.inf, np.nan, 1e-30, 65504.0]
    return np.concatenate([random, ties, tiny, ends]).astype(np.float32)


def _codes(values: Any, dtype: Any, largest: float) -> Any:
    return np.where(np.isnan(values), values, np.clip(values, -largest, largest)).astype(dtype)


def _same(got: Any, expected: Any) -> None:
    """Equal bits; NaN is the positive one that the ISA names."""
    codes = np.where(np.isnan(expected.astype(np.float32)), 0x7F, expected.view(np.uint8))
    np.testing.assert_array_equal(got, codes)


@pytest.mark.parametrize("kind", FLOATS)
def test_narrowing_to_eight_bits(kind: str) -> None:
    dtype, largest = FLOATS[kind]
    a = _interesting(largest)
    b = np.roll(a, 7)
    got = apply(f"cvt.rn.satfinite.{kind}x2.f32 $d, $a, $b", np.uint16, a, b)
    _same(got >> 8, _codes(a, dtype, largest))
    _same(got & 0xFF, _codes(b, dtype, largest))
    got = apply(f"cvt.rn.satfinite.relu.{kind}x2.f32 $d, $a, $b", np.uint16, a, b)
    _same(got >> 8, _codes(np.where(a < 0, 0, a), dtype, largest))
    with np.errstate(over="ignore"):
        half = a.astype(np.float16)
    pairs = np.stack([half, np.roll(half, 3)], 1)
    got = apply(f"cvt.rn.satfinite.{kind}x2.f16x2 $d, $a", np.uint16, pairs.view(np.uint32)[:, 0])
    _same(got & 0xFF, _codes(pairs[:, 0].astype(np.float32), dtype, largest))
    _same(got >> 8, _codes(pairs[:, 1].astype(np.float32), dtype, largest))


@pytest.mark.parametrize("kind", FLOATS)
def test_widening_from_eight_bits(kind: str) -> None:
    """All codes."""
    dtype, _ = FLOATS[kind]
    low = np.arange(256, dtype=np.uint16)
    got = apply(f"cvt.rn.f16x2.{kind}x2 $d, $a", np.uint32, low | (low[::-1] << 8)).view(np.float16).reshape(-1, 2)
    expected = low.astype(np.uint8).view(dtype).astype(np.float16)
    for column, wanted in ((got[:, 0], expected), (got[:, 1], expected[::-1])):
        np.testing.assert_array_equal(column, wanted)
        assert (np.signbit(column) == np.signbit(wanted))[~np.isnan(wanted)].all()


def test_loads_and_stores_of_32_bytes() -> None:
    source = f"""{HEAD}.visible .entry k(.param .u64 out, .param .u64 x)
{{
.reg .b32 %t, %r<8>; .reg .b64 %o, %x, %l, %h; .reg .b128 %q;
ld.param.u64 %o, [out]; ld.param.u64 %x, [x]; mov.u32 %t, %tid.x;
mad.wide.u32 %o, %t, 48, %o; mad.wide.u32 %x, %t, 48, %x;
ld.global.v8.b32 {{%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}}, [%x];
st.global.v8.b32 [%o], {{%r7, %r6, %r5, %r4, %r3, %r2, %r1, %r0}};
ld.global.b128 %q, [%x+32]; mov.b128 {{%l, %h}}, %q; mov.b128 %q, {{%h, %l}}; st.global.b128 [%o+32], %q;
ret;
}}
"""
    x = np.arange(40 * 12, dtype=np.uint32).reshape(40, 12)
    out = np.zeros_like(x)
    load(source).launch("k", grid=(1, 1, 1), block=(40, 1, 1), args=[out, x])
    np.testing.assert_array_equal(out, x[:, [7, 6, 5, 4, 3, 2, 1, 0, 10, 11, 8, 9]])
