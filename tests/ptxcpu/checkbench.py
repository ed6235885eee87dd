"""What the tests of the checked mode share: kernels from CUDA C, planted mistakes that must be found, twins that must not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from ptxtrain.engine.device.nvrtc import compile_to_ptx
from ptxtrain.engine.ptxcpu.checked.report import CheckError
from ptxtrain.engine.ptxcpu.checked.schedule import Schedule
from ptxtrain.engine.ptxcpu.module import LoadedModule, load

SCHEDULES = ("forward", "reverse", "random:1", "random:2")
Args = Sequence[Any]


@cache
def ptx(source: str, arch: str = "compute_80") -> str:
    """What NVRTC makes of `extern "C"` kernels."""
    return compile_to_ptx(source, "kernel.cu", arch=arch)


@cache
def _module(text: str, checked: bool) -> LoadedModule:
    return load(text if text.lstrip().startswith(".version") else ptx(text), checked=checked)


def module(text: str, schedule: str | None = "forward") -> LoadedModule:
    """PTX, or CUDA C if it does not start as PTX; without a schedule unchecked."""
    found = _module(text, schedule is not None)
    found.schedule = Schedule.parse(schedule) if schedule else None
    return found


def launch(
    text: str, args: Args, *, entry: str = "k", grid: int = 1, block: int = 32, shared: int = 0,
    schedule: str | None = "forward",
) -> None:  # fmt: skip
    grid3 = (grid, 1, 1) if isinstance(grid, int) else grid
    block3 = (block, 1, 1) if isinstance(block, int) else block
    module(text, schedule).launch(entry, grid=grid3, block=block3, args=args, shared=shared)


def finds(text: str, args: Args, *kinds: str, **options: Any) -> CheckError:
    """Launch a kernel with a mistake in every order; the forward order's finding. Arrays are fresh copies each time.

    What is found may be any of `kinds`: a value may be read before it is written, or after and with no barrier between.
    """
    errors: list[CheckError] = []
    for schedule in SCHEDULES:
        given = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
        with pytest.raises(CheckError) as caught:
            launch(text, given, schedule=schedule, **options)
        errors.append(caught.value)
    for schedule, error in zip(SCHEDULES, errors, strict=True):
        assert error.kind in kinds and "\n" not in str(error), (schedule, str(error))
    return errors[0]


def clean(text: str, args: Args, **options: Any) -> list[Any]:
    """Launch a right kernel in every order and unchecked: nothing is found, and all give the same bits. The arrays."""
    results: list[list[Any]] = []
    for schedule in (None, *SCHEDULES):
        given = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
        launch(text, given, schedule=schedule, **options)
        results.append(given)
    for schedule, found in zip(SCHEDULES, results[1:], strict=True):
        for a, b in zip(results[0], found, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), f"{schedule} order: other bits"
    return results[0]


def floats(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
