"""The check of the fast kernels: each against its naive twin and float64 at odd shapes, then a whole model.

A fast kernel is right when its error against float64, as a norm, is at most twice its twin's plus a floor of a few f32
roundings; it must give the same bits twice, into outputs full of NaN. The model, of 2 layers with 65 tokens and 1,000 of
vocabulary, runs the ways f32, bf16 and fast: for the loss and each gradient ||fast - f32|| <= 2 ||bf16 - f32||.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ptxtrain.engine import init, philox, ways
from ptxtrain.engine.config import BatchConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from ptxtrain.engine.device.base import Buffer, Device
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.fastmath import attention_exact, cross_entropy_exact
from ptxtrain.engine.kernels import Override, Recorder
from ptxtrain.engine.ops import attention, cross_entropy, flash_attention, matmul, scalars
from ptxtrain.engine.step import TrainStep

F32: TypeAlias = npt.NDArray[np.float32]
F64: TypeAlias = npt.NDArray[np.float64]
Found: TypeAlias = dict[str, F64]

MODEL = ModelConfig(vocab_size=1000, context=65, layers=2, width=128, heads=4, kv_heads=2, head_dim=32, mlp_width=344)
SEQUENCES, SEED = 4, 23
LAYER_SCALE = 4.0  # of the layers' initial matrices, so that scores differ and Q and K have gradients to compare
TWICE = 2.0
FLOOR = 4 * 2.0**-24  # of the exact result's norm: sums in another order, exp and log to 2^-22

# M, N, K; rows of operands are padded to multiples of 8 with NaN.
PRODUCTS = ((1, 8, 8), (7, 97, 65), (129, 72, 200))
# Weight, sequences, T: gradients in one chain, and in parts that end within a tile and within a step of 16.
GRADIENTS = ((24, 40, 3, 41), (72, 136, 2, 530))
# T, H, G, C
HEADS = ((65, 8, 1, 32), (1, 2, 2, 64), (63, 3, 1, 64), (130, 4, 2, 128))
# rows, V, z-loss; a turn of the block is 2,048 logits
LOGITS = ((1, 8, 0.0), (7, 1000, 0.0), (5, 4104, 1e-3))


@dataclass(frozen=True, slots=True)
class Row:
    """One result: how far it is from what it should be, how far it may be, and the ratio of the two."""

    what: str  # kernel or "model"
    case: str
    error: float
    allowed: float
    ratio: float
    passed: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What the check found."""

    passed: bool
    way: str
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        """The report as one JSON object; numbers that are not finite become null."""
        values = asdict(self)
        for row in values["rows"]:
            row.update({k: None for k, v in row.items() if isinstance(v, float) and not np.isfinite(v)})
        return json.dumps(values, allow_nan=False)


def run(
    device: Device,
    way: str = "fast",
    overrides: Mapping[str, Override] | None = None,
    progress: Callable[[str], None] | None = None,
    stop_at_failure: bool = False,
) -> Report:
    """Check the fast kernels on this device; `way` may put twins in place of some, as in `fast,matmul=bf16`.

    `overrides` are kernel texts, or edits of them, by stem. `progress` is told what comes next.

    Raises:
        PtxtrainError: the way runs no operation fast.
    """
    chosen = ways.resolve(MODEL, way)
    if "fast" not in (chosen.matmul, chosen.attention, chosen.cross_entropy):
        raise PtxtrainError(f"way '{way}' runs no operation fast, so there is nothing to check")
    kernels = _Kernels(device, dict(overrides or {}))
    rows: list[Row] = []
    checks: list[tuple[str, Callable[[], Iterator[Row]]]] = []
    if chosen.matmul == "fast":
        checks += [("matmul", kernels.products), ("gradients of weights", kernels.gradients)]
    if chosen.attention == "fast":
        checks.append(("attention", kernels.attention))
    if chosen.cross_entropy == "fast":
        checks.append(("cross-entropy", kernels.cross_entropy))
    checks.append(("the model", lambda: _model(device, way, overrides)))
    for name, check in checks:
        if progress is not None:
            progress(name)
        for row in check():
            rows.append(row)
            if stop_at_failure and not row.passed:
                return Report(False, way, tuple(rows))
    return Report(all(row.passed for row in rows), way, tuple(rows))


def _row(what: str, case: str, error: float, allowed: float) -> Row:
    """NaN fails. Nothing may be off where nothing is allowed."""
    ratio = error / allowed if allowed else (0.0 if error == 0.0 else np.inf)
    return Row(what, case, error, allowed, float(ratio), bool(error <= allowed))


