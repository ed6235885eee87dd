"""Kernels compiled by several processes: the same cache, the same code, and nothing lost whatever becomes of a helper."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from device_kernels import SCALE, write_kernel

from ptxtrain.engine.device import prebuild
from ptxtrain.engine.device.base import Launch
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.ptxcpu.module import LoadedModule
from ptxtrain.engine.signals import StopRequested

COUNT = 64
KERNELS = 6


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[subprocess.Popen[str]]:
    """An empty cache, in which every kernel is a large one; the helpers that are started."""
    monkeypatch.setenv("PTXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(prebuild, "LARGE", 1)
    helpers: list[subprocess.Popen[str]] = []
    start = prebuild._start

    def starting(count: int) -> list[subprocess.Popen[str]]:
        helpers.extend(start(count))
        return list(helpers)

    monkeypatch.setattr(prebuild, "_start", starting)
    return helpers


def _launches(device: CpuDevice, folder: Path) -> tuple[list[Launch], np.ndarray]:
    """Kernels that differ in a comment, so that each is compiled by itself."""
    x, out = device.write(np.arange(COUNT, dtype=np.float32)), device.alloc(4 * COUNT * KERNELS)
    launches = []
    for i in range(KERNELS):
        kernel = device.load(write_kernel(folder, f"// {i}\n{SCALE}", f"scale-{i}"), "scale")
        args = (out.view(4 * COUNT * i, 4 * COUNT), x, np.uint32(COUNT), np.float32(i))
        launches.append(Launch(kernel, (1, 1, 1), (COUNT, 1, 1), args))
    expected = np.outer(np.arange(KERNELS), np.arange(COUNT)).astype(np.float32)
    return launches, expected


def _holds(device: CpuDevice, launches: list[Launch], expected: np.ndarray) -> None:
    device.run(device.plan(launches))
    whole = np.empty(expected.shape, np.float32)
    for i, launch in enumerate(launches):
        whole[i] = device.read(launch.args[0], np.float32, (COUNT,))  # type: ignore[arg-type]
    assert np.array_equal(whole, expected)


def test_helpers_compile_into_the_cache_that_is_then_read(
    started: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process is held in its first kernel until a helper has done the others: they worked at the same time."""
    device, told = CpuDevice(2), []
    launches, expected = _launches(device, tmp_path)
    jobs = prebuild.large_jobs(launches)
    assert len(jobs) == KERNELS
    ready, mine = LoadedModule.ready, []

    def held(self: LoadedModule, entry: str, block: tuple[int, int, int]) -> object:
        mine.append(self)
        if len(mine) == 1:
            others = [job for job in jobs if job.module is not self]
            for _ in range(600):
                if all(job.module.is_cached(job.entry, job.block) for job in others):
                    break
                time.sleep(0.05)
        return ready(self, entry, block)

    with monkeypatch.context() as patch:
        patch.setattr(LoadedModule, "ready", held)
        by_helpers = prebuild.build(jobs, 2, lambda done, total: told.append((done, total)))
    assert by_helpers == KERNELS - 1 and len(mine) == 1
    assert told == [(k, KERNELS) for k in range(1, KERNELS + 1)]
    assert prebuild.large_jobs(launches) == []
    _holds(device, launches, expected)
    assert [helper.poll() is not None for helper in started] == [True]
    device.close()


@pytest.mark.parametrize("helper", ["nowhere/python", "/bin/true", "/bin/cat"], ids=["missing", "gone", "nonsense"])
def test_without_a_helper_that_works_everything_is_compiled_here(
    helper: str, started: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not helper.startswith("nowhere") and not Path(helper).exists():
        pytest.skip(f"there is no {helper}")
    monkeypatch.setattr(sys, "executable", helper)
    device = CpuDevice(2)
    launches, expected = _launches(device, tmp_path)
    assert prebuild.build(prebuild.large_jobs(launches), 2) == 0
    _holds(device, launches, expected)
    assert all(process.poll() is not None for process in started)
    device.close()


def test_a_stop_while_compiling_ends_the_helpers(
    started: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CpuDevice(2)
    launches, _ = _launches(device, tmp_path)

    def stopped(self: LoadedModule, entry: str, block: object) -> object:
        raise StopRequested

    with monkeypatch.context() as patch:
        patch.setattr(LoadedModule, "ready", stopped)
        with pytest.raises(StopRequested):
            device.plan(launches)
    assert len(started) == 1 and started[0].poll() is not None
    device.close()


@pytest.mark.parametrize("make", [lambda: CpuDevice(1), lambda: CpuDevice(2, checked=True)], ids=["alone", "checked"])
def test_one_thread_and_the_checked_mode_start_no_helper(
    make: Callable[[], CpuDevice], started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    device = make()
    launches, expected = _launches(device, tmp_path)
    _holds(device, launches, expected)
    assert started == []
    device.close()


def test_small_kernels_are_not_worth_a_helper(
    started: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prebuild, "LARGE", 40_000)
    device = CpuDevice(2)
    launches, expected = _launches(device, tmp_path)
    _holds(device, launches, expected)
    assert started == []
    device.close()
