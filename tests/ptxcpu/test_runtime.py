"""The pool of workers: lists of launches are finished whoever comes, and nobody is left inside one that is over."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ptxtrain.engine.device.base import Launch, Plan
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.ptxcpu import runtime

# Each block takes its numbers plus 1 from its right neighbour's of the launch before, so that a launch needs all of the last one.
TURN = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry turn(.param .u64 out, .param .u64 from, .param .u32 size)
{
    .reg .u64 %out, %from, %at;
    .reg .u32 %i, %size, %block, %lane, %x;
    ld.param.u64 %out, [out];
    ld.param.u64 %from, [from];
    ld.param.u32 %size, [size];
    mov.u32 %block, %ctaid.x;
    mov.u32 %lane, %tid.x;
    mad.lo.u32 %i, %block, 32, %lane;
    mul.wide.u32 %at, %i, 4;
    add.u64 %out, %out, %at;
    add.u32 %i, %i, 32;
    rem.u32 %i, %i, %size;
    mul.wide.u32 %at, %i, 4;
    add.u64 %from, %from, %at;
    ld.global.u32 %x, [%from];
    add.u32 %x, %x, 1;
    st.global.u32 [%out], %x;
    ret;
}
"""
BLOCKS, LAUNCHES = 37, 60


def plan_of(device: CpuDevice, folder: Path) -> tuple[Plan, object]:
    """LAUNCHES turns of BLOCKS blocks between two buffers of zeros, and the one that the last writes to."""
    path = folder / "turn.ptx"
    path.write_text(TURN)
    kernel = device.load(path, "turn")
    size = 32 * BLOCKS
    buffers = [device.write(np.zeros(size, np.uint32)) for _ in range(2)]
    launches = [
        Launch(kernel, (BLOCKS, 1, 1), (32, 1, 1), (buffers[i % 2], buffers[1 - i % 2], np.uint32(size)))
        for i in range(LAUNCHES)
    ]
    return device.plan(launches), buffers[(LAUNCHES - 1) % 2]


def run(device: CpuDevice, plan: Plan, out: object, expected: int) -> None:
    device.run(plan)
    found = device.read(out, np.uint32, (32 * BLOCKS,))  # type: ignore[arg-type]
    assert (found == expected).all(), np.unique(found)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_launch_sees_all_of_the_one_before(tmp_path: Path, threads: int) -> None:
    """Any number of workers, many times over: each launch adds one to everything."""
    device = CpuDevice(threads, checked=False)
    try:
        plan, out = plan_of(device, tmp_path)
        for turn in range(1, 21):
            # The list starts from what its second buffer holds: LAUNCHES more than it was.
            run(device, plan, out, turn * LAUNCHES)
    finally:
        device.close()


def test_a_worker_that_does_not_come_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call never reaches it: the others do everything. It may come to the next list, or find that one over."""
    device = CpuDevice(2, checked=False)
    try:
        plan, out = plan_of(device, tmp_path)
        go = device._pool._go[0]
        with monkeypatch.context() as patch:
            patch.setattr(device._pool, "_go", [type("Deaf", (), {"release": lambda self: None})()])
            run(device, plan, out, LAUNCHES)
        for _ in range(5):
            go.release()  # calls to lists that are over
        time.sleep(0.05)
        assert device._pool._inside == 0
        for turn in range(2, 10):
            run(device, plan, out, turn * LAUNCHES)
    finally:
        device.close()


def test_who_has_come_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list's memory is let go of only once every worker that came has gone, however slow it is."""
    device = CpuDevice(2, checked=False)
    came: list[bool] = []
    real = runtime._plan_function()

    def slow(*args: int) -> None:
        real(*args)
        if threading.current_thread().name.startswith("ptxcpu-"):
            time.sleep(0.1)
            came.append(True)

    try:
        plan, out = plan_of(device, tmp_path)
        monkeypatch.setattr(runtime, "_plan_function", lambda: slow)
        for turn in range(1, 200):
            run(device, plan, out, turn * LAUNCHES)
            assert device._pool._inside == 0
            if came:
                break
        assert came, "the second worker never came"
    finally:
        device.close()


def test_a_list_for_one_is_not_joined(tmp_path: Path) -> None:
    """A call left over from before does not bring a second worker into a list that the caller does alone."""
    device = CpuDevice(2, checked=False)
    try:
        plan, out = plan_of(device, tmp_path)
        run(device, plan, out, LAUNCHES)
        pool = device._pool
        pool._go[0].release()
        assert pool.run(plan.tasks, plan.names, plan.workspace, alone=True) == LAUNCHES  # type: ignore[attr-defined]
        assert pool._job is None and pool._inside == 0
    finally:
        device.close()


def test_a_stop_counts_what_is_finished(tmp_path: Path) -> None:
    """With the flag up before it starts, nothing is done and nothing is said to be; taken back, all of it."""
    device = CpuDevice(3, checked=False)
    try:
        plan, out = plan_of(device, tmp_path)
        pool = device._pool
        pool.stop()
        assert pool.run(plan.tasks, plan.names, plan.workspace) == 0  # type: ignore[attr-defined]
        pool.resume()
        assert pool.run(plan.tasks, plan.names, plan.workspace) == LAUNCHES  # type: ignore[attr-defined]
        run(device, plan, out, 2 * LAUNCHES)
    finally:
        device.close()
