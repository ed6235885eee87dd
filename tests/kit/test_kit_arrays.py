"""What arrays the kit takes, without a copy, what it gives back, and on which device it runs."""

from __future__ import annotations

import gc
import importlib.util
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from dlpack import CUDA, MANAGED, PINNED, ROCM, Exported, Namespaced
from fake_cupy import open_fake
from kitbench import FLOATS, Place, normal

from ptxtrain.engine import kit
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.device.cuda import CudaDevice
from ptxtrain.engine.kit import core

X = normal(1, 5, 33)


def softmax(x: Any) -> bytes:
    """The right answer's bits, from NumPy arrays."""
    return bytes(kit.softmax_forward(x).tobytes())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("place", [1, PINNED])
def test_dlpack_of_the_host_is_read_and_written_in_place(dtype: str, place: int) -> None:
    """The very memory: out is the caller's, nothing is copied, and every capsule is let go of."""
    x = Place("cpu").put(X, dtype)
    source, target = Exported(x.copy(), place), Exported(np.empty_like(x), place, with_strides=False)
    assert kit.softmax_forward(source, out=target) is target
    assert target.array.tobytes() == softmax(x) and source.array.tobytes() == x.tobytes()
    assert source.streams == [None]
    gc.collect()
    assert source.alive == target.alive == 0
    assert kit.softmax_forward(source, out=source) is source and source.array.tobytes() == softmax(x)


def test_a_byte_offset_is_added() -> None:
    x = X.copy()
    assert kit.softmax_forward(Exported(x[2:], byte_offset=8)).tobytes() == softmax(X[2:])


def test_the_capsule_is_held_until_the_call_is_over() -> None:
    """Its producer may free the memory when it goes; then what was read would be NaN."""
    source = Exported(X.copy(), fleeting=True)
    found = kit.softmax_forward(source)
    assert found.tobytes() == softmax(X)
    gc.collect()
    assert np.isnan(source.array).all()


def test_new_arrays_are_of_the_callers_kind() -> None:
    assert type(kit.softmax_forward(X)) is np.ndarray
    assert type(kit.softmax_forward(Exported(X.copy()))) is np.ndarray, "its library is not known"
    found = kit.softmax_forward(Namespaced(X.copy()))
    assert type(found) is Namespaced and found.array.tobytes() == softmax(X)
    half = X.astype(ml_dtypes.bfloat16)
    found = kit.softmax_forward(Namespaced(half))
    assert type(found) is np.ndarray and found.tobytes() == softmax(half), "NumPy does not export bf16"


def test_views_and_empty_arrays() -> None:
    """Rows of a larger array, axes of size 1 with any stride, and no rows at all."""
    assert kit.softmax_forward(X[1:4]).tobytes() == softmax(X[1:4].copy())
    assert kit.softmax_forward(Exported(X[:1, None].transpose(1, 0, 2))).shape == (1, 1, 33)
    assert kit.softmax_forward(np.empty((0, 7), np.float32)).shape == (0, 7)
    gamma = np.ones(7, np.float32)
    none = np.empty((0, 7), np.float32)
    out, rstd = kit.rmsnorm_forward(none, gamma)
    dx, dgamma = kit.rmsnorm_backward(none, gamma, none, rstd, dgamma=np.full(7, np.nan, np.float32))
    assert out.shape == dx.shape == (0, 7) and rstd.shape == (0,) and not dgamma.any()
    assert kit.swiglu_forward(np.array(2, np.float32), np.array(3, np.float32)).shape == ()


# The GPU's path, over a fake CuPy: memory is the host's, everything else as on a GPU.


@pytest.fixture
def cuda() -> Iterator[CudaDevice]:
    device = open_fake(fake_cupy.FakeCupy())
    with kit.on(device):
        yield device


@pytest.mark.parametrize("place", [CUDA, MANAGED])
def test_arrays_of_a_gpu_run_there(cuda: CudaDevice, place: int) -> None:
    """On the device's own stream, which the producer is told of, and with the result there when the call returns."""
    source, target = Exported(X.copy(), place), Exported(np.empty_like(X), place)
    assert kit.softmax_forward(source, out=target) is target
    assert target.array.tobytes() == softmax(X)
    assert source.streams == [cuda.stream] and cuda.stream
    assert cuda._cupy.state.log.count("launch") == 1


def test_the_sums_of_no_rows_are_cleared_on_a_gpu(cuda: CudaDevice) -> None:
    """Which copies through CuPy's pointer to the caller's memory."""
    none, ones, dgamma = np.empty((0, 7), "f"), np.ones(7, "f"), np.full(7, np.nan, "f")
    given = [Exported(a, CUDA) for a in (none, ones, none, none[:, 0].copy())]
    kit.rmsnorm_backward(*given, dx=Exported(none, CUDA), dgamma=Exported(dgamma, CUDA))
    assert not dgamma.any()


