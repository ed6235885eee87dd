"""Where the kit's tests put their arrays: NumPy on the CPU device, and CuPy where there is a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "device"))  # the fake CuPy
sys.path.append(str(Path(__file__).parents[1] / "engine"))  # the models and batches of the engine's tests
from kitbench import Place

from ptxtrain.engine import kit
from ptxtrain.engine.device.base import Device


@pytest.fixture(params=["cpu", "cuda"])
def place(request: pytest.FixtureRequest, open_device_for_test: Callable[[str], Device]) -> Iterator[Place]:
    """Every kind of memory that this machine has, on a device opened once."""
    kind: str = request.param
    device = _devices.get(kind) or _devices.setdefault(kind, open_device_for_test(kind))
    with kit.on(device):
        yield Place(kind)


@pytest.fixture
def checked_place(checked_device: Device) -> Iterator[Place]:
    """NumPy arrays, whose kernels run in the checked mode."""
    with kit.on(checked_device):
        yield Place("cpu")


_devices: dict[str, Device] = {}
