"""The tensor cores' matmul: error against float64 and the naive twin, one order of sums whatever the tile, layout or cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from opbench import DTYPES, Bench, check, normal, rounded, run, same_bits

from ptxtrain.engine.device.base import Buffer, Device
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import matmul
from ptxtrain.ptx import matmul_spec, render
from ptxtrain.ptx.matmul_spec import MatmulSpec

Float = npt.NDArray[Any]
LAYOUTS = ("nn", "nt", "tn")
SHAPES = [(1, 8, 8), (3, 5, 1), (7, 97, 65), (129, 72, 33), (64, 64, 64), (130, 200, 130)]


def padded(x: Float, dtype: str = "bf16") -> Float:
    """Rows lengthened to a multiple of 8 numbers by NaN, which must never meet a product."""
    out = np.full((x.shape[0], -(-x.shape[1] // 8) * 8), np.nan, np.float32)
    out[:, : x.shape[1]] = x
    return out.astype(DTYPES.get(dtype, np.float16))


def stored(a: Float, b: Float, layout: str) -> tuple[Float, Float]:
    """a [M, K] and b [K, N] as the layout keeps them, rows padded."""
    return padded(a.T if layout == "tn" else a), padded(b.T if layout == "nt" else b)


def put(bench: Bench, x: Float) -> Buffer:
    return bench.device.write(x)


def product(
    device: Device,
    layout: str,
    a: Float,
    b: Float,
    *,
    spec: MatmulSpec | None = None,
    overrides: dict[str, str] | None = None,
    **options: Any,
) -> Float:
    """a @ b in f32 on the tensor cores, its rows' padding left as it was."""
    m, n, k = a.shape[0], b.shape[1], a.shape[1]
    x0, y0 = stored(a, b, layout)
    width = -(-n // 8) * 8

    def record(rec: Recorder, bench: Bench) -> None:
        x, y, out = put(bench, x0), put(bench, y0), bench.empty("out", (m, width))
        matmul.run(
            rec, out, x, y, m=m, n=n, k=k, layout=layout, dtype="bf16", out_dtype="f32", way="fast",
            strides=(width, x0.shape[1], y0.shape[1]), spec=spec, **options,
        )  # fmt: skip

    found = run(device, record, overrides)["out"]
    assert np.isnan(found[:, n:]).all(), "the padding of out was written"
    return found[:, :n]


def operands(m: int, n: int, k: int, seed: int = 0) -> tuple[Float, Float]:
    rng = np.random.default_rng((seed, m, n, k))
    return normal(rng, m, k, dtype="bf16"), normal(rng, k, n, dtype="bf16")


def in_f32(start: Float, a: Float, b: Float) -> Float:
    """start + a @ b, one f32 addition after another in ascending k (products of bf16 are exact)."""
    out = start.astype(np.float32)
    for k in range(a.shape[1]):
        out = out + a[:, k, None] * b[None, k, :]
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_against_float64_and_the_naive_twin(device: Device, m: int, n: int, k: int, layout: str) -> None:
    a, b = operands(m, n, k)
    rng = np.random.default_rng(1)
    residual, bias = normal(rng, m, n), normal(rng, n)
    x0, y0 = stored(a, b, layout)
    width = -(-n // 8) * 8
    sizes: dict[str, Any] = {"m": m, "n": n, "k": k, "layout": layout, "dtype": "bf16"}
    fast: dict[str, Any] = {**sizes, "way": "fast", "strides": (width, x0.shape[1], y0.shape[1])}

    def record(rec: Recorder, bench: Bench) -> None:
        x, y = put(bench, x0), put(bench, y0)
        matmul.run(rec, bench.empty("out", (m, width)), x, y, **fast, out_dtype="f32")
        matmul.run(rec, bench.empty("bf16", (m, width), "bf16"), x, y, **fast, out_dtype="bf16")
        stream = bench.put(padded(residual, "f32"), name="stream")
        matmul.run(rec, stream, x, y, **fast, out_dtype="f32", residual=stream)
        matmul.run(rec, bench.put(padded(residual, "f32"), name="sum"), x, y, **fast, out_dtype="f32", accumulate=True)
        matmul.run(rec, bench.empty("bias", (m, width)), x, y, **fast, out_dtype="f32", bias=bench.put(bias))
        x, y = (bench.put(z, "bf16") for z in ((a.T if layout == "tn" else a), (b.T if layout == "nt" else b)))
        matmul.run(rec, bench.empty("twin", (m, n)), x, y, **sizes, out_dtype="f32")

    found = {name: x[:, :n] for name, x in run(device, record).items()}
    what = f"matmul fast {layout} M {m} N {n} K {k}"
    exact, zero = a.astype(np.float64) @ b.astype(np.float64), np.zeros((m, n))
    own = in_f32(zero, a, b)
    check(what, found["out"], exact, own)
    check(f"{what} beside its twin", found["out"], exact, found["twin"])
    check(f"{what} accumulate", found["sum"], residual + exact, in_f32(residual, a, b))
    same_bits(f"{what} to bf16", found["bf16"], rounded(found["out"], "bf16"))
    same_bits(f"{what} residual", found["stream"], found["out"] + residual)
    same_bits(f"{what} bias", found["bias"], found["out"] + bias)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_f16_operands(device: Device, layout: str) -> None:
    a, b = operands(33, 40, 50)
    x0, y0 = padded(a.T if layout == "tn" else a, "f16"), padded(b.T if layout == "nt" else b, "f16")
    a, b = a.astype(np.float16), b.astype(np.float16)

    def record(rec: Recorder, bench: Bench) -> None:
        matmul.run(
            rec, bench.empty("out", (33, 40)), put(bench, x0), put(bench, y0), m=33, n=40, k=50, layout=layout, dtype="f16",
            out_dtype="f32", way="fast", strides=(40, x0.shape[1], y0.shape[1]),
        )  # fmt: skip

    exact = a.astype(np.float64) @ b.astype(np.float64)
    check(f"matmul fast f16 {layout}", run(device, record)["out"], exact, in_f32(np.zeros((33, 40)), a, b))


def test_layouts_give_the_bits_of_the_plain_one(device: Device) -> None:
    """The same values land in the same fragments, so a transposed tile changes nothing."""
    a, b = operands(129, 97, 130)
    plain = product(device, "nn", a, b)
    for layout in ("nt", "tn"):
        same_bits(layout, product(device, layout, a, b), plain)


def test_tiles_give_the_same_bits(device: Device) -> None:
    a, b = operands(150, 200, 100)
    first = product(device, "nn", a, b, spec=MatmulSpec("nn", block_m=64, block_n=64))
    rows = (*matmul_spec.CHOICES[:-1], *matmul_spec.CPU_CHOICES)
    for spec in (*(row.spec("nn", "bf16") for row in rows), MatmulSpec("tn")):
        same_bits(str(spec), product(device, spec.layout, a, b, spec=spec), first)


def gradient(
    device: Device, a: Float, b: Float, context: int, cuts: tuple[int, ...], overrides: dict[str, str] | None = None
) -> Float:
    """The gradient of a weight on top of what is there, in calls that end after `cuts` sequences."""
    m, n = a.shape[1], b.shape[1]
    start = normal(np.random.default_rng(5), m, n)

    def record(rec: Recorder, bench: Bench) -> None:
        out = bench.put(start, name="out")
        for first, last in zip((0, *cuts), (*cuts, len(a) // context), strict=True):
            rows = slice(first * context, last * context)
            size = max(matmul.partial_bytes(m, n, sequences=last - first, context=context), 4)
            matmul.gradient(
                rec, out, bench.put(a[rows], "bf16"), bench.put(b[rows], "bf16"), bench.scratch(size), m=m, n=n,
                rows=(last - first) * context, context=context, dtype="bf16", way="fast",
            )  # fmt: skip

    return run(device, record, overrides)["out"]


FORMS = {"chain": 0, "parts": 10**9}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("context", [9, 65])
def test_gradients_do_not_see_the_micro_batch(
    device: Device, form: str, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either form takes sequences in order: however calls cut them, and however many parts are in memory at once."""
    monkeypatch.setattr(matmul_spec, "CHAIN_TILES", FORMS[form])
    monkeypatch.setattr(matmul_spec, "PART_ROWS", 32)
    m, n, sequences = 24, 40, 4
    rng = np.random.default_rng(context)
    a, b = (normal(rng, sequences * context, width, dtype="bf16") for width in (m, n))
    whole = gradient(device, a, b, context, ())
    start = normal(np.random.default_rng(5), m, n)
    exact = start + a.astype(np.float64).T @ b.astype(np.float64)
    check(f"gradient {form} context {context}", whole, exact, in_f32(start, a.T, b))
    same_bits("cut", gradient(device, a, b, context, (1, 2)), whole)
    monkeypatch.setattr(matmul, "PARTIAL_CAP", 1)
    same_bits("one sequence's parts at a time", gradient(device, a, b, context, ()), whole)
    # Zeros pad each sequence to whole steps: the same as if they were there.
    longer = -(-context // 16) * 16
    if form == "chain" or longer <= 32:
        wide = [np.zeros((sequences, longer, x.shape[1]), np.float32) for x in (a, b)]
        for x, w in zip((a, b), wide, strict=True):
            w[:, :context] = x.reshape(sequences, context, -1)
        same_bits("padded", gradient(device, *(w.reshape(-1, w.shape[2]) for w in wide), longer, ()), whole)


def test_the_forms_are_two_definitions(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """If both gave the same bits, the test above would prove nothing."""
    rng = np.random.default_rng(0)
    a, b = (normal(rng, 65 * 3, 24, dtype="bf16") for _ in range(2))
    monkeypatch.setattr(matmul_spec, "CHAIN_TILES", 0)
    chain = gradient(device, a, b, 65, ())
    monkeypatch.setattr(matmul_spec, "CHAIN_TILES", 10**9)
    assert not np.array_equal(chain, gradient(device, a, b, 65, ()))


@pytest.mark.parametrize(("m", "n", "context"), [(384, 640, 512), (128, 256, 256), (1024, 384, 513), (8, 8, 2049)])
def test_parts_cover_a_sequence(m: int, n: int, context: int) -> None:
    part = matmul_spec.gradient_part(m, n, context)
    assert 0 < part <= matmul_spec.PART_ROWS + 16 and part % matmul_spec.STEP == 0
    assert (-(-context // part) - 1) * part < context
    assert matmul_spec.gradient_part(32768, 384, context) == 0


@pytest.mark.parametrize(
    ("m", "n", "parts", "tile"),
    [
        (16384, 32768, 1, (128, 256)),
        (16384, 2048, 1, (128, 256)),
        (16384, 384, 1, (128, 128)),  # a third of 256 would stand over
        (16384, 640, 1, (128, 128)),
        (384, 2048, 1, (128, 64)),
        (384, 640, 1, (64, 64)),
        (384, 640, 32, (128, 128)),  # parts count as blocks
        (8, 72, 1, (64, 64)),
        (1, 32768, 1, (64, 64)),  # a sample's last row
    ],
)
def test_the_table_says_which_tile(m: int, n: int, parts: int, tile: tuple[int, int]) -> None:
    spec = matmul_spec.choose("tn", "bf16", m, n, parts)
    assert (spec.block_m, spec.block_n) == tile and (spec.warp_m, spec.warp_n) in ((64, 64), (64, 32), (32, 32))
    assert all(row.reason for row in (*matmul_spec.CHOICES, *matmul_spec.CPU_CHOICES))


def test_a_cpu_takes_one_warp_and_whole_cache_lines() -> None:
    """Its tile fits the first cache, and no store of a row goes across two lines."""
    for layout in ("nn", "nt", "tn", "tt"):
        spec = matmul_spec.choose(layout, "bf16", 2048, 256, table=matmul_spec.CPU)
        assert spec.threads == 32 and spec.a.row_bytes % 64 == spec.b.row_bytes % 64 == 0
        assert 4 * spec.block_m * spec.block_n + spec.shared_bytes < 48 << 10


# What is wrong, the kernel, its text, what stands there instead.
MUTANTS = [
    ("a k step dropped", "matmul", "[%a_at + 2304]", "[%a_at + 0]"),
    ("the wrong half of a fragment", "matmul", "{%b_0_0, %b_0_1}", "{%b_0_1, %b_0_0}"),
    ("the second columns from the first", "matmul", "{%b_1_0, %b_1_1}", "{%b_0_0, %b_0_1}"),
    (
        "a row past a sequence's end",
        "matmul",
        "setp.lt.u32     %is_inside, %at, %segment;",
        "setp.le.u32     %is_inside, %at, %segment;",
    ),
    (
        "a stage read too early",
        "matmul",
        "setp.ge.u32     %is_primed, %step, 2;",
        "setp.ge.u32     %is_primed, %step, 1;",
    ),
    ("the sum so far forgotten", "matmul", "@!%starts bra   COPY_SETUP;", "bra COPY_SETUP;"),
    (
        "a sequence's end not padded",
        "matmul",
        "selp.b64        %wide, %a_gap, %a_next, %is_next_segment;",
        "mov.b64         %wide, %a_next;",
    ),
]
PART_MUTANTS = [
    (
        "parts added twice",
        "add_parts",
        "add.rn.f32      %sum_0, %sum_0, %value_0_0;",
        "fma.rn.f32      %sum_0, %value_0_0, 0f40000000, %sum_0;",
    ),
    (
        "the sum so far added to each part",
        "add_parts",
        "@%in_range ld.global.f32 %value_0_0, [%p_partial];",
        "@%in_range ld.global.f32 %value_0_0, [%p_partial];\n    @%in_range ld.global.f32 %value_1_0, [%p_out];\n"
        "    add.rn.f32      %value_0_0, %value_0_0, %value_1_0;",
    ),
    (
        "a part's rows from the sequence's start",
        "matmul",
        "mad.lo.u32      %first, %row, %segment, %first;",
        "mul.lo.u32      %first, %row, %segment;",
    ),
    ("every part in the first one's place", "matmul", "mad.lo.u64      %p_out, %wide, 4, %p_out;", ""),
]
FORM_MUTANTS = [("chain", *mutant) for mutant in MUTANTS] + [("parts", *mutant) for mutant in PART_MUTANTS]


@pytest.mark.parametrize(
    ("form", "name", "stem", "old", "new"), FORM_MUTANTS, ids=[row[1].replace(" ", "-") for row in FORM_MUTANTS]
)
def test_mutants_are_caught(
    device: Device, form: str, name: str, stem: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient over three sequences of 41 rows, which end within a tile and within a step."""
    monkeypatch.setattr(matmul_spec, "CHAIN_TILES", FORMS[form])
    monkeypatch.setattr(matmul_spec, "PART_ROWS", 32)
    monkeypatch.setattr(matmul, "table", lambda rec: matmul_spec.GPU)  # the texts below are of its tiles
    text = render.render(stem, matmul_spec.choose("tn", "bf16", 24, 40) if stem == "matmul" else None)
    assert text.count(old) >= 1, "the mutant's line is not there"
    rng = np.random.default_rng(7)
    a, b = (normal(rng, 3 * 41, width, dtype="bf16") for width in (24, 40))
    start = normal(np.random.default_rng(5), 24, 40)
    exact, own = start + a.astype(np.float64).T @ b.astype(np.float64), in_f32(start, a.T, b)
    check("the kernel as it is", gradient(device, a, b, 41, ()), exact, own)
    with pytest.raises(AssertionError):
        check(name, gradient(device, a, b, 41, (), {stem: text.replace(old, new)}), exact, own)


def test_refusals(device: Device) -> None:
    rec, x = Recorder(device), device.alloc(4096)
    fast: dict[str, Any] = {"layout": "nn", "dtype": "bf16", "out_dtype": "f32", "way": "fast"}
    with pytest.raises(PtxtrainError, match=r'rows of a = 97 numbers are no multiple of 8.*take the way "bf16"'):
        matmul.run(rec, x, x, x, m=1, n=8, k=97, **fast)
    with pytest.raises(PtxtrainError, match="b is not aligned to 16 bytes"):
        matmul.run(rec, x, x, x.view(2, 512), m=8, n=8, k=8, **fast)
    with pytest.raises(PtxtrainError, match='dtype is "f32", the tensor cores take'):
        matmul.run(rec, x, x, x, m=8, n=8, k=8, **{**fast, "dtype": "f32"})
    with pytest.raises(PtxtrainError, match="no whole number of segments of 3"):
        matmul.run(rec, x, x, x, m=8, n=8, k=8, **{**fast, "layout": "tn"}, segment=3)
    with pytest.raises(PtxtrainError, match="need the fast way"):
        matmul.run(rec, x, x, x, m=8, n=8, k=8, layout="nn", dtype="bf16", out_dtype="f32", bias=x)
    assert matmul.obstacle(width=96, vocab=1000) is None
    assert "vocab = 97" in str(matmul.obstacle(width=96, vocab=97))
