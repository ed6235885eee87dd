"""Which device is opened, and that its reason is the true one."""

from __future__ import annotations

import builtins
import subprocess
import sys
from typing import Any

import pytest
from fake_cupy import FakeCupy

from ptxtrain.engine.device import cuda_errors
from ptxtrain.engine.device.choice import Choice, facts, open_device
from ptxtrain.engine.errors import DeviceError, PtxtrainError


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PTXTRAIN_DEVICE", raising=False)
    monkeypatch.delenv("PTXTRAIN_THREADS", raising=False)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    """CuPy is the fake: a machine with one good card, until the test says otherwise."""
    fake = FakeCupy()
    monkeypatch.setattr(cuda_errors, "import_cupy", lambda: fake)
    return fake


def without_cupy(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    true_import = builtins.__import__

    def imported(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "cupy" or name.startswith("cupy."):
            raise error
        return true_import(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(builtins, "__import__", imported)


def test_auto_takes_a_good_card(fake: FakeCupy) -> None:
    device, choice = open_device(None)
    assert device.kind == "cuda" and choice == Choice("cuda", "card Fake A100 with compute capability 8.0")
    assert str(choice) == "cuda: card Fake A100 with compute capability 8.0"


@pytest.mark.parametrize("wanted", [None, "auto"])
def test_auto_without_a_driver(fake: FakeCupy, wanted: str | None) -> None:
    fake.state.driver_version = 0
    device, choice = open_device(wanted)
    assert device.kind == "cpu" and choice == Choice("cpu", f"no NVIDIA driver found ({cuda_errors.LIBCUDA})")


def test_auto_with_a_weak_card(fake: FakeCupy) -> None:
    fake.state.cards = [("Fake T4", "75")]
    _, choice = open_device("auto")
    assert choice == Choice("cpu", "card Fake T4 has compute capability 7.5; the kernels need 8.0")


def test_auto_with_a_broken_driver_says_so(fake: FakeCupy) -> None:
    fake.state.count_error = 803
    _, choice = open_device("auto")
    assert choice.kind == "cpu" and "broken NVIDIA driver" in choice.reason and "\n" not in choice.reason


def test_auto_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cupy(monkeypatch, ModuleNotFoundError("No module named 'cupy'", name="cupy"))
    assert open_device("auto")[1] == Choice("cpu", "cupy is not installed")
    with pytest.raises(DeviceError, match="cupy is not installed; pip install cupy-cuda12x"):
        open_device("cuda")


def test_auto_with_a_cupy_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cupy(monkeypatch, ImportError("libcudart.so.12: cannot open shared object file\nsecond line"))
    choice = open_device("auto")[1]
    assert choice == Choice("cpu", "cupy cannot be imported (libcudart.so.12: cannot open shared object file)")


def test_cuda_that_was_asked_for_is_cuda_or_an_error(fake: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    device, choice = open_device("cuda")
    assert device.kind == "cuda" and choice.reason.startswith("asked for, card Fake A100")
    fake.state.driver_version = 0
    with pytest.raises(DeviceError, match="no NVIDIA driver found"):
        open_device("cuda")
    monkeypatch.setenv("PTXTRAIN_DEVICE", "cuda")
    with pytest.raises(DeviceError, match="no NVIDIA driver found"):
        open_device(None)


def test_cpu_that_was_asked_for_is_the_cpu(fake: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    device, choice = open_device("cpu", threads=1)
    assert device.kind == "cpu" and choice == Choice("cpu", "asked for")
    monkeypatch.setenv("PTXTRAIN_DEVICE", "cpu")
    assert open_device(None)[1] == Choice("cpu", "$PTXTRAIN_DEVICE")
    assert open_device("cuda")[1].kind == "cuda"  # an option beats the variable


def test_an_unknown_device_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PtxtrainError, match=r"^unknown device 'gpu'; choose one of auto, cuda, cpu$"):
        open_device("gpu")
    monkeypatch.setenv("PTXTRAIN_DEVICE", "tpu")
    with pytest.raises(PtxtrainError, match=r"unknown device 'tpu' in \$PTXTRAIN_DEVICE; choose one of"):
        open_device(None)


def test_facts_name_what_there_is(fake: FakeCupy) -> None:
    fake.state.cards = [("Fake T4", "75"), ("Fake A100", "80")]
    found = dict(facts())
    assert found["device"] == "cuda: card Fake A100 with compute capability 8.0"
    assert found["card 0"] == "Fake T4, compute capability 7.5, 0.1 GiB, too weak: the kernels need 8.0"
    assert found["card 1"] == "Fake A100, compute capability 8.0, 0.1 GiB"
    assert found["driver"].endswith("for CUDA 12.4") and found["cupy"] == "14.2.0, with the runtime of CUDA 12.9"
    for name in ("cpu", "cpu features", "threads", "llvmlite", "nvrtc", "numpy", "kernel cache", "python"):
        assert found[name] and "\n" not in found[name], name


def test_facts_survive_a_machine_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cupy(monkeypatch, ModuleNotFoundError("No module named 'cupy'", name="cupy"))
    monkeypatch.setenv("PTXTRAIN_DEVICE", "cuda")
    found = dict(facts())
    assert found["device"].startswith("none: cupy is not installed") and found["cupy"].startswith(
        "cupy is not installed"
    )
    monkeypatch.setenv("PTXTRAIN_DEVICE", "toaster")
    assert "unknown device 'toaster'" in dict(facts())["device"]


def test_importing_the_choice_is_light() -> None:
    """`--help` must answer at once, so nothing heavy is imported before a device is opened."""
    code = "import sys, ptxtrain.engine.device.choice; print([m for m in ('cupy', 'llvmlite') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