def _judged(what: str, case: str, fast: F64, twin: F64, exact: F64, unit: F64 | None = None) -> Row:
    """`unit`: the result whose norm the floor is a part of, by default the exact one."""
    scale = float(np.linalg.norm(exact if unit is None else unit))
    error = float(np.linalg.norm(fast - exact))
    return _row(what, case, error, TWICE * float(np.linalg.norm(twin - exact)) + FLOOR * scale)


def _bits(x: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """f32 rounded to nearest-even bf16, as bits."""
    wide = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((wide + np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def _wide(bits: npt.NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


class _Kernels:
    """Runs kernels on fresh buffers, twice, and compares what they leave."""

    def __init__(self, device: Device, overrides: dict[str, Override]) -> None:
        self.device, self.overrides = device, overrides
        self._stream = 0

    def normal(self, *shape: int, scale: float = 1.0) -> F32:
        """Normal numbers that bf16 holds."""
        self._stream += 1
        values = init.normal(SEED, philox.GRADIENT_CHECK, 1000 + self._stream, int(np.prod(shape)))
        return _wide(_bits(values * np.float32(scale))).reshape(shape)

    def run(self, record: Callable[[Recorder, _Buffers], None]) -> tuple[Found, bool]:
        """What the named buffers hold afterwards, and whether a second run gave the same bits."""
        found = []
        for _ in range(2):
            rec, buffers = Recorder(self.device, self.overrides), _Buffers(self.device)
            record(rec, buffers)
            self.device.run(rec.plan())
            found.append(buffers.read())
        first, second = found
        same = all(x.tobytes() == second[name].tobytes() for name, x in first.items())
        return {name: (_wide(x) if x.dtype == np.uint16 else x).astype(np.float64) for name, x in first.items()}, same

    @staticmethod
    def repeats(what: str, case: str, same: bool) -> Iterator[Row]:
        """A row for runs that differ; none for runs that do not."""
        if not same:
            yield Row(what, f"{case}: two runs differ", np.inf, 0.0, np.inf, False)

    def products(self) -> Iterator[Row]:
        """Each layout; f32 and bf16 out, a residual and a bias."""
        for m, n, k in PRODUCTS:
            a, b, extra, bias = self.normal(m, k), self.normal(k, n), self.normal(m, n), self.normal(n)
            for layout in ("nn", "nt", "tn"):
                yield from self._product(layout, a, b, extra, bias)

    def _product(self, layout: str, a: F32, b: F32, extra: F32, bias: F32) -> Iterator[Row]:
        (m, k), n = a.shape, b.shape[1]
        stored = [_bits(x) for x in ((a.T if layout == "tn" else a), (b.T if layout == "nt" else b))]
        padded, wide_extra = [_pad(x) for x in stored], np.zeros((m, -(-n // 8) * 8), np.float32)
        wide_extra[:, :n] = extra
        width = wide_extra.shape[1]
        shape: dict[str, Any] = {"m": m, "n": n, "k": k, "layout": layout, "dtype": "bf16"}
        fast = {**shape, "way": "fast", "strides": (width, padded[0].shape[1], padded[1].shape[1])}

        def record(rec: Recorder, put: _Buffers) -> None:
            x, y = (put.of(z) for z in padded)
            matmul.run(rec, put.out("f32", (m, width)), x, y, **fast, out_dtype="f32")
            matmul.run(rec, put.out("bf16", (m, width), np.uint16), x, y, **fast, out_dtype="bf16")
            out, residual = put.out("more", (m, width)), put.of(wide_extra)
            matmul.run(rec, out, x, y, **fast, out_dtype="f32", residual=residual, bias=put.of(bias))
            x, y = (put.of(z) for z in stored)
            matmul.run(rec, put.out("twin", (m, n)), x, y, **shape, out_dtype="f32")
            matmul.run(rec, put.out("twin_bf16", (m, n), np.uint16), x, y, **shape, out_dtype="bf16")

        found, same = self.run(record)
        found = {name: x[:, :n] for name, x in found.items()}
        exact, added = a.astype(np.float64) @ b.astype(np.float64), extra.astype(np.float64) + bias
        case = f"{layout} {m} x {n} x {k}"
        yield _judged("matmul", case, found["f32"], found["twin"], exact)
        yield _judged("matmul", f"{case} to bf16", found["bf16"], found["twin_bf16"], exact)
        yield _judged("matmul", f"{case} + residual + bias", found["more"], found["twin"] + added, exact + added)
        yield from self.repeats("matmul", case, same)

    def gradients(self) -> Iterator[Row]:
        """A weight's gradient on top of what is there, in both forms."""
        for m, n, sequences, context in GRADIENTS:
            yield from self._gradient(m, n, sequences, context)

    def _gradient(self, m: int, n: int, sequences: int, context: int) -> Iterator[Row]:
        rows = sequences * context
        a, b, start = self.normal(rows, m), self.normal(rows, n), self.normal(m, n)
        size = matmul.partial_bytes(m, n, sequences=sequences, context=context)
        sizes: dict[str, Any] = {"m": m, "n": n, "dtype": "bf16"}
        chain = {**sizes, "k": rows, "layout": "tn", "out_dtype": "f32", "accumulate": True}

        def record(rec: Recorder, put: _Buffers) -> None:
            x, y, partial = put.of(_bits(a)), put.of(_bits(b)), put.scratch(size)
            out = put.of(start, "parts")
            matmul.gradient(rec, out, x, y, partial, **sizes, rows=rows, context=context, way="fast")
            matmul.run(rec, put.of(start, "chain"), x, y, **chain, way="fast", segment=context)
            matmul.run(rec, put.of(start, "twin"), x, y, **chain)

        found, same = self.run(record)
        exact = start + a.astype(np.float64).T @ b.astype(np.float64)
        case = f"{m} x {n}, {sequences} x {context} rows"
        for form in ("parts", "chain"):
            yield _judged("gradient", f"{case}, {form}", found[form], found["twin"], exact)
        yield from self.repeats("gradient", case, same)

    def attention(self) -> Iterator[Row]:
        """Outputs, log-sum-exp and the gradients of queries, keys and values."""
        for context, heads, kv_heads, head_dim in HEADS:
            yield from self._attention(2, context, heads, kv_heads, head_dim)

    def _attention(self, batch: int, context: int, heads: int, kv_heads: int, head_dim: int) -> Iterator[Row]:
        qkv = self.normal(batch, context, heads + 2 * kv_heads, head_dim)
        dout = self.normal(batch, context, heads, head_dim)
        scores = (batch, heads, context)
        rows = {"batch": batch, "context": context, "heads": heads}
        sizes: dict[str, Any] = {**rows, "kv_heads": kv_heads, "head_dim": head_dim}

        def record(rec: Recorder, put: _Buffers) -> None:
            x, d = put.of(_bits(qkv)), put.of(_bits(dout))
            out, lse = put.out("out", dout.shape, np.uint16), put.out("lse", scores)
            flash_attention.forward(rec, out, lse, x, **sizes)
            dqkv, delta = put.out("dqkv", qkv.shape, np.uint16), put.out("delta", scores)
            flash_attention.backward(rec, dqkv, d, out, lse, x, delta, **sizes)
            out, lse = put.out("twin_out", dout.shape, np.uint16), put.out("twin_lse", scores)
            scratch = put.scratch(attention.scratch_bytes(**rows))
            attention.forward(rec, out, lse, x, scratch, **sizes, dtype="bf16")
            dqkv = put.out("twin_dqkv", qkv.shape, np.uint16)
            attention.backward(rec, dqkv, d, out, lse, x, scratch, **sizes, dtype="bf16")

        found, same = self.run(record)
        exact_out, exact_lse, exact = attention_exact(qkv.astype(np.float64), dout.astype(np.float64), heads, kv_heads)
        case = f"T {context} H {heads} G {kv_heads} C {head_dim}"
        yield _judged("attention", f"{case} out", found["out"], found["twin_out"], exact_out)
        yield _judged("attention", f"{case} lse", found["lse"], found["twin_lse"], exact_lse)
        edges = [heads, heads + kv_heads]
        every = [np.split(x, edges, axis=2) for x in (found["dqkv"], found["twin_dqkv"], exact)]
        for name, fast, twin, right in zip(("dq", "dk", "dv"), *every, strict=True):
            yield _judged("attention", f"{case} {name}", fast, twin, right, unit=exact)
        yield from self.repeats("attention", case, same)

    def cross_entropy(self) -> Iterator[Row]:
        """Losses and the logits' gradient; some rows ignored, one far from zero."""
        for rows, vocab, z_loss in LOGITS:
            yield from self._cross_entropy(rows, vocab, z_loss)

    def _cross_entropy(self, rows: int, vocab: int, z_loss: float) -> Iterator[Row]:
        logits = self.normal(rows, vocab, scale=4.0)
        logits[-1] = _wide(_bits(logits[-1] + np.float32(60)))
        targets = ((np.arange(rows) * 7919 + vocab - 1) % vocab).astype(np.int32)
        targets[2::3] = -1
        numbers = np.zeros(scalars.COUNT, np.float32)
        numbers[scalars.GRAD_SCALE] = 1 / 129
        shape: dict[str, Any] = {"rows": rows, "vocab": vocab, "z_loss": z_loss}

        def record(rec: Recorder, put: _Buffers) -> None:
            t, s = put.of(targets), put.of(numbers)
            x = put.of(_bits(logits), "gradient")
            cross_entropy.fused(rec, put.out("loss", (rows,)), put.out("lse", (rows,)), x, t, s, **shape)
            loss, lse, x = put.out("twin_loss", (rows,)), put.out("twin_lse", (rows,)), put.of(_bits(logits), "twin")
            cross_entropy.forward(rec, loss, lse, x, t, **shape, dtype="bf16")
            cross_entropy.backward(rec, x, lse, t, s, **shape, dtype="bf16")

        found, same = self.run(record)
        scale = float(numbers[scalars.GRAD_SCALE])
        right = cross_entropy_exact(logits.astype(np.float64), targets, scale, float(np.float32(z_loss)))
        case = f"{rows} x {vocab}" + (f", z-loss {z_loss:g}" if z_loss else "")
        twins = ("twin_loss", "twin_lse", "twin")
        for name, twin, exact in zip(("loss", "lse", "gradient"), twins, right, strict=True):
            yield _judged("cross_entropy", f"{case} {name}", found[name], found[twin], exact)
        yield from self.repeats("cross_entropy", case, same)


def _pad(x: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """Rows lengthened to a multiple of 8 by NaN."""
    out = np.full((x.shape[0], -(-x.shape[1] // 8) * 8), 0xFFFF, np.uint16)
    out[:, : x.shape[1]] = x
    return out


class _Buffers:
    """Device memory of one run: operands, and outputs that start full of NaN and are read back by name."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._named: dict[str, tuple[Buffer, npt.DTypeLike, tuple[int, ...]]] = {}

    def of(self, x: npt.NDArray[Any], name: str = "") -> Buffer:
        """A copy of `x`, read back if it has a name."""
        buffer = self.device.write(x)
        if name:
            self._named[name] = (buffer, x.dtype, x.shape)
        return buffer

    def out(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Buffer:
        buffer = self.scratch(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        self._named[name] = (buffer, dtype, shape)
        return buffer

    def scratch(self, nbytes: int) -> Buffer:
        buffer = self.device.alloc(max(nbytes, 4))
        self.device.fill(buffer, 0xFF)
        return buffer

    def read(self) -> dict[str, npt.NDArray[Any]]:
        return {name: self.device.read(*where) for name, where in self._named.items()}


def _config() -> Config:
    return Config(
        name="fastcheck",
        model=MODEL,
        batch=BatchConfig(sequences=SEQUENCES, micro_batch=2, leaves=1),
        optimizer=OptimizerConfig(lr=1e-3, schedule="constant"),
        train=TrainConfig(steps=1, seed=SEED),
        data=DataConfig(),
    )


def _model(device: Device, way: str, overrides: Mapping[str, Override] | None) -> Iterator[Row]:
    """Loss and every gradient of one batch in the three ways."""
    words = philox.words(SEED, philox.GRADIENT_CHECK, 0, 0, SEQUENCES * (MODEL.context + 1))
    text = (words % MODEL.vocab_size).astype(np.int32).reshape(SEQUENCES, MODEL.context + 1)
    tokens, targets = np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])
    targets[0, 3:6] = -1
    losses: dict[str, F64] = {}
    gradients: dict[str, F64] = {}
    for name, config, edits in (
        ("f32", "f32", None),
        ("bf16", "bf16", None),
        ("fast", way, overrides),
    ):
        step = TrainStep(_config(), device, way=config, overrides=edits)
        weights = init.initial_weights(MODEL, SEED)
        for tensor in step.table:
            if tensor.decay and tensor.name != "embedding":
                weights[tensor.offset : tensor.offset + tensor.size] *= np.float32(LAYER_SCALE)
        zero = np.zeros_like(weights)
        step.load(weights, zero, zero)
        step.begin(int(np.count_nonzero(targets >= 0)))
        for i in range(step.micro_batches):
            part = slice(i * step.micro_size, (i + 1) * step.micro_size)
            flat = tokens[part].reshape(-1)
            order = np.argsort(flat, kind="stable").astype(np.int32)
            starts = np.searchsorted(flat[order], np.arange(MODEL.vocab_size + 1)).astype(np.int32)
            step.micro_batch(i, tokens[part], targets[part], order, starts)
        gradients[name] = step.gradient().astype(np.float64)
        losses[name] = np.concatenate(
            [step.row_losses(tokens[i : i + 2], targets[i : i + 2]).astype(np.float64) for i in (0, 2)]
        )
    yield _apart("losses of all rows", losses)
    for tensor in step.table:
        where = slice(tensor.offset, tensor.offset + tensor.size)
        yield _apart(tensor.name, {name: gradient[where] for name, gradient in gradients.items()})


def _apart(case: str, by_way: dict[str, F64]) -> Row:
    """||fast - f32|| beside 2 ||bf16 - f32||."""
    error, own = (float(np.linalg.norm(by_way[name] - by_way["f32"])) for name in ("fast", "bf16"))
    return _row("model", case, error, TWICE * own)
