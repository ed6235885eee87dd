"""What all tests share: the devices, and one kernel cache for the whole run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.errors import DeviceError

# Whoever runs the tests may ignore hang-ups (nohup) or interrupts (a shell's background job), and what is ignored stays so in
# every process that a test starts.
for _number in (signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL if _number != signal.SIGINT else signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Compiled kernels go to `build/test-cache`, shared by xdist's workers and by later runs, never to the user's cache.

    Entries are named after everything that they are made from, so an edit is compiled anew. Subprocesses inherit it.
    """
    os.environ.setdefault("PTXTRAIN_CACHE", str(Path(__file__).parents[1] / "build" / "test-cache"))


def _open(kind: str) -> Device:
    if kind == "cpu":
        from ptxtrain.engine.device.cpu import CpuDevice

        return CpuDevice()
    from ptxtrain.engine.device.cuda import CudaDevice

    try:
        return CudaDevice()
    except DeviceError as error:
        pytest.skip(f"no CUDA device: {error}")


@pytest.fixture(scope="session")
def open_device_for_test() -> Callable[[str], Device]:
    """Opens the device of a kind, or skips with the reason why there is none."""
    return _open


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> Device:
    """Every device that this machine has; tests that take it run once on each."""
    return _open(request.param)


@pytest.fixture(scope="session")
def checked_device() -> Device:
    """The CPU device in its checked mode: what it finds in a kernel fails the test."""
    from ptxtrain.engine.device.cpu import CpuDevice

    return CpuDevice(checked=True)
