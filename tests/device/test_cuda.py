"""What is CUDA's own: which CuPy calls are made, graphs, limits of the card, and one line for each thing that goes wrong."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from device_kernels import HEADER, REVERSE, SCALE, write_kernel
from fake_cupy import ILLEGAL_ADDRESS, FakeCupy, open_fake

from ptxtrain.engine.device import cuda_errors, jit_log
from ptxtrain.engine.device.base import Launch
from ptxtrain.engine.device.cuda import CudaDevice
from ptxtrain.engine.errors import DeviceError, OutOfMemory, PtxtrainError


def scale_launch(device: CudaDevice, folder: Path) -> Launch:
    kernel = device.load(write_kernel(folder, SCALE), "scale")
    x = device.write(np.ones(64, np.float32))
    return Launch(kernel, (1, 1, 1), (64, 1, 1), (x, x, np.uint32(64), np.float32(2)))


def one_line(call: Callable[[], object], *words: str) -> str:
    with pytest.raises(DeviceError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and all(word in text for word in words), text
    assert caught.value.exit_code == 4
    return text


def test_a_plan_is_one_graph_launch(fake: FakeCupy, cuda: CudaDevice, tmp_path: Path) -> None:
    launch = scale_launch(cuda, tmp_path)
    plan = cuda.plan([launch] * 5)
    fake.state.log.clear()
    cuda.run(plan)
    cuda.run(plan)
    assert fake.state.log == ["graph", "graph"]
    assert (cuda.read(launch.args[0], np.float32, (64,)) == 2.0**10).all()  # type: ignore[arg-type]


def test_nothing_happens_before_it_is_waited_for(cuda: CudaDevice, tmp_path: Path) -> None:
    launch = scale_launch(cuda, tmp_path)
    host = np.zeros(64, np.float32)
    cuda.launch(launch)
    cuda.download(host, launch.args[0])  # type: ignore[arg-type]
    event = cuda.record()
    assert not event.done() and not host.any()
    event.wait()
    assert event.done() and (host == 2).all()


def test_without_graphs_a_plan_is_launched_one_by_one(
    fake: FakeCupy, cuda: CudaDevice, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.state.can_capture = False
    launch = scale_launch(cuda, tmp_path)
    plan = cuda.plan([launch] * 3)
    cuda.plan([launch])
    note = capsys.readouterr().err
    assert note.count("\n") == 1 and "refuses CUDA graphs" in note and "one by one" in note
    fake.state.log.clear()
    cuda.run(plan)
    assert fake.state.log == ["launch"] * 3
    assert (cuda.read(launch.args[0], np.float32, (64,)) == 8).all()  # type: ignore[arg-type]


def test_an_error_while_capturing_leaves_the_stream_usable(
    fake: FakeCupy, cuda: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = scale_launch(cuda, tmp_path)
    handle = launch.kernel.handle.function
    handle._dynamic = -1  # every launch is refused by the driver
    one_line(lambda: cuda.plan([launch]), "invalid value", "capturing 1 launches")
    handle._dynamic = 0
    cuda.run(cuda.plan([launch]))
    assert (cuda.read(launch.args[0], np.float32, (64,)) == 2).all()  # type: ignore[arg-type]


def test_large_dynamic_shared_memory_is_asked_for_once(fake: FakeCupy, cuda: CudaDevice, tmp_path: Path) -> None:
    kernel = cuda.load(write_kernel(tmp_path, REVERSE), "reverse")
    x = cuda.alloc(1024)

    def launch(shared: int) -> Launch:
        return Launch(kernel, (1, 1, 1), (256, 1, 1), (x, x, np.uint32(0)), shared=shared)

    cuda.plan([launch(48 << 10)])
    assert kernel.handle.function.max_dynamic_shared_size_bytes == 48 << 10
    cuda.plan([launch(99 << 10), launch(64 << 10)])
    assert fake.state.last_shared == 64 << 10
    assert kernel.handle.function.max_dynamic_shared_size_bytes == 99 << 10
    with pytest.raises(
        PtxtrainError, match="reverse needs 100 KiB of shared memory per block; Fake A100 allows 99 KiB"
    ):
        cuda.plan([launch(100 << 10)])


def test_a_block_beyond_the_registers_is_refused(fake: FakeCupy, tmp_path: Path) -> None:
    fake.state.max_threads = 32
    cuda = open_fake(fake)
    with pytest.raises(PtxtrainError, match="block of 64 threads; its registers allow 32"):
        cuda.launch(scale_launch(cuda, tmp_path))


def test_out_of_memory_says_how_much(fake: FakeCupy, cuda: CudaDevice) -> None:
    held = cuda.alloc(14 << 20)
    one_line(
        lambda: cuda.alloc(60 << 20),
        "out of memory on Fake A100: 60.0 MiB wanted, 50.0 MiB free of 64.0 MiB",
        "micro_batch",
    )
    del held
    cuda.alloc(60 << 20)  # freed memory comes back, and the device goes on


def test_free_memory_counts_the_cap_and_the_cap_holds(fake: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's own pool keeps the cap, which the fake does as well."""
    assert open_fake(fake).free_memory() == 64 << 20
    monkeypatch.setenv("PTXTRAIN_MEMORY_LIMIT", "32M")
    capped = open_fake(fake)
    held = capped.alloc(8 << 20)
    assert capped.free_memory() == 24 << 20
    with pytest.raises(OutOfMemory, match=r"out of memory on Fake A100: 30\.0 MiB wanted"):
        capped.alloc(30 << 20)
    assert held is not None


