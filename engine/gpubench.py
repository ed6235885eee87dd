"""Measurements of the CUDA device, beside NVIDIA's own libraries in the same run.

Peers: cuBLAS through CuPy for products, `scaled_dot_product_attention` through PyTorch, a copy within the device's memory
for kernels that memory bounds. A peer that is not installed is left out and named in the notes. Times are the device's
own, between two events, the best of three.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptxtrain.engine.config import Config, ModelConfig
from ptxtrain.engine.device.base import Buffer
from ptxtrain.engine.device.cuda import CudaDevice
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import adamw, cross_entropy, flash_attention, matmul, rmsnorm, scalars, swiglu
from ptxtrain.engine.stepbench import StepTimes
from ptxtrain.engine.stepbench import measure as measure_step

SECONDS = 0.05  # of work between two events
TRIES = 3
SQUARE = 4096  # sides of the square products
ELEMENTS = 1 << 28  # of the f32 arrays of the kernels that memory bounds, past every cache


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. Rates are in `unit`; `peer` is None where the peer is missing."""

    group: str  # "products", "attention" or "memory"
    case: str
    ours: float
    peer: float | None
    peer_name: str
    unit: str

    @property
    def ratio(self) -> float | None:
        """Above 1: ours is faster."""
        return None if not self.peer else self.ours / self.peer


