"""Here `device` has a third kind: the CUDA device over the fake CuPy, which any machine can run."""

from __future__ import annotations

from collections.abc import Callable

import fake_cupy
import pytest
from fake_cupy import open_fake

from ptxtrain.engine.device.base import Device
from ptxtrain.engine.device.cuda import CudaDevice


@pytest.fixture(scope="session", params=["cpu", "fake", "cuda"])
def device(request: pytest.FixtureRequest, open_device_for_test: Callable[[str], Device]) -> Device:
    return open_fake(fake_cupy.FakeCupy()) if request.param == "fake" else open_device_for_test(request.param)


@pytest.fixture
def fake() -> fake_cupy.FakeCupy:
    return fake_cupy.FakeCupy()


@pytest.fixture
def cuda(fake: fake_cupy.FakeCupy) -> CudaDevice:
    return open_fake(fake)