def test_a_failed_kernel_ends_the_device(fake: FakeCupy, cuda: CudaDevice, tmp_path: Path) -> None:
    launch = scale_launch(cuda, tmp_path)
    fake.state.next_launch_error = ILLEGAL_ADDRESS
    cuda.launch(launch)  # queued; the error shows when something waits
    event = cuda.record()
    text = one_line(
        cuda.synchronize, "launch failure", "illegal address", "CUDA_LAUNCH_BLOCKING=1", "last kernel queued: scale"
    )
    for call in (
        event.wait,
        cuda.synchronize,
        lambda: cuda.launch(launch),
        lambda: cuda.alloc(4),
        lambda: cuda.plan([launch]),
    ):
        assert one_line(call) == text


def test_no_driver(fake: FakeCupy) -> None:
    fake.state.driver_version = 0
    one_line(lambda: open_fake(fake), f"no NVIDIA driver found ({cuda_errors.LIBCUDA}); install one", "--device cpu")


def test_driver_older_than_cupy(fake: FakeCupy) -> None:
    fake.state.driver_version = 11080
    one_line(
        lambda: open_fake(fake), "too old: it supports CUDA 11.8; CuPy is built for CUDA 12", "525", "update the driver"
    )


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (35, ["NVIDIA driver too old", "update the driver"]),
        (100, ["sees no GPU", "nvidia-smi"]),
        (802, ["broken NVIDIA driver", "not ready"]),
        (803, ["broken NVIDIA driver", "different versions", "reboot"]),
        (999, ["broken NVIDIA driver: unknown error"]),
        (12345, ["CUDA failed", "cudaError12345"]),
    ],
)
def test_broken_drivers(fake: FakeCupy, status: int, words: list[str]) -> None:
    fake.state.count_error = status
    one_line(lambda: open_fake(fake), *words)


def test_no_card(fake: FakeCupy) -> None:
    fake.state.cards = []
    one_line(lambda: open_fake(fake), "the NVIDIA driver sees no GPU")


def test_weak_card(fake: FakeCupy) -> None:
    fake.state.cards = [("Fake T4", "75")]
    one_line(lambda: open_fake(fake), "card Fake T4 has compute capability 7.5; the kernels need 8.0")


def test_the_first_card_that_can_is_taken(fake: FakeCupy) -> None:
    fake.state.cards = [("Fake T4", "75"), ("Fake B200", "100"), ("Fake A100", "80")]
    device = open_fake(fake)
    assert (device.card.index, device.name, device.card.capability) == (1, "Fake B200", (10, 0))
    assert device.numerics_id() == "cuda Fake B200 (sm_100), driver for CUDA 12.4"
    assert open_fake(fake, 2).name == "Fake A100"
    one_line(lambda: open_fake(fake, 0), "7.5")
    one_line(lambda: open_fake(fake, 3), "no GPU 3", "shows 3")


