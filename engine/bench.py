"""Measurements of the CPU device, each as a ratio to a peer taken in the same run, because machines are noisy.

Peers: OpenBLAS `sgemm` through NumPy; the fastest of three copies (memcpy, our own vector stores, our own non-temporal
stores). Times are the best of several, on the given number of threads.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ptxtrain.engine.cache import cache_dir
from ptxtrain.engine.device.base import Buffer, Launch, Plan
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.kernels import Recorder
from ptxtrain.engine.ops import adamw, matmul, rmsnorm, scalars, swiglu

SIZE = 1024  # of the square product
ELEMENTS = 1 << 25  # of an f32 array of the element-wise kernels: 128 MiB, past every cache that a core has
ROW = 1024
LAUNCHES = 1000


@dataclass(slots=True)
class CpuBench:
    """`ratios` by name (above 1 is faster than the peer), the rates behind them, and the costs of a launch and a load."""

    ratios: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)  # GFLOP/s and GB/s
    launch_us: float = 0.0
    load_ms: float = 0.0
    compile_s: float = 0.0
    products: str = ""
    threads: int = 0

    def to_json(self) -> dict[str, Any]:
        """The report as `ptxtrain bench --cpu-device --json` prints it."""
        return {
            "ratios": {name: round(value, 3) for name, value in self.ratios.items()},
            "rates": {name: round(value, 1) for name, value in self.rates.items()},
            "launch_us": round(self.launch_us, 2),
            "load_ms": round(self.load_ms, 2),
            "compile_s": round(self.compile_s, 2),
            "bf16_products": self.products,
            "threads": self.threads,
        }


def best(work: Callable[[], object], *, seconds: float = 1.0, least: int = 3) -> float:
    """The shortest of as many runs as fit in `seconds`, after one that does not count."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _run(device: CpuDevice, plan: Plan) -> None:
    device.run(plan)
    device.synchronize()


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """An environment variable set, or absent, for a while."""
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def measure(threads: int, progress: Callable[[str], None] = lambda _: None) -> CpuBench:
    """All figures. Takes about a minute."""
    from ptxtrain.engine.ptxcpu.jit import bf16_products

    report = CpuBench(products=bf16_products(), threads=threads)
    progress("product of 1024 x 1024 bf16 matrices, and sgemm")
    _products(report, threads)
    progress("element-wise kernels, and copies")
    _element_wise(report, threads)
    progress("decoding and reading prompts, beside reading memory")
    _decoding(report, threads)
    progress("launches, loading, compiling")
    _overheads(report, threads)
    return report


# Products


def _products(report: CpuBench, threads: int) -> None:
    flops = 2 * SIZE**3
    rng = np.random.default_rng(0)
    x = rng.standard_normal((SIZE, SIZE), np.float32)
    out = np.empty_like(x)
    sgemm = best(lambda: np.matmul(x, x, out=out))
    report.rates["sgemm"] = flops / sgemm / 1e9
    for name, way in (("matmul_bf16_1024_vs_sgemm", None), ("matmul_bf16_1024_fma_vs_sgemm", "fma")):
        with _environment("PTXTRAIN_CPU", way) if way else _unchanged():
            took = _product_time(threads, x)
        # Taken again, because the machine may be busier than a moment ago.
        sgemm = min(sgemm, best(lambda: np.matmul(x, x, out=out), seconds=0.5))
        report.ratios[name] = sgemm / took
        report.rates[name.replace("_vs_sgemm", "")] = flops / took / 1e9
    # The layouts whose tiles are read transposed, in turns with the plain one.
    times = {layout: float("inf") for layout in ("nn", "nt", "tn")}
    for _ in range(2):
        for layout, best_so_far in times.items():
            times[layout] = min(best_so_far, _product_time(threads, x, layout, seconds=0.4))
    for layout in ("nt", "tn"):
        report.ratios[f"matmul_bf16_1024_{layout}_vs_nn"] = times["nn"] / times[layout]


@contextmanager
def _unchanged() -> Iterator[None]:
    yield


def _product_time(threads: int, x: np.ndarray[Any, Any], layout: str = "nn", seconds: float = 1.0) -> float:
    device = CpuDevice(threads)
    try:
        bits = (x.view(np.uint32) >> 16).astype(np.uint16)
        a, b, out = device.write(bits), device.write(bits), device.alloc(4 * SIZE * SIZE)
        rec = Recorder(device)
        matmul.run(
            rec, out, a, b, m=SIZE, n=SIZE, k=SIZE, layout=layout, dtype="bf16", out_dtype="f32", way="fast"
        )  # fmt: skip
        plan = rec.plan()
        return best(partial(_run, device, plan), seconds=seconds)
    finally:
        device.close()


# Element-wise kernels


_COPY = """// copy: out = x, 16 bytes a thread
.version 7.0
.target sm_80
.address_size 64
.visible .entry copy(.param .u64 out, .param .u64 x)
{
    .reg .u64 %out, %x, %at;
    .reg .u32 %i, %block, %thread, %threads;
    .reg .b32 %v<4>;
    ld.param.u64 %out, [out];
    ld.param.u64 %x, [x];
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %i, %block, %threads, %thread;
    mul.wide.u32 %at, %i, 16;
    add.u64 %out, %out, %at;
    add.u64 %x, %x, %at;
    ld.global.v4.b32 {%v0, %v1, %v2, %v3}, [%x];
    STORE [%out], {%v0, %v1, %v2, %v3};
    ret;
}
"""


