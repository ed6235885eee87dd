"""Checked mode: reads of memory that nobody wrote, and cp.async before it has been waited for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkbench import clean, finds, floats, ptx

from ptxtrain.engine.device.base import Buffer, Kernel, Launch
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.ptxcpu.checked.report import CheckError

SHARED = """
extern "C" __global__ void k(TYPE* out) {
    __shared__ TYPE s[128];
    int t = threadIdx.x;
    if (t WHO) s[t] = t;
    __syncthreads();
    out[t] = s[(t + 5) % 64];
}
"""


@pytest.mark.parametrize("type_", ["unsigned char", "short", "float", "double"])
def test_shared_memory_that_one_thread_has_not_written(type_: str) -> None:
    out = np.zeros(64, {"unsigned char": np.uint8, "short": np.int16, "float": np.float32, "double": np.float64}[type_])
    source = SHARED.replace("TYPE", type_)
    for missing in (0, 37, 63):
        error = finds(source.replace("WHO", f"!= {missing}"), [out], "uninitialised", block=64)
        assert error.thread == ((missing - 5) % 64, 0, 0) and error.offset == missing * out.itemsize
    clean(source.replace("WHO", ">= 0"), [out], block=64)


def test_every_block_starts_without_shared_memory() -> None:
    source = """
    extern "C" __global__ void k(int* out) {
        __shared__ int s[32];
        if (blockIdx.x == 0) s[threadIdx.x] = 1;
        __syncthreads();
        out[32 * blockIdx.x + threadIdx.x] = s[threadIdx.x];
    }"""
    error = finds(source, [np.zeros(64, np.int32)], "uninitialised", grid=2)
    assert error.block == (1, 0, 0)
    clean(source, [np.zeros(32, np.int32)], grid=1)


def test_wide_reads_of_partly_written_memory() -> None:
    source = """
    extern "C" __global__ void k(int* out) {
        __shared__ int4 s[8];
        int t = threadIdx.x;
        if (t < 30) ((int*)s)[t] = t;
        __syncthreads();
        int4 v = s[t % LIMIT];
        out[t] = v.x + v.y + v.z + v.w;
    }"""
    error = finds(source.replace("LIMIT", "8"), [np.zeros(32, np.int32)], "uninitialised")
    assert error.thread == (7, 0, 0) and error.offset == 120
    clean(source.replace("LIMIT", "7"), [np.zeros(32, np.int32)])


def test_atomics_read_what_is_there() -> None:
    source = """
    extern "C" __global__ void k(int* out) {
        __shared__ int s;
        BEFORE
        atomicAdd(&s, 1);
        __syncthreads();
        out[0] = s;
    }"""
    finds(source.replace("BEFORE", ""), [np.zeros(1, np.int32)], "uninitialised")
    before = "if (threadIdx.x == 0) s = 0; __syncthreads();"
    assert clean(source.replace("BEFORE", before), [np.zeros(1, np.int32)])[0][0] == 32


# Device memory: from alloc until an upload, a fill or a kernel writes it

COPY = """
extern "C" __global__ void copy(int* out, const int* x, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i];
}
extern "C" __global__ void bytes(unsigned char* out, const unsigned char* x, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i];
}
"""
COUNT = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def kernel(device: CpuDevice, folder: Path, source: str, entry: str) -> Kernel:
    text = ptx(source)
    path = folder / f"k{abs(hash(text))}.ptx"
    path.write_text(text)
    return device.load(path, entry)


def copy(device: CpuDevice, folder: Path, out: Buffer, x: Buffer, count: int, entry: str = "copy") -> None:
    launch = Launch(
        kernel(device, folder, COPY, entry), (-(-count // 32), 1, 1), (32, 1, 1), (out, x, np.uint32(count))
    )
    device.launch(launch)
    device.synchronize()


def test_memory_is_unwritten_until_something_writes_it(checked_device: CpuDevice, folder: Path) -> None:
    device = checked_device
    a, b, c = (device.alloc(4 * COUNT) for _ in range(3))
    with pytest.raises(CheckError, match=r"reads byte 0 of copy_param_1 \(400 bytes.*which nothing has written"):
        copy(device, folder, b, a, COUNT)
    # The first part by an upload, the rest by a fill of a view.
    device.upload(a, np.arange(COUNT - 7, dtype=np.int32))
    with pytest.raises(CheckError, match=r"uninitialised") as caught:
        copy(device, folder, b, a, COUNT)
    assert caught.value.offset == 4 * (COUNT - 7) and caught.value.thread == ((COUNT - 7) % 32, 0, 0)
    device.fill(a.view(4 * (COUNT - 7), 28), 0)
    # Each chunk of what was copied may be read, and no more.
    copy(device, folder, b, a, COUNT - 1)
    copy(device, folder, c, b, COUNT - 1)
    with pytest.raises(CheckError, match="uninitialised"):
        copy(device, folder, c, b, COUNT)
    copy(device, folder, b, a, COUNT)
    copy(device, folder, c, b, COUNT)
    expected = [*range(COUNT - 7), *([0] * 7)]
    assert device.read(c, np.int32, (COUNT,)).tolist() == expected


@pytest.mark.parametrize("missing", [0, 1, 2, 3, 50, 97, 98, 99])
def test_each_byte_counts(checked_device: CpuDevice, folder: Path, missing: int) -> None:
    device = checked_device
    a, b = device.alloc(COUNT), device.alloc(COUNT)
    device.upload(a, np.zeros(missing, np.uint8))
    rest = COUNT - missing - 1
    if rest:
        device.upload(a.view(missing + 1, rest), np.zeros(rest, np.uint8))
    with pytest.raises(CheckError, match="uninitialised") as caught:
        copy(device, folder, b, a, COUNT, "bytes")
    assert caught.value.offset == missing and caught.value.allocation == "bytes_param_1"
    device.fill(a.view(missing, 1), 0)
    copy(device, folder, b, a, COUNT, "bytes")


def test_freed_memory_is_no_allocation(checked_device: CpuDevice, folder: Path) -> None:
    device = checked_device
    keep, gone = device.write(np.zeros(COUNT, np.int32)), device.write(np.zeros(COUNT, np.int32))
    stale = Buffer(gone.ptr, gone.nbytes, None)
    copy(device, folder, keep, stale, COUNT)
    del gone
    with pytest.raises(CheckError, match=r"400 bytes that has been freed"):
        copy(device, folder, keep, stale, COUNT)


def test_allocations_lie_apart(checked_device: CpuDevice, folder: Path) -> None:
    """Far misses too are outside: kernels get no memory next to an allocation."""
    device = checked_device
    buffers = [device.write(np.zeros(64, np.int32)) for _ in range(4)]
    for far in (1, 64, 4096):
        view = Buffer(buffers[1].ptr + 4 * far, 256, None)
        with pytest.raises(CheckError, match="out of bounds"):
            copy(device, folder, buffers[0], view, 64)


# cp.async

PIPELINE = r"""
__device__ void copy16(void* to, const void* from) {
    unsigned at = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at), "l"(from) : "memory");
}
#define COMMIT() asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(n) asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory")
extern "C" __global__ void k(float* out, const float* x, int tiles) {
    __shared__ __align__(16) float stage[3][128];
    int t = threadIdx.x;
    float sum = 0;
    for (int i = 0; i < 2; i++) { copy16(&stage[i][4 * (t % 32)], x + 128 * i + 4 * (t % 32)); COMMIT(); }
    for (int i = 0; i < tiles; i++) {
        WAITING
        FIRST
        if (i + 2 < tiles) copy16(&stage[(i + 2) % 3][4 * t], x + 128 * (i + 2) + 4 * t);
        COMMIT();
        sum += stage[i % 3][t] + stage[i % 3][127 - t];
        LAST
    }
    out[t] = sum;
}
"""


def pipeline(wait: str = "WAIT(1);", first: str = "__syncthreads();", last: str = "") -> str:
    return PIPELINE.replace("WAITING", wait).replace("FIRST", first).replace("LAST", last)


def test_a_pipeline_of_three_stages() -> None:
    x = floats(8, 128)
    args = [np.zeros(32, np.float32), x, np.int32(8)]
    result = clean(pipeline(), args, block=32)[0]
    expected = np.zeros(32, np.float32)
    for tile in x:
        expected += tile[:32] + tile[::-1][:32]
    assert np.array_equal(result, expected)
    clean(pipeline(wait="WAIT(0);"), args, block=32)


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"wait": "WAIT(2);"}, ("copy pending",)),  # one group too few
        ({"wait": ""}, ("copy pending",)),
        ({"first": ""}, ("race",)),  # waited for, but other threads' copies need a barrier
    ],
)
def test_pipelines_that_wait_too_little(change: dict[str, str], kinds: tuple[str, ...]) -> None:
    finds(pipeline(**change), [np.zeros(32, np.float32), floats(8, 128), np.int32(8)], *kinds, block=32)


def test_a_copy_counts_when_it_is_waited_for() -> None:
    """A barrier between the issue and the wait orders nothing."""
    source = (
        PIPELINE[: PIPELINE.index("extern")]
        + """
    extern "C" __global__ void k(float* out, const float* x) {
        __shared__ __align__(16) float s[128];
        int t = threadIdx.x;
        copy16(s + 4 * t, x + 4 * t);
        COMMIT();
        __syncthreads();
        WAIT(0);
        AFTER
        out[t] = s[127 - t];
    }"""
    )
    args = [np.zeros(32, np.float32), floats(128)]
    clean(source.replace("AFTER", "__syncthreads();"), args)
    error = finds(source.replace("AFTER", ""), args, "race")
    assert "cp.async" in str(error)


SIZES = r"""
extern "C" __global__ void k(float* out, const float* x, int bytes) {
    __shared__ __align__(16) float s[32];
    int t = threadIdx.x;
    unsigned at = (unsigned)__cvta_generic_to_shared(s + 4 * t);
    const float* from = bytes ? x + 4 * t : (const float*)16;
    if (t < 8) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(bytes) : "memory");
        asm volatile("cp.async.wait_all;" ::: "memory");
    }
    __syncthreads();
    out[t] = s[t];
}
"""


@pytest.mark.parametrize("count", [0, 3, 4, 12, 16])
def test_sources_that_end_early_are_read_no_further(count: int) -> None:
    """The array ends where the last copy's bytes end; the rest of the target is zeros."""
    whole = floats(32)
    x = whole.view(np.uint8)[: 112 + count]
    result = clean(SIZES, [np.zeros(32, np.float32), x, np.int32(count)])[0].reshape(8, 4)
    expected = np.zeros((8, 16), np.uint8)
    expected[:, :count] = whole.view(np.uint8).reshape(8, 16)[:, :count]
    assert np.array_equal(result.view(np.uint8), expected)
    if count:
        finds(SIZES, [np.zeros(32, np.float32), x[:-1], np.int32(count)], "out of bounds")


def test_a_copy_into_what_others_still_read() -> None:
    source = r"""
    extern "C" __global__ void k(float* out, const float* x) {
        __shared__ __align__(16) float s[128];
        int t = threadIdx.x;
        for (int i = 0; i < 2; i++) {
            unsigned at = (unsigned)__cvta_generic_to_shared(s + 4 * (t % 32));
            if (t < 32) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at), "l"(x + 4 * t) : "memory");
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads();
            out[64 * i + t] = s[127 - t];
            AFTER
        }
    }"""
    args = [np.zeros(128, np.float32), floats(128)]
    clean(source.replace("AFTER", "__syncthreads();"), args, block=64)
    finds(source.replace("AFTER", ""), args, "race", "copy pending", block=64)