def test_driver_too_old_for_the_ptx(cuda: CudaDevice, tmp_path: Path) -> None:
    path = write_kernel(tmp_path, SCALE, header=HEADER.replace("8.0", "8.8"))
    one_line(
        lambda: cuda.load(path, "scale"),
        "driver too old for the PTX",
        "kernel.ptx is PTX 8.8, from CUDA 12.9",
        "supports CUDA 12.4",
    )


def test_ptx_for_a_later_card(cuda: CudaDevice, tmp_path: Path) -> None:
    path = write_kernel(tmp_path, SCALE, header=HEADER.replace("sm_80", "sm_90"))
    one_line(lambda: cuda.load(path, "scale"), "is written for sm_90; Fake A100 is sm_80")


@pytest.mark.parametrize(
    ("status", "words"),
    [(218, "refuses the PTX"), (221, "PTX compiler"), (222, "too old for this PTX version"), (209, "not for this GPU")],
)
def test_a_refused_load_names_the_file(
    fake: FakeCupy, cuda: CudaDevice, tmp_path: Path, status: int, words: str
) -> None:
    path = write_kernel(tmp_path, SCALE)
    fake.state.load_error = status
    one_line(lambda: cuda.load(path, "scale"), words, str(path))
    fake.state.load_error = None
    assert cuda.load(path, "scale").name == "scale"  # a failure is not remembered


class FakeDriver:
    """`libcuda` as far as `jit_log` uses it."""

    def __init__(self, status: int, log: bytes) -> None:
        self.status, self.log, self.unloaded = status, log, 0

    def cuModuleLoadDataEx(self, module, image, count, options, values) -> int:  # type: ignore[no-untyped-def]
        assert list(options) == [5, 6] and count.value == 2 and image.value.startswith(b".version")
        assert values[1] > len(self.log)
        ctypes.memmove(values[0], self.log + b"\0", len(self.log) + 1)
        return self.status

    def cuModuleUnload(self, module) -> int:  # type: ignore[no-untyped-def]
        self.unloaded += 1
        return 0


def test_the_assemblers_words_name_the_line(
    fake: FakeCupy, cuda: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_kernel(tmp_path, SCALE)
    log = b"ptxas application ptx input, line 12; error   : Unknown symbol 'x'\nptxas fatal   : Ptx assembly aborted"
    assert jit_log.jit_log(path, FakeDriver(218, log)) == "line 12; error   : Unknown symbol 'x'"
    working = FakeDriver(0, b"")
    assert jit_log.jit_log(path, working) == "" and working.unloaded == 1
    monkeypatch.setattr("ctypes.CDLL", lambda name: FakeDriver(218, log))
    fake.state.load_error = 218
    one_line(
        lambda: cuda.load(path, "scale"),
        f"{path.name} cannot be loaded: line 12; error   : Unknown symbol",
        "CUDA_ERROR_218",
    )


def test_each_explanation_fits_one_line() -> None:
    for what, remedy in cuda_errors._MEANING.values():
        assert "\n" not in what + remedy and what and remedy
    error = RuntimeError("CuPy failed to load libcuda.so.1: OSError: libcuda.so.1: cannot open shared object file")
    assert "no NVIDIA driver found" in str(cuda_errors.explain(error, "waiting"))


def test_ptx_versions_map_to_the_cuda_that_brought_them() -> None:
    known = {
        (7, 0): (11, 0),
        (7, 8): (11, 8),
        (8, 0): (12, 0),
        (8, 5): (12, 5),
        (8, 6): (12, 7),
        (8, 8): (12, 9),
        (9, 0): (13, 0),
    }
    assert {version: cuda_errors.cuda_of_ptx(version) for version in known} == known


def test_bytes_outside_a_byte_are_refused(cuda: CudaDevice) -> None:
    with pytest.raises(PtxtrainError, match=re.escape("0 … 255")):
        cuda.fill(cuda.alloc(4), 256)