@dataclass(slots=True)
class GpuBench:
    """All rows, the step, and what was left out and why."""

    device: str
    rows: list[Row] = field(default_factory=list)
    step: StepTimes | None = None
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The report as `ptxtrain bench --device cuda --json` prints it."""
        return {
            "device": self.device,
            "rows": [
                {
                    "group": row.group,
                    "case": row.case,
                    "ours": round(row.ours, 2),
                    "peer": None if row.peer is None else round(row.peer, 2),
                    "peer_name": row.peer_name,
                    "unit": row.unit,
                    "ratio": None if row.ratio is None else round(row.ratio, 3),
                }
                for row in self.rows
            ],
            "step": None if self.step is None else self.step.to_json(),
            "notes": self.notes,
        }


def measure(device: CudaDevice, config: Config, progress: Callable[[str], None] = lambda _: None) -> GpuBench:
    """Everything, with the shapes of a config's micro-batch. A minute or two on a large GPU.

    Raises:
        DeviceError: the GPU failed, or has too little memory.
    """
    bench = _Bench(device, config, GpuBench(device.name))
    progress("products, and cuBLAS")
    bench.products()
    progress("attention, and scaled_dot_product_attention")
    bench.attention()
    progress("kernels that memory bounds, and a copy")
    bench.memory(ELEMENTS)
    progress(f"a step of {config.name}")
    bench.report.step = measure_step(device, config)
    return bench.report


def product_shapes(config: Config) -> list[tuple[str, int, int, int, str]]:
    """(layout, m, n, k, dtype of out): square ones, and those of a layer and of the head."""
    model = config.model
    rows, width, vocab = config.batch.micro_batch * model.context, model.width, model.vocab_size
    wide = 2 * model.mlp_width
    head = min(rows, 8192)
    return [
        *((layout, SQUARE, SQUARE, SQUARE, "f32") for layout in ("nn", "nt", "tn")),
        ("nn", rows, wide, width, "bf16"),
        ("nt", rows, width, wide, "bf16"),
        ("tn", width, wide, rows, "f32"),
        ("nt", head, vocab, width, "bf16"),
        ("nn", head, width, vocab, "bf16"),
        ("tn", vocab, width, head, "f32"),
    ]


class _Bench:
    """One run: the device, what it measures with, and the report that grows."""

    def __init__(self, device: CudaDevice, config: Config, report: GpuBench) -> None:
        self.device, self.config, self.report = device, config, report

    def seconds(self, work: Callable[[], object]) -> float:
        """The device's seconds for what `work` queues."""
        work()
        repeats = max(1, int(SECONDS / max(self._between(work, 1), 1e-6)))
        return min(self._between(work, repeats) for _ in range(TRIES)) / repeats

    def _between(self, work: Callable[[], object], repeats: int) -> float:
        before = self.device.record()
        for _ in range(repeats):
            work()
        after = self.device.record()
        after.wait()
        return after.since(before)

    def plan_seconds(self, rec: Recorder) -> float:
        """Of what has been recorded."""
        plan = rec.plan()
        return self.seconds(lambda: self.device.run(plan))

    def random_bf16(self, count: int) -> Buffer:
        """Numbers between 0.0078 and 2 of either sign: products neither overflow nor vanish."""
        bits = np.random.default_rng(count).integers(0x3C00, 0x4000, count, np.uint16)
        return self.device.write(bits | (bits << 15))

    # Products

    def products(self) -> None:
        """TFLOP/s of ours and of cuBLAS, and that both mean the same product."""
        with _blas(self.device, self.report.notes) as blas:
            for layout, m, n, k, out_dtype in product_shapes(self.config):
                a, b = self.random_bf16(m * k), self.random_bf16(n * k)
                size = 4 if out_dtype == "f32" else 2
                out, theirs = self.device.alloc(size * m * n), self.device.alloc(size * m * n)
                rec = Recorder(self.device)
                matmul.run(
                    rec, out, a, b, m=m, n=n, k=k, layout=layout, dtype="bf16", out_dtype=out_dtype, way="fast"
                )  # fmt: skip
                ours, peer = self.plan_seconds(rec), None
                if blas is not None:
                    peer = self.seconds(
                        lambda blas=blas, args=(theirs, a, b, m, n, k, layout, out_dtype): blas.product(*args)  # type: ignore[misc]
                    )
                    self._agree(out, theirs, out_dtype, f"{layout} {m} x {n} x {k}")
                tera = 2 * m * n * k / 1e12
                self.report.rows.append(
                    Row(
                        "products",
                        f"{layout} {m} x {n} x {k} -> {out_dtype}",
                        tera / ours,
                        None if peer is None else tera / peer,
                        "cuBLAS",
                        "TFLOP/s",
                    )
                )

    def _agree(self, ours: Buffer, theirs: Buffer, dtype: str, case: str) -> None:
        """Compare the first numbers of both outputs; a difference beyond rounding makes the comparison void."""
        count = min(4096, ours.nbytes // (4 if dtype == "f32" else 2))
        found = []
        for buffer in (ours, theirs):
            if dtype == "f32":
                found.append(self.device.read(buffer, np.float32, (count,)))
            else:
                bits = self.device.read(buffer, np.uint16, (count,)).astype(np.uint32) << 16
                found.append(bits.view(np.float32))
        scale = float(np.abs(found[1]).max())
        off = float(np.abs(found[0] - found[1]).max())
        if not off <= 2e-2 * scale:
            self.report.notes.append(f"product {case}: ours and cuBLAS differ by {off:.3g} of {scale:.3g}")

    # Attention

    def attention(self) -> None:
        """TFLOP/s over the causal half, forward and backward, at the config's shape and at four times its T."""
        model, batch = self.config.model, self.config.batch.micro_batch
        torch = self._torch()
        for context, sequences in ((model.context, batch), (4 * model.context, max(1, batch // 4))):
            ours = self._our_attention(model, sequences, context)
            theirs: tuple[float | None, float | None] = (None, None)
            if torch is not None:
                theirs = sdpa_seconds(torch, "cuda", model, sequences, context)
            flops = 2 * sequences * model.heads * context * context * model.head_dim  # of the two causal products
            for what, factor, our, peer in zip(("forward", "backward"), (1.0, 2.5), ours, theirs, strict=True):
                tera = factor * flops / 1e12
                case = f"{what}, B {sequences} T {context} H {model.heads} G {model.kv_heads} C {model.head_dim}"
                rate = None if peer is None else tera / peer
                self.report.rows.append(
                    Row("attention", case, tera / our, rate, "scaled_dot_product_attention", "TFLOP/s")
                )

    def _torch(self) -> Any | None:
        """PyTorch with a GPU, or None and a note."""
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            self.report.notes.append("PyTorch is not installed: no scaled_dot_product_attention beside ours")
            return None
        if not torch.cuda.is_available():
            self.report.notes.append("this PyTorch sees no GPU: no scaled_dot_product_attention beside ours")
            return None
        return torch

    def _our_attention(self, model: ModelConfig, sequences: int, context: int) -> tuple[float, float]:
        rows, width = sequences * context, model.heads * model.head_dim
        qkv_width = width + 2 * model.kv_heads * model.head_dim
        qkv, d_out = self.random_bf16(rows * qkv_width), self.random_bf16(rows * width)
        out, d_qkv = self.device.alloc(2 * rows * width), self.device.alloc(2 * rows * qkv_width)
        lse, delta = self.device.alloc(4 * rows * model.heads), self.device.alloc(4 * rows * model.heads)
        shape = {
            "batch": sequences,
            "context": context,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
        }
        rec = Recorder(self.device)
        flash_attention.forward(rec, out, lse, qkv, **shape)
        forward = self.plan_seconds(rec)
        flash_attention.backward(rec, d_qkv, d_out, out, lse, qkv, delta, **shape)
        return forward, self.plan_seconds(rec)

    # Memory

    def memory(self, elements: int) -> None:
        """GB/s of kernels that memory bounds, beside a copy within the device's memory."""
        device, size = self.device, 4 * elements
        buffers = [device.alloc(size) for _ in range(5)]
        for buffer in buffers:
            device.fill(buffer, 0)
        copied = 2 * size / self.seconds(lambda: device.copy(buffers[0], buffers[1], size)) / 1e9
        self.report.rows.append(Row("memory", "copy within the device", copied, None, "", "GB/s"))
        for name, moved, rec in self._small_kernels(buffers, elements):
            rate = moved / self.plan_seconds(rec) / 1e9
            self.report.rows.append(Row("memory", name, rate, copied, "copy", "GB/s"))

    def _small_kernels(self, buffers: list[Buffer], elements: int) -> Iterator[tuple[str, int, Recorder]]:
        """(name, bytes that must move, launch) of each kernel, as the fast way of the config runs it."""
        device, model, rec = self.device, self.config.model, Recorder(self.device)
        width, vocab, size = model.width, model.vocab_size, 4 * elements
        rows = elements // width
        rmsnorm.forward(
            rec, buffers[0], buffers[2], buffers[1], buffers[3], rows=rows, width=width, eps=1e-5, dtype="bf16"
        )  # fmt: skip
        yield "rmsnorm forward, f32 in, bf16 out", rows * (6 * width + 4), rec
        half = elements // model.mlp_width
        swiglu.forward(rec, buffers[0], buffers[1], rows=half, width=model.mlp_width, dtype="bf16")
        yield "swiglu forward, bf16", half * 6 * model.mlp_width, rec
        heads = min(elements * 2 // vocab, 1 << 16)
        targets = device.write(np.zeros(heads, np.int32))
        numbers = np.zeros(scalars.COUNT, np.float32)
        numbers[[scalars.LR, scalars.BIAS1, scalars.BIAS2, scalars.CLIP, scalars.GRAD_SCALE]] = 1e-3, 0.5, 0.5, 1.0, 1.0
        step = device.write(numbers)
        cross_entropy.fused(rec, buffers[1], buffers[2], buffers[0], targets, step, rows=heads, vocab=vocab, z_loss=0.0)
        yield "cross_entropy, loss and gradient, bf16", heads * 4 * vocab, rec
        params, m, v, grads, copy = buffers
        adamw.update(
            rec, params, m, v, copy, grads, step, count=elements, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1
        )  # fmt: skip
        yield "adamw, with the bf16 copy", 7 * size + size // 2, rec


# Peers


@contextmanager
def _blas(device: CudaDevice, notes: list[str]) -> Iterator[_Blas | None]:
    """cuBLAS on the device's queue, or None and a note."""
    try:
        library = device.cublas()
    except ImportError as error:
        notes.append(f"CuPy finds no cuBLAS ({str(error).splitlines()[0]}): pip install nvidia-cublas-cu12")
        yield None
        return
    blas = _Blas(device, library)
    try:
        yield blas
    finally:
        blas.close()


class _Blas:
    """Products of bf16 matrices by cublasGemmEx, f32 sums. cuBLAS has columns first, so it multiplies out^T = b^T a^T."""

    def __init__(self, device: CudaDevice, library: Any) -> None:
        self._device, self._library = device, library
        with device.calling("opening cuBLAS"):
            self._handle = library.create()
            library.setStream(self._handle, device.stream)
            library.setPointerMode(self._handle, library.CUBLAS_POINTER_MODE_HOST)
        self._one, self._zero = np.ones(1, np.float32), np.zeros(1, np.float32)

    def product(self, out: Buffer, a: Buffer, b: Buffer, m: int, n: int, k: int, layout: str, out_dtype: str) -> None:
        """Queue out = a @ b in one of our layouts."""
        library, bf16, f32 = self._library, 14, 0  # CUDA_R_16BF, CUDA_R_32F of library_types.h
        plain, turned = library.CUBLAS_OP_N, library.CUBLAS_OP_T
        with self._device.calling("multiplying with cuBLAS"):
            library.gemmEx(
                self._handle,
                turned if layout == "nt" else plain,
                turned if layout == "tn" else plain,
                n,
                m,
                k,
                self._one.ctypes.data,
                b.ptr,
                bf16,
                k if layout == "nt" else n,
                a.ptr,
                bf16,
                m if layout == "tn" else k,
                self._zero.ctypes.data,
                out.ptr,
                f32 if out_dtype == "f32" else bf16,
                n,
                library.CUBLAS_COMPUTE_32F,
                library.CUBLAS_GEMM_DEFAULT,
            )

    def close(self) -> None:
        with self._device.calling("closing cuBLAS"):
            self._library.destroy(self._handle)


def sdpa_seconds(
    torch: Any, kind: str, model: ModelConfig, sequences: int, context: int, tries: int = 20
) -> tuple[float, float]:
    """Forward and backward seconds of causal `scaled_dot_product_attention` in bf16, [B, H, T, C] each, the best of `tries`.

    `kind` is PyTorch's device, "cuda" to compare with ours.
    """

    def made(heads: int) -> Any:
        shape = (sequences, heads, context, model.head_dim)
        return torch.randn(shape, device=kind, dtype=torch.bfloat16, requires_grad=True)

    q, k, v = made(model.heads), made(model.kv_heads), made(model.kv_heads)
    d_out = made(model.heads).detach()
    grouped = model.heads != model.kv_heads
    wait: Callable[[], Any] = torch.cuda.synchronize if kind == "cuda" else lambda: None

    def forward() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def timed(work: Callable[[], Any], inner: int = 10) -> float:
        """Ten in a row, so that a launch's overhead hides behind the one before it."""
        best = float("inf")
        for _ in range(tries):
            wait()
            start = time.perf_counter()
            for _ in range(inner):
                work()
            wait()
            best = min(best, (time.perf_counter() - start) / inner)
        return best

    out = forward()
    both = timed(lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True))
    with torch.no_grad():
        return timed(forward), both
