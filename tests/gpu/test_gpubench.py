"""`ptxtrain bench --device cuda` over the fake CuPy: every call is one that CuPy takes, and the report is whole."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import on_fake
import pytest
from fake_cupy import FakeCupy, open_fake

from ptxtrain.engine import gpubench
from ptxtrain.engine.config import Config, load_preset
from ptxtrain.engine.device.cuda import CudaDevice

SMALL = (
    *("vocab_size=512", "context=64", "layers=1", "width=64", "heads=2", "kv_heads=1", "mlp_width=96"),
    *("sequences=2", "micro_batch=1", "leaves=2"),
)


@pytest.fixture(scope="module")
def config() -> Config:
    return load_preset("tiny", SMALL)


@pytest.fixture
def fake() -> Iterator[FakeCupy]:
    fake = FakeCupy()
    fake.state.memory = 256 << 20
    return fake


def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def refuse(name: str, package: str | None = None) -> Any:
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", refuse)


def measure(device: CudaDevice, config: Config) -> gpubench.GpuBench:
    with pytest.MonkeyPatch.context() as patch:
        on_fake.shrink(patch.setattr)
        return gpubench.measure(device, config)


def test_every_row_is_there_and_a_missing_peer_is_named(
    fake: FakeCupy, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_torch(monkeypatch)
    report = measure(open_fake(fake), config)
    cases = [(row.group, row.peer is not None) for row in report.rows]
    assert cases == [("products", True)] * 9 + [("attention", False)] * 4 + [("memory", False)] + [("memory", True)] * 4
    assert all(row.ours > 0 for row in report.rows)
    assert report.notes == ["PyTorch is not installed: no scaled_dot_product_attention beside ours"]
    assert report.step is not None and report.step.tokens == 128 and "attention_dkv" in report.step.kernels
    assert fake.state.log.count("gemm") >= 9 and "copy" in fake.state.log
    assert set(report.to_json()) == {"device", "rows", "step", "notes"}


def test_without_cublas_our_products_are_measured_alone(
    fake: FakeCupy, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_torch(monkeypatch)

    def missing(self: CudaDevice) -> Any:
        raise ImportError("Failure finding libcublasLt.so.12\nNo such file")

    monkeypatch.setattr(CudaDevice, "cublas", missing)
    report = measure(open_fake(fake), config)
    assert [row.peer for row in report.rows if row.group == "products"] == [None] * 9
    assert report.notes[0] == "CuPy finds no cuBLAS (Failure finding libcublasLt.so.12): pip install nvidia-cublas-cu12"


def test_a_peer_that_computes_something_else_is_told(
    fake: FakeCupy, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cuBLAS that multiplied with the wrong layout would make the ratio meaningless."""
    without_torch(monkeypatch)
    real = gpubench._Blas.product

    def wrong(self: Any, out: Any, a: Any, b: Any, m: int, n: int, k: int, layout: str, out_dtype: str) -> None:
        real(
            self, out, a, b, m, n, k, {"nn": "nt", "nt": "nn", "tn": "tn"}[layout] if m == n == k else layout, out_dtype
        )

    monkeypatch.setattr(gpubench._Blas, "product", wrong)
    notes = measure(open_fake(fake), config).notes
    assert [note.split(":")[0] for note in notes[:2]] == ["product nn 128 x 128 x 128", "product nt 128 x 128 x 128"]


def test_attention_in_pytorch_is_timed(config: Config) -> None:
    """On the CPU, so that the calls are PyTorch's own; skipped where PyTorch is not installed."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed (pip install torch)")
    forward, backward = gpubench.sdpa_seconds(torch, "cpu", config.model, 2, 64, tries=1)
    assert forward > 0 and backward > 0
