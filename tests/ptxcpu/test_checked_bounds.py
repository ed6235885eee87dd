"""Checked mode: every access against its allocation, to the byte: extents, alignment, space, read-only memory."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from checkbench import clean, finds, launch

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"

# One thread accesses `address + offset` once.
ONE_ACCESS = (
    HEAD
    + """.visible .entry k(.param .u64 address, .param .s64 offset) {
    .reg .b64 %a, %o; .reg .b32 %x, %y, %z, %w; .reg .b64 %q; .reg .b16 %h;
    mov.u32 %x, 0; mov.u32 %y, 0; mov.u32 %z, 0; mov.u32 %w, 0; mov.u64 %q, 0; mov.u16 %h, 0;
    ld.param.u64 %a, [address];
    ld.param.s64 %o, [offset];
    add.s64 %a, %a, %o;
    INSTRUCTION
    ret;
}
"""
)
ACCESSES = {
    "ld.global.u8 %h, [%a];": 1,
    "ld.global.u16 %h, [%a];": 2,
    "ld.u32 %x, [%a];": 4,
    "ld.global.u64 %q, [%a];": 8,
    "ld.global.v2.u32 {%x, %y}, [%a];": 8,
    "ld.global.v4.u32 {%x, %y, %z, %w}, [%a];": 16,
    "ld.global.nc.u32 %x, [%a];": 4,
    "st.global.u8 [%a], %h;": 1,
    "st.u16 [%a], %h;": 2,
    "st.global.u32 [%a], %x;": 4,
    "st.global.v4.u32 [%a], {%x, %y, %z, %w};": 16,
    "atom.global.add.u32 %x, [%a], 1;": 4,
    "red.global.add.u64 [%a], 1;": 8,
    "atom.global.cas.b32 %x, [%a], 0, 1;": 4,
}


def one_access(instruction: str) -> str:
    return ONE_ACCESS.replace("INSTRUCTION", instruction)


@pytest.mark.parametrize("instruction", ACCESSES)
def test_the_first_and_the_last_byte_are_in_and_their_neighbours_out(instruction: str) -> None:
    """The arrays lie in the middle of a larger one, so that a miss would touch memory that is there."""
    size, text = ACCESSES[instruction], one_access(instruction)
    array = np.zeros(4096, np.uint8)
    start = 1024 + -array.ctypes.data % 16
    for nbytes in (48, 48 + size):
        part = array[start : start + nbytes]
        last = nbytes - size
        for offset in (0, last // size * size):
            launch(text, [part, np.int64(offset)], block=1)
        for offset in (-size, last // size * size + size):
            error = finds(text, [part, np.int64(offset)], "out of bounds", block=1)
            assert (error.allocation, error.offset, error.size) == ("address", offset, nbytes)


@pytest.mark.parametrize("short", [1, 2, 3])
def test_an_access_that_reaches_over_the_end_is_out(short: int) -> None:
    array = np.zeros(64, np.uint8)
    part = array[: 48 - short]
    error = finds(
        one_access("st.global.v4.u32 [%a], {%x, %y, %z, %w};"), [part, np.int64(32)], "out of bounds", block=1
    )
    assert f"{short} of them past the end of address ({48 - short} bytes)" in str(error)


@pytest.mark.parametrize("instruction", [i for i, size in ACCESSES.items() if size > 1])
def test_addresses_must_be_multiples_of_the_size(instruction: str) -> None:
    size = ACCESSES[instruction]
    array = np.zeros(96, np.uint8)
    part = array[-array.ctypes.data % 16 :][:64]
    for offset in {1, size // 2, size + 1}:
        error = finds(one_access(instruction), [part, np.int64(offset)], "misaligned", block=1)
        assert f"no multiple of {size}" in str(error)


def test_a_null_pointer_and_a_wild_one() -> None:
    for address in (0, 16, 1 << 47, (1 << 64) - 16):
        error = finds(
            one_access("ld.global.u32 %x, [%a];"), [np.uint64(address), np.int64(0)], "out of bounds", block=1
        )
        assert "no allocation" in str(error) and error.address == address


SCALE = """
extern "C" __global__ void k(float* out, const float* x, unsigned n, unsigned stride) {
    unsigned i = (blockIdx.x * blockDim.x + threadIdx.x) * stride;
    if (i <= n) out[i] = 2 * x[i];
}
extern "C" __global__ void right(float* out, const float* x, unsigned n, unsigned stride) {
    unsigned i = (blockIdx.x * blockDim.x + threadIdx.x) * stride;
    if (i < n) out[i] = 2 * x[i];
}
"""


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 100, 1000])
def test_a_guard_that_lets_one_too_many_through(n: int, stride: int) -> None:
    """Runs of lanes and scattered ones: the one lane outside is named, and what it reads."""
    n = n * stride
    x, out = np.arange(n, dtype=np.float32), np.zeros(n, np.float32)
    args = [out, x, np.uint32(n), np.uint32(stride)]
    grid = n // stride // 64 + 1
    error = finds(SCALE, args, "out of bounds", grid=grid, block=64)
    assert (error.allocation, error.offset, error.size) in (("k_param_1", 4 * n, 4 * n), ("k_param_0", 4 * n, 4 * n))
    linear = 64 * error.block[0] + error.thread[0]
    assert linear * stride == n
    result = clean(SCALE, args, entry="right", grid=grid, block=64)[0]
    assert np.array_equal(result[::stride], 2 * x[::stride])


def test_a_finding_names_everything() -> None:
    x, out = np.zeros(100, np.float32), np.zeros(100, np.float32)
    error = finds(SCALE, [out, x, np.uint32(100), np.uint32(1)], "out of bounds", grid=4, block=32)
    assert error.kernel == "k" and error.block == (3, 0, 0) and error.thread == (4, 0, 0)
    assert error.text.startswith("ld.global") and error.exit_code == 1
    assert re.fullmatch(
        r"k \(<text>:\d+\): out of bounds: `ld\.global\S* %f\d+, \[%rd\d+\];` in block \(3, 0, 0\), thread \(4, 0, 0\) "
        r"reads 4 bytes at 0x[0-9a-f]+, just past the end of k_param_1 \(400 bytes\)",
        str(error),
    ), str(error)


def test_two_dimensional_threads_and_blocks_are_named() -> None:
    source = """extern "C" __global__ void k(int* out) {
        unsigned i = threadIdx.x + 8 * (threadIdx.y + 4 * (threadIdx.z + 2 * (blockIdx.x + 3 * blockIdx.y)));
        out[i] = i;
    }"""
    out = np.zeros(64 * 5 + 8 * (4 * 1 + 2) + 3, np.int32)
    error = finds(source, [out], "out of bounds", grid=(3, 2, 1), block=(8, 4, 2))
    assert error.block == (2, 1, 0) and error.thread == (3, 2, 1)


def test_arrays_that_overlap_are_one_range_and_read_only_ones_stay_so() -> None:
    array = np.zeros(128, np.float32)
    args = [array[32:], array[:64], np.uint32(64), np.uint32(1)]
    launch(SCALE, args, entry="right", grid=1, block=64)
    x = np.ones(64, np.float32)
    x.flags.writeable = False
    clean(SCALE, [np.zeros(64, np.float32), x, np.uint32(64), np.uint32(1)], entry="right", grid=1, block=64)
    frozen = np.zeros(64, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(Exception, match=r"read-only: `st\.global.*writes at byte 0 of right_param_0 \(256 bytes"):
        launch(SCALE, [frozen, x, np.uint32(64), np.uint32(1)], entry="right", grid=1, block=64)


# Shared, local and constant memory, and module variables

SHARED = """
extern "C" __global__ void k(int* out, int at, int value) {
    __shared__ int tile[40];
    __shared__ int other[8];
    extern __shared__ int dynamic[];
    tile[threadIdx.x] = 1;
    if (threadIdx.x < 8) { other[threadIdx.x] = 2; tile[32 + threadIdx.x] = 1; }
    if (threadIdx.x < 16) dynamic[threadIdx.x] = 3;
    __syncthreads();
    int* p = value == 0 ? tile : value == 1 ? other : dynamic;
    if (threadIdx.x == 5) out[0] = p[at];
}
"""


@pytest.mark.parametrize(("which", "size", "name"), [(0, 40, "tile"), (1, 8, "other"), (2, 16, "dynamic")])
def test_shared_variables_end_where_they_end(which: int, size: int, name: str) -> None:
    out = np.zeros(1, np.int32)
    for at in (0, size - 1):
        assert clean(SHARED, [out, np.int32(at), np.int32(which)], block=32, shared=64)[0][0] == which + 1
    for at in (-1, size, size + 1):
        error = finds(SHARED, [out, np.int32(at), np.int32(which)], "out of bounds", block=32, shared=64)
        assert error.thread == (5, 0, 0)
        if at >= size:
            assert error.offset == 4 * at and error.size == 4 * size and name in str(error.allocation)


def test_dynamic_shared_memory_is_what_the_launch_gives() -> None:
    args = [np.zeros(1, np.int32), np.int32(15), np.int32(2)]
    clean(SHARED, args, block=32, shared=64)
    error = finds(SHARED, args, "out of bounds", block=32, shared=60)
    assert "dynamic shared memory (60 bytes)" in str(error)


def test_a_wide_access_that_reaches_over_the_end_of_shared_memory() -> None:
    args = [np.zeros(4, np.int32)]
    text = WINDOWS.replace("tile[64]", "tile[NBYTES]").replace(
        "INSTRUCTION", "st.shared.v4.u32 [tile+48], {%x, %x, %x, %x};"
    )
    clean(text.replace("NBYTES", "64"), args, block=1)
    for nbytes in (49, 60, 63):
        error = finds(text.replace("NBYTES", str(nbytes)), args, "out of bounds", block=1)
        assert f"{64 - nbytes} of them past the end of tile ({nbytes} bytes)" in str(error)


LOCAL = """
extern "C" __global__ void k(int* out, int at, int n) {
    int array[10];
    for (int i = 0; i < n; i++) array[i * 7 % 10] = i;
    out[threadIdx.x] = array[at];
}
"""


def test_local_arrays_end_where_they_end() -> None:
    out = np.zeros(32, np.int32)
    for at in (0, 9):
        clean(LOCAL, [out, np.int32(at), np.int32(10)])
    for at in (-1, 10):
        error = finds(LOCAL, [out, np.int32(at), np.int32(10)], "out of bounds")
        assert "local" in str(error) and "(40 bytes)" in str(error)


GLOBALS = r"""
__device__ int counters[6] = {5, 4, 3, 2, 1, 0};
__device__ int more[6];
__constant__ int table[4] = {7, 8, 9, 10};
extern "C" __global__ void k(int* out, int at, int what) {
    if (what == 0) out[0] = counters[at];
    if (what == 1) more[at] = 1;
    if (what == 2) out[0] = table[at];
    if (what == 3) asm volatile("st.u32 [%0], %1;" :: "l"(table + at), "r"(0));
}
"""


def test_module_variables_are_allocations() -> None:
    out = np.zeros(1, np.int32)
    for what, size, name in ((0, 6, "counters"), (1, 6, "more"), (2, 4, "table")):
        for at in (0, size - 1):
            clean(GLOBALS, [out, np.int32(at), np.int32(what)], block=1)
        for at in (-1, size):
            error = finds(GLOBALS, [out, np.int32(at), np.int32(what)], "out of bounds", block=1)
            assert (error.allocation, error.offset, error.size) == (name, 4 * at, 4 * size)
    error = finds(GLOBALS, [out, np.int32(0), np.int32(3)], "read-only", block=1)
    assert error.allocation == "table"


WINDOWS = (
    HEAD
    + """.visible .entry k(.param .u64 array) {
    .shared .align 16 .b8 tile[64];
    .reg .b64 %a, %s, %g; .reg .b32 %x;
    ld.param.u64 %a, [array];
    mov.u64 %s, tile;
    cvta.shared.u64 %g, %s;
    mov.u32 %x, 1;
    st.shared.u32 [tile], %x;
    INSTRUCTION
    ret;
}
"""
)


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("ld.global.u32 %x, [%g];", "lies in shared memory"),
        ("st.global.u32 [%g], %x;", "lies in shared memory"),
        ("ld.shared.u32 %x, [%g];", "an address in shared memory as a generic address"),
        ("ld.shared.u32 %x, [%a];", "an address in array in global memory"),
        ("ld.const.u32 %x, [%a];", "not in the state space that the instruction names"),
    ],
)  # fmt: skip
def test_the_state_space_must_be_the_memorys(instruction: str, message: str) -> None:
    error = finds(WINDOWS.replace("INSTRUCTION", instruction), [np.zeros(4, np.int32)], "wrong space", block=1)
    assert message in str(error)


@pytest.mark.parametrize(
    "instruction", ["ld.u32 %x, [%g];", "ld.shared.u32 %x, [%s];", "ld.global.u32 %x, [%a];", "ld.u32 %x, [%a];"]
)
def test_right_and_generic_spaces_pass(instruction: str) -> None:
    clean(WINDOWS.replace("INSTRUCTION", instruction), [np.zeros(4, np.int32)], block=1)


def test_random_extents() -> None:
    """Any size, any start, any access: found exactly when a byte of it lies outside."""
    rng = np.random.default_rng(5)
    array = np.zeros(1 << 12, np.uint8)
    base = -array.ctypes.data % 16
    for _ in range(300):
        instruction = str(rng.choice(list(ACCESSES)))
        size = ACCESSES[instruction]
        start, nbytes = base + int(rng.integers(16, 1024)), int(rng.integers(1, 200))
        offset = int(rng.integers(-20, nbytes + 20))
        args: list[Any] = [array[start : start + nbytes], np.int64(offset)]
        if (start - base + offset) % size:
            expected = "misaligned" if 0 <= offset <= nbytes - size else "out of bounds"
        else:
            expected = "" if 0 <= offset <= nbytes - size else "out of bounds"
        kind = ""
        try:
            launch(one_access(instruction), args, block=1)
        except Exception as error:
            kind = error.kind  # type: ignore[attr-defined]
        assert kind == expected, (instruction, start - base, nbytes, offset)