def _element_wise(report: CpuBench, threads: int) -> None:
    device = CpuDevice(threads)
    try:
        buffers = [device.alloc(4 * ELEMENTS) for _ in range(5)]
        for buffer in buffers:
            device.fill(buffer, 0)
        device.synchronize()
        copy = _copy_rate(report, device, threads, buffers)
        for name, moved, plan in _kernels(device, buffers):
            took = best(partial(_run, device, plan))
            report.rates[name] = moved / took / 1e9
            report.ratios[f"{name}_vs_copy"] = moved / took / copy
    finally:
        device.close()


def _copy_rate(report: CpuBench, device: CpuDevice, threads: int, buffers: list[Buffer]) -> float:
    """Bytes read and written per second by the fastest copy."""
    nbytes = 4 * ELEMENTS
    rates = {"memcpy": 2 * nbytes / best(lambda: _memcpy(buffers[0], buffers[1], nbytes, threads))}
    for name, store in (("stores", "st.global.v4.b32"), ("streaming", "st.global.cs.v4.b32")):
        path = cache_dir("kernels") / f"bench-copy-{name}.ptx"
        path.write_text(_COPY.replace("STORE", store))
        kernel = device.load(path, "copy")
        grid = (ELEMENTS // 4 // 256, 1, 1)
        plan = device.plan([Launch(kernel, grid, (256, 1, 1), (buffers[0], buffers[1]))])
        rates[name] = 2 * nbytes / best(partial(_run, device, plan))
    report.rates.update({f"copy_{name}": rate / 1e9 for name, rate in rates.items()})
    return max(rates.values())


def _memcpy(out: Buffer, x: Buffer, nbytes: int, threads: int) -> None:
    share = nbytes // threads
    parts = [
        threading.Thread(target=ctypes.memmove, args=(out.ptr + i * share, x.ptr + i * share, share))
        for i in range(threads)
    ]
    for part in parts:
        part.start()
    for part in parts:
        part.join()


def _kernels(device: CpuDevice, buffers: list[Buffer]) -> Iterator[tuple[str, int, Plan]]:
    """(name, bytes that must move, plan) of each kernel, on f32."""
    rows, size = ELEMENTS // ROW, 4 * ELEMENTS
    rec = Recorder(device)
    half = rows // 2
    swiglu.forward(rec, buffers[0], buffers[1], rows=half, width=ROW, dtype="f32")
    yield "swiglu", 3 * size // 2, rec.plan()
    numbers = np.zeros(scalars.COUNT, np.float32)
    numbers[[scalars.LR, scalars.BIAS1, scalars.BIAS2, scalars.CLIP]] = 1e-3, 0.5, 0.5, 1.0
    step = device.write(numbers)
    params, m, v, grads, copy = buffers
    adamw.update(
        rec, params, m, v, copy, grads, step, count=ELEMENTS, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1
    )  # fmt: skip
    # Parameters, m and v are read and written, the gradient is read, the bf16 copy written.
    yield "adamw", 7 * size + size // 2, rec.plan()
    rmsnorm.forward(rec, buffers[0], buffers[2], buffers[1], buffers[3], rows=rows, width=ROW, eps=1e-5, dtype="f32")
    yield "rmsnorm", 2 * size, rec.plan()


# A model


def _decoding(report: CpuBench, threads: int) -> None:
    from ptxtrain.engine import decodebench
    from ptxtrain.engine.config import load_preset

    times = decodebench.measure(load_preset("dev").model, threads)
    report.ratios.update(times.ratios)
    report.rates.update(times.rates)


# Overheads


def _overheads(report: CpuBench, threads: int) -> None:
    from ptxtrain.engine.ptxcpu import jit
    from ptxtrain.engine.ptxcpu.module import load
    from ptxtrain.ptx import render
    from ptxtrain.ptx.matmul_spec import MatmulSpec

    device = CpuDevice(threads)
    try:
        path = cache_dir("kernels") / "bench-copy-stores.ptx"
        kernel = device.load(path, "copy")
        small = device.alloc(1 << 16)
        launch = Launch(kernel, (2, 1, 1), (256, 1, 1), (small.view(0, 1 << 15), small.view(1 << 15, 1 << 15)))
        plan = device.plan([launch] * LAUNCHES)
        took = best(partial(_run, device, plan), seconds=0.5)
        report.launch_us = took / LAUNCHES * 1e6
    finally:
        device.close()
    text = render.render("matmul", MatmulSpec())
    module = load(text)
    start = time.perf_counter()
    ir = module.ir("matmul", MatmulSpec().block)
    lowered = time.perf_counter() - start
    start = time.perf_counter()
    jit.compile_object(ir)
    report.compile_s = time.perf_counter() - start + lowered
    jit.load(ir, ("run",))
    report.load_ms = 1e3 * best(lambda: jit.load(ir, ("run",)), seconds=0.3)


def cpu_threads() -> int:
    """Two, as the targets are stated for, or one on a machine with one core."""
    return min(2, os.cpu_count() or 1)
