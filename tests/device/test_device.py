"""The device protocol, on every device: memory, copies, launches, plans, events, interruption, refusals."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from device_kernels import REVERSE, SCALE, WIDTHS, write_kernel

from ptxtrain.engine.device.base import ALIGNMENT, Device, Kernel, Launch
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.errors import DeviceError, OutOfMemory, PtxtrainError

COUNT = 1000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def scale(device: Device, folder: Path) -> Kernel:
    return device.load(write_kernel(folder, SCALE, "scale"), "scale")


def launch_scale(kernel: Kernel, out: object, x: object, factor: float, count: int = COUNT) -> Launch:
    args = (out, x, np.uint32(count), np.float32(factor))
    return Launch(kernel, (-(-count // 128), 1, 1), (128, 1, 1), args)  # type: ignore[arg-type]


def numbers(seed: int, count: int = COUNT) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("nbytes", [1, 4, 255, 4096, 1_000_003])
def test_copies_return_what_was_written(device: Device, nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    buffer = device.alloc(nbytes)
    assert buffer.nbytes == nbytes and buffer.ptr % ALIGNMENT == 0
    device.upload(buffer, data)
    assert np.array_equal(device.read(buffer, np.uint8, (nbytes,)), data)


def test_every_allocation_is_aligned_and_apart(device: Device) -> None:
    buffers = [device.alloc(n) for n in (1, 3, 257, 64, 1000)]
    spans = sorted((b.ptr, b.ptr + b.nbytes) for b in buffers)
    assert all(b.ptr % ALIGNMENT == 0 for b in buffers)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_views_are_windows_on_the_same_memory(device: Device) -> None:
    data = np.arange(64, dtype=np.uint8)
    buffer = device.write(data)
    device.upload(buffer.view(16, 8), np.full(8, 200, np.uint8))
    device.fill(buffer.view(60, 4), 7)
    device.synchronize()
    data[16:24], data[60:64] = 200, 7
    assert np.array_equal(device.read(buffer, np.uint8, (64,)), data)
    assert np.array_equal(device.read(buffer.view(12, 8), np.uint8, (8,)), data[12:20])


def test_fill_sets_every_byte(device: Device) -> None:
    buffer = device.alloc(1001)
    device.fill(buffer, 0xCD)
    assert (device.read(buffer, np.uint8, (1001,)) == 0xCD).all()
    device.fill(buffer, 0)
    assert (device.read(buffer, np.uint8, (1001,)) == 0).all()


def test_a_short_upload_leaves_the_rest(device: Device) -> None:
    buffer = device.write(np.arange(1000, dtype=np.int32))
    device.upload(buffer, np.full(3, -1, np.int32))
    assert device.read(buffer, np.int32, (1000,)).tolist() == [-1, -1, -1, *range(3, 1000)]


def test_a_short_download_takes_the_start(device: Device) -> None:
    buffer = device.write(np.arange(10, dtype=np.int32))
    assert device.read(buffer, np.int32, (3,)).tolist() == [0, 1, 2]


def test_pinned_arrays_copy_like_any_other(device: Device) -> None:
    host = device.pinned(4 * COUNT)
    assert host.dtype == np.uint8 and host.shape == (4 * COUNT,) and host.flags.writeable
    host.view(np.float32)[:] = numbers(1)
    buffer = device.alloc(host.nbytes)
    device.upload(buffer, host)
    back = device.pinned(host.nbytes)
    device.download(back, buffer)
    device.synchronize()
    assert np.array_equal(back.view(np.float32), numbers(1))
    assert device.pinned(0).size == 0


def test_a_launch_computes(device: Device, scale: Kernel) -> None:
    x = device.write(numbers(2))
    out = device.alloc(4 * COUNT)
    device.launch(launch_scale(scale, out, x, 3.0))
    assert np.array_equal(device.read(out, np.float32, (COUNT,)), numbers(2) * np.float32(3))


def test_a_launch_writes_nothing_past_its_count(device: Device, scale: Kernel) -> None:
    out = device.write(np.full(COUNT, -1, np.float32))
    device.launch(launch_scale(scale, out, device.write(numbers(3)), 2.0, count=COUNT - 7))
    assert (device.read(out, np.float32, (COUNT,))[-7:] == -1).all()


def test_arguments_of_every_width_arrive(device: Device, folder: Path) -> None:
    kernel = device.load(write_kernel(folder, WIDTHS, "widths"), "widths")
    assert [(p.name, p.type, p.size) for p in kernel.params] == [
        ("p_out", "u64", 8),
        ("p_b", "u8", 1),
        ("p_d", "f64", 8),
        ("p_h", "u16", 2),
        ("p_i", "s32", 4),
        ("p_f", "f32", 4),
        ("p_q", "u64", 8),
    ]
    out = device.write(np.zeros(32, np.uint8))
    values = (
        np.uint8(250),
        np.float64(-1 / 3),
        np.uint16(65_000),
        np.int32(-5),
        np.float32(1 / 3),
        np.uint64(2**63 + 1),
    )
    device.launch(Launch(kernel, (1, 1, 1), (1, 1, 1), (out, *values)))
    got = device.read(out, np.uint8, (32,)).tobytes()
    layout = {0: values[0], 2: values[2], 4: values[3], 8: values[1], 16: values[4], 24: values[5]}
    for offset, value in layout.items():
        assert got[offset : offset + value.itemsize] == value.tobytes(), (offset, value)


@pytest.mark.parametrize("shared", [1024, 48 << 10, 80 << 10])
def test_dynamic_shared_memory(device: Device, folder: Path, shared: int) -> None:
    kernel = device.load(write_kernel(folder, REVERSE, "reverse"), "reverse")
    x, out = device.write(numbers(4, 256)), device.alloc(1024)
    base = np.uint32(shared // 4 - 256)  # the last words there are
    device.launch(Launch(kernel, (1, 1, 1), (256, 1, 1), (out, x, base), shared=shared))
    assert np.array_equal(device.read(out, np.float32, (256,)), numbers(4, 256)[::-1])


def test_the_queue_keeps_its_order(device: Device, scale: Kernel) -> None:
    x, y = device.write(np.ones(COUNT, np.float32)), device.alloc(4 * COUNT)
    new = np.full(COUNT, 10, np.float32)
    first, second = np.empty(COUNT, np.float32), np.empty(COUNT, np.float32)
    device.launch(launch_scale(scale, y, x, 2.0))
    device.download(first, y)
    device.upload(x, new)
    device.launch(launch_scale(scale, y, x, 2.0))
    device.download(second, y)
    device.fill(y, 0)
    device.synchronize()
    assert (first == 2).all() and (second == 20).all()
    assert not device.read(y, np.float32, (COUNT,)).any()


def test_a_plan_replays_over_what_the_buffers_hold_now(device: Device, scale: Kernel) -> None:
    x, y, z = device.write(numbers(5)), device.alloc(4 * COUNT), device.alloc(4 * COUNT)
    plan = device.plan([launch_scale(scale, y, x, 2.0), launch_scale(scale, z, y, 4.0)])
    assert len(plan.launches) == 2
    for seed in (5, 6):
        device.upload(x, data := numbers(seed))
        device.run(plan)
        assert np.array_equal(device.read(z, np.float32, (COUNT,)), data * np.float32(8))


def test_a_plan_runs_nothing_before_it_is_run(device: Device, scale: Kernel) -> None:
    x, y = device.write(numbers(7)), device.write(np.zeros(COUNT, np.float32))
    device.plan([launch_scale(scale, y, x, 2.0)])
    assert not device.read(y, np.float32, (COUNT,)).any()


def test_plans_in_place_add_up(device: Device, scale: Kernel) -> None:
    x = device.write(np.ones(COUNT, np.float32))
    plan = device.plan([launch_scale(scale, x, x, 2.0)] * 3)
    device.run(plan)
    device.run(plan)
    assert (device.read(x, np.float32, (COUNT,)) == 64).all()


def test_an_empty_plan_is_a_plan(device: Device) -> None:
    device.run(device.plan([]))
    device.synchronize()


def test_events_tell_how_long_the_device_took_between_them(device: Device) -> None:
    """Nothing is queued between the first two; between the others lie as many copies as take a measurable time."""
    buffer, data = device.alloc(1 << 22), np.zeros(1 << 22, np.uint8)
    first, second = device.record(), device.record()
    for _ in range(20):
        device.upload(buffer, data)
    third = device.record()
    device.synchronize()
    assert first.since(first) == 0 and second.since(first) >= 0
    assert third.since(second) > 1e-5
    assert third.since(first) == pytest.approx(third.since(second) + second.since(first), rel=1e-3, abs=1e-5)


def test_a_cap_on_memory_holds_and_what_is_freed_comes_back(
    monkeypatch: pytest.MonkeyPatch, open_device_for_test: Callable[[str], Device]
) -> None:
    monkeypatch.setenv("PTXTRAIN_MEMORY_LIMIT", "1.5 MiB")
    device = open_device_for_test("cpu")
    assert device.free_memory() == 3 << 19
    held = device.alloc(1 << 20)
    assert device.free_memory() == 1 << 19
    with pytest.raises(OutOfMemory, match="1,048,576 bytes wanted, 524,288 left of PTXTRAIN_MEMORY_LIMIT"):
        device.alloc(1 << 20)
    del held
    device.alloc(1 << 20)
    monkeypatch.setenv("PTXTRAIN_MEMORY_LIMIT", "much")
    with pytest.raises(PtxtrainError, match="such as 512M or 6G"):
        open_device_for_test("cpu")


def test_free_memory_is_known(device: Device) -> None:
    free = device.free_memory()
    assert free is not None and free > 1 << 20


def test_events_mark_a_point_in_the_queue(device: Device, scale: Kernel) -> None:
    x, y, host = device.write(np.ones(COUNT, np.float32)), device.alloc(4 * COUNT), np.zeros(COUNT, np.float32)
    device.launch(launch_scale(scale, y, x, 5.0))
    device.download(host, y)
    event = device.record()
    event.wait()
    assert event.done() and (host == 5).all()
    event.wait()  # again is nothing


def test_after_interrupt_and_synchronize_the_device_works(device: Device, scale: Kernel) -> None:
    x, y = device.write(np.ones(COUNT, np.float32)), device.alloc(4 * COUNT)
    plan = device.plan([launch_scale(scale, y, x, 2.0)] * 50)
    device.run(plan)
    device.interrupt()
    device.run(plan)
    device.synchronize()
    device.fill(y, 0)
    device.launch(launch_scale(scale, y, x, 3.0))
    assert (device.read(y, np.float32, (COUNT,)) == 3).all()


def test_kernels_queued_under_an_interrupt_do_not_run(device: Device, scale: Kernel) -> None:
    x, y = device.write(np.ones(COUNT, np.float32)), device.write(np.zeros(COUNT, np.float32))
    plan = device.plan([launch_scale(scale, y, x, 2.0)])
    device.interrupt()
    device.run(plan)
    device.launch(launch_scale(scale, y, x, 2.0))
    device.synchronize()
    assert not device.read(y, np.float32, (COUNT,)).any()


def test_loading_twice_gives_the_same_kernel(device: Device, folder: Path, scale: Kernel) -> None:
    assert device.load(folder / "scale.ptx", "scale") is scale
    assert scale.name == "scale" and scale.path.name == "scale.ptx"


def test_what_cannot_be_loaded_is_named(device: Device, folder: Path) -> None:
    path = write_kernel(folder, SCALE, "scale")
    with pytest.raises(PtxtrainError, match=r"no entry called nonesuch.*scale"):
        device.load(path, "nonesuch")
    broken = write_kernel(folder, SCALE.replace("%value, %value, %factor;", "%value, %value, %nonesuch;"), "broken")
    with pytest.raises(PtxtrainError, match=r"broken\.ptx:\d+.*nonesuch") as caught:
        device.load(broken, "scale")
    assert "\n" not in str(caught.value)
    with pytest.raises(PtxtrainError, match=r"missing\.ptx"):
        device.load(folder / "missing.ptx", "scale")


def test_wrong_arguments_are_refused_by_name(device: Device, scale: Kernel) -> None:
    x = device.alloc(4 * COUNT)
    good = launch_scale(scale, x, x, 1.0)
    bad = {
        "p_count is .u32, got a Python int": (x, x, 1000, np.float32(1)),
        "p_count is .u32, got numpy.int64": (x, x, np.int64(1000), np.float32(1)),
        "p_count is .u32, got numpy.float32": (x, x, np.float32(1), np.float32(1)),
        "p_factor is .f32, got numpy.float64": (x, x, np.uint32(1), np.float64(1)),
        "p_factor is .f32, got a buffer": (x, x, np.uint32(1), x),
        "takes 4 arguments (p_out, p_x, p_count, p_factor), got 3": (x, x, np.uint32(1)),
    }
    for message, args in bad.items():
        launch = Launch(scale, good.grid, good.block, args)  # type: ignore[arg-type]
        with pytest.raises(PtxtrainError) as caught:
            device.launch(launch)
        assert message in str(caught.value)
        with pytest.raises(PtxtrainError):
            device.plan([good, launch])
    device.launch(good)
    device.synchronize()


@pytest.mark.parametrize(
    ("grid", "block"),
    [((0, 1, 1), (1, 1, 1)), ((1, 65536, 1), (1, 1, 1)), ((1, 1, 1), (1025, 1, 1)), ((1, 1, 1), (1, 1, 65))],
)
def test_impossible_shapes_are_refused(device: Device, scale: Kernel, grid: tuple, block: tuple) -> None:
    x = device.alloc(4)
    with pytest.raises(PtxtrainError, match="outside"):
        device.launch(Launch(scale, grid, block, (x, x, np.uint32(1), np.float32(1))))


def test_copies_that_do_not_fit_are_refused(device: Device) -> None:
    buffer = device.alloc(8)
    with pytest.raises(PtxtrainError):
        device.upload(buffer, np.zeros(9, np.uint8))
    with pytest.raises(PtxtrainError):
        device.download(np.zeros(9, np.uint8), buffer)
    with pytest.raises(PtxtrainError):
        device.upload(buffer, np.zeros((4, 4), np.uint8)[:, :2])


def test_it_says_what_it_is(device: Device) -> None:
    assert device.kind in ("cpu", "cuda") and device.name
    identity = device.numerics_id()
    assert identity.startswith(device.kind) and "\n" not in identity


def test_execute_comes_after_what_is_queued_and_has_ended_when_it_returns(device: Device, scale: Kernel) -> None:
    data = numbers(7)
    x, y = device.alloc(data.nbytes), device.alloc(data.nbytes)
    for size in (COUNT, 10):  # with a queue that is busy, then with an empty one
        if size == COUNT:
            device.upload(x, data)
            device.launch(launch_scale(scale, x, x, 2.0))
        device.execute([launch_scale(scale, y, x, 3.0, size), launch_scale(scale, y, y, 0.5, size)])
        found = np.empty_like(data)
        device.download(found, y)
        device.synchronize()
        assert np.array_equal(found, data * np.float32(3))
    device.execute([])


def test_memory_of_others_is_adopted(device: Device, scale: Kernel) -> None:
    """Kernels, copies and fills reach it by its address; its owner lives as long as the buffer."""
    data = numbers(8)
    theirs = device.write(data)
    ours = device.adopt(theirs.ptr, theirs.nbytes, theirs, written=True)
    device.fill(ours.view(0, 8), 0)
    device.execute([launch_scale(scale, ours, ours, 2.0)])
    data[:2] = 0
    assert np.array_equal(device.read(theirs, np.float32, (COUNT,)), data * 2)
    assert np.array_equal(device.read(ours.view(8, 16), np.float32, (4,)), data[2:6] * 2)
    device.release(ours)


def test_the_main_thread_never_waits_for_others_within_a_launch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception from a signal would let go of memory in use: it runs small launches alone and hands large ones over."""
    device = CpuDevice(threads=2)
    kernel = device.load(write_kernel(folder, SCALE, "scale"), "scale")
    seen: list[tuple[bool, bool]] = []
    run = device._pool.run

    def watched(*args: object, alone: bool = False) -> int:
        seen.append((threading.current_thread() is threading.main_thread(), alone))
        return run(*args, alone=alone)  # type: ignore[arg-type]

    monkeypatch.setattr(device._pool, "run", watched)
    small, large = device.alloc(4 * COUNT), device.alloc(1 << 20)
    device.fill(small, 0)
    device.fill(large, 0)
    device.synchronize()
    device.execute([launch_scale(kernel, small, small, 2.0)])
    device.execute([launch_scale(kernel, large, large, 2.0)])
    other = threading.Thread(target=lambda: device.execute([launch_scale(kernel, large, large, 2.0)]))
    other.start()
    other.join()
    assert seen == [(True, True), (False, False), (False, False)]
    device.close()


def test_execute_raises_what_failed_and_goes_on(folder: Path) -> None:
    device = CpuDevice(threads=2)
    trap = device.load(write_kernel(folder, SCALE.replace("ret;", "trap;"), "trap"), "scale")
    kernel = device.load(write_kernel(folder, SCALE, "scale"), "scale")
    x = device.write(numbers(9))
    for size in (10, COUNT):
        with pytest.raises(DeviceError, match="scale"):
            device.execute([launch_scale(trap, x, x, 2.0, size)])
    device.execute([launch_scale(kernel, x, x, 2.0)])
    device.close()