class CupyArray:
    """What the kit asks of a `cupy.ndarray`; the memory is the host's."""

    __module__ = "cupy"

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.dtype, self.flags = array, array.shape, array.dtype, array.flags
        self.data, self.device = SimpleNamespace(ptr=array.ctypes.data), SimpleNamespace(id=0)
        self.strides, self.itemsize = array.strides, array.itemsize
        self.__cuda_array_interface__: dict[str, Any] = {}


@pytest.mark.parametrize("dtype", FLOATS)
def test_cupy_in_cupy_out(cuda: CudaDevice, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """What is queued on the caller's stream comes first, and new arrays are made on the card of those that came."""
    waited: list[str] = []
    fake = cuda._cupy
    fake.cuda.get_current_stream = lambda: SimpleNamespace(synchronize=lambda: waited.append("current stream"))
    fake.empty = lambda shape, kind: CupyArray(np.full(shape, np.nan, kind))
    fake.asarray = CupyArray
    monkeypatch.setitem(sys.modules, "cupy", fake)
    x = CupyArray(Place("cpu").put(X, dtype))
    found = kit.softmax_forward(x)
    assert type(found) is CupyArray and found.array.tobytes() == softmax(x.array) and waited
    with pytest.raises(kit.ContractError, match=r"x: expected a C-contiguous array, got strides \(1, 33\)"):
        kit.softmax_forward(CupyArray(x.array.T))
    cos, sin = kit.rope_tables(4, 6, like=x)
    assert type(cos) is CupyArray and sin.array.tobytes() == kit.rope_tables(4, 6)[1].tobytes()


def test_cupy_has_what_the_kit_asks_of_it() -> None:
    """Names alone: arrays need a GPU."""
    cupy = pytest.importorskip("cupy")
    for name in ("data", "shape", "dtype", "flags", "strides", "itemsize", "device", "__cuda_array_interface__"):
        assert hasattr(cupy.ndarray, name), name
    assert cupy.ndarray.__module__.partition(".")[0] == "cupy" and hasattr(cupy.cuda.MemoryPointer, "ptr")
    for name in ("memcpy", "memcpyHostToDevice", "memcpyDeviceToHost"):
        assert hasattr(cupy.cuda.runtime, name), name
    assert callable(cupy.empty) and callable(cupy.asarray) and callable(cupy.cuda.get_current_stream)


def test_arrays_of_two_places_are_refused(cuda: CudaDevice) -> None:
    with pytest.raises(kit.ContractError) as caught:
        kit.softmax_forward(Exported(X.copy(), CUDA), out=np.empty_like(X))
    assert str(caught.value) == "softmax_forward: out: expected an array on GPU 0, where x is, got one on the host"
    with pytest.raises(
        kit.ContractError, match="x: expected memory of the host or of an NVIDIA GPU, got DLPack device 10"
    ):
        kit.softmax_forward(Exported(X.copy(), ROCM))


def test_the_cpu_can_be_forced(cuda: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then arrays of a GPU are copied to the host, and what was written back; the producer's work on stream 1 comes first."""
    copies = []

    class Runtime:
        memcpyHostToDevice, memcpyDeviceToHost = 1, 2

        @staticmethod
        def memcpy(dst: int, src: int, size: int, kind: int) -> None:
            import ctypes

            copies.append((size, kind))
            ctypes.memmove(dst, src, size)

    fake = cuda._cupy
    fake.cuda.runtime = Runtime
    monkeypatch.setattr("ptxtrain.engine.device.cuda_errors.import_cupy", lambda: fake)
    monkeypatch.setenv("PTXTRAIN_DEVICE", "cpu")
    source, target = Exported(X.copy(), CUDA), Exported(np.empty_like(X), CUDA)
    device = CpuDevice(threads=1)
    with kit.on(device):
        kit.softmax_forward(source, out=target)
        assert target.array.tobytes() == softmax(X)
        assert copies == [(X.nbytes, 2), (X.nbytes, 1)] and source.streams == [1]
        kit.softmax_forward(target, out=target)
        assert target.array.tobytes() == softmax(kit.softmax_forward(X)), "in place"
    device.close()
    assert "launch" not in fake.state.log


def test_asked_for_cuda_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTXTRAIN_DEVICE", "cuda")
    with pytest.raises(kit.ContractError) as caught:
        kit.softmax_forward(X)
    assert (
        str(caught.value)
        == "softmax_forward: x: expected an array on a GPU, since $PTXTRAIN_DEVICE is cuda, got one on the host"
    )


def test_another_card_is_another_device(cuda: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of GPU 1 is never given to kernels of GPU 0."""
    opened: list[int] = []
    monkeypatch.setattr(core, "_devices", {})
    monkeypatch.setattr(core, "_open_cuda", opened.append)
    assert core.device_of(0) is cuda
    core.device_of(1)
    assert opened == [1]


def test_a_device_is_opened_once_and_on_takes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_devices", {})
    first = core.device_of(None)
    assert core.device_of(None) is first
    other = CpuDevice(threads=2)
    with kit.on(other):
        assert core.device_of(None) is other
        with kit.on(first):
            assert core.device_of(None) is first
        assert core.device_of(None) is other
    assert core.device_of(None) is first
    other.close()


def test_calls_from_many_threads() -> None:
    """On one device: each gets its own answer."""
    inputs = [normal(seed, 40, 65) for seed in range(8)]
    expected = [softmax(x) for x in inputs]
    found: list[list[bytes]] = [[] for _ in inputs]

    def work(index: int) -> None:
        for _ in range(20):
            found[index].append(softmax(inputs[index]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(set(answers) == {right} and len(answers) == 20 for answers, right in zip(found, expected, strict=True))


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


@needs_torch
@pytest.mark.parametrize("dtype", FLOATS)
def test_torch_in_torch_out(dtype: str) -> None:
    """Tensors, also those that take gradients, are read and changed in place, and new ones are tensors."""
    import torch

    kinds = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
    host = Place("cpu").put(X, dtype)
    x = torch.from_numpy(X.copy()).to(kinds[dtype])
    found = kit.softmax_forward(x)
    assert isinstance(found, torch.Tensor) and found.dtype == kinds[dtype]
    assert found.view(torch.uint8).numpy().tobytes() == softmax(host)
    weight = torch.nn.Parameter(torch.ones(33))
    state = [torch.zeros(33), torch.zeros(33)]
    same = kit.adamw_step(weight, *state, x[0].clone(), lr=0.1, bc1=0.1, bc2=0.001)
    assert same[0] is weight and not torch.equal(weight.detach(), torch.ones(33)) and state[0].any()
    with pytest.raises(kit.ContractError, match=r"x: expected a C-contiguous array, got strides \(1, 33\)"):
        kit.softmax_forward(x.T)
    cos, _ = kit.rope_tables(3, 8, like=x)
    assert isinstance(cos, torch.Tensor) and cos.shape == (3, 4)


TOLERANCE = {"f16": 4e-3, "bf16": 3e-2, "f32": 1e-4}  # a few roundings of either side


@needs_torch
@pytest.mark.parametrize("dtype", FLOATS)
def test_torch_agrees(dtype: str) -> None:
    """Its own functions and gradients on the same numbers."""
    import torch
    from torch.nn import functional as F

    kind = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[dtype]

    def tensor(seed: int, *shape: int) -> Any:
        return torch.from_numpy(normal(seed, *shape, dtype=dtype)).to(kind).requires_grad_()

    def close(found: Any, expected: Any) -> None:
        tolerance = TOLERANCE[dtype]
        scale = float(expected.detach().float().abs().max())
        torch.testing.assert_close(found.float(), expected.detach().float(), rtol=tolerance, atol=tolerance * scale / 4)

    x, up, gamma, beta = tensor(1, 40, 65), tensor(5, 40, 65), tensor(2, 65), tensor(3, 65)
    dout = tensor(4, 40, 65).detach()
    y = F.layer_norm(x, (65,), gamma, beta, 1e-5)
    out, mean, rstd = kit.layernorm_forward(x, gamma, beta)
    close(out, y)
    found = kit.layernorm_backward(x, gamma, dout, mean, rstd)
    for a, b in zip(found, torch.autograd.grad(y, (x, gamma, beta), dout), strict=True):
        close(a, b)
    y = F.rms_norm(x, (65,), gamma, 1e-5)
    out, rstd = kit.rmsnorm_forward(x, gamma)
    close(out, y)
    found = kit.rmsnorm_backward(x, gamma, dout, rstd)
    for a, b in zip(found, torch.autograd.grad(y, (x, gamma), dout), strict=True):
        close(a, b)
    y = x.softmax(-1)
    out = kit.softmax_forward(x)
    close(out, y)
    close(kit.softmax_backward(out, dout), torch.autograd.grad(y, x, dout)[0])
    y = F.silu(x) * up
    close(kit.swiglu_forward(x, up), y)
    for a, b in zip(kit.swiglu_backward(x, up, dout), torch.autograd.grad(y, (x, up), dout), strict=True):
        close(a, b)


@needs_torch
def test_torchs_adamw_agrees() -> None:
    import torch

    weight, grads = torch.nn.Parameter(torch.from_numpy(normal(6, 65))), torch.from_numpy(normal(4, 6, 65))
    ours, m, v = weight.detach().clone(), torch.zeros(65), torch.zeros(65)
    optimizer = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 6):
        weight.grad = grads[step].clone()
        optimizer.step()
        numbers: dict[str, float] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1}
        kit.adamw_step(ours, m, v, grads[step], **numbers, bc1=1 - 0.9**step, bc2=1 - 0.95**step)
    torch.testing.assert_close(ours, weight.detach(), rtol=1e-5, atol=1e-6)
