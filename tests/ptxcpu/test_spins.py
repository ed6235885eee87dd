"""Threads that wait for each other without a barrier: between blocks, warps of a block, and lanes of a warp."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from ptxtrain.engine.device.nvrtc import compile_to_ptx
from ptxtrain.engine.errors import DeviceError
from ptxtrain.engine.ptxcpu import load
from ptxtrain.engine.ptxcpu.module import LoadedModule, shared_pool


def kernel(body: str) -> LoadedModule:
    head = (
        'extern "C" __global__ void k(int* out) { volatile int* v = out; int t = threadIdx.x, lane = t % 32; (void)v; '
    )
    return load(compile_to_ptx(f"{head} (void)lane; {body} }}\n", "spin.cu"))


def run(body: str, size: int = 64, grid: int = 1, block: int = 64) -> Any:
    out = np.zeros(size, np.int32)
    kernel(body).launch("k", grid=(grid, 1, 1), block=(block, 1, 1), args=[out], threads=2)
    return out


def test_a_lane_waits_for_another_of_its_warp() -> None:
    out = run("if (lane == 0) { while (v[0] == 0) {} out[1] = v[0] + 1; } else if (lane == 1) { v[0] = 7; }", block=32)
    assert out[:2].tolist() == [7, 8]


def test_lanes_hand_a_number_on() -> None:
    """Lane by lane, from the last to the first."""
    out = run(
        "while (v[0] != 31 - lane) {} out[1] = out[1] * 2 + (lane & 1); __threadfence(); v[0] = v[0] + 1;", block=32
    )
    expected = 0
    for lane in reversed(range(32)):
        expected = (expected * 2 + (lane & 1)) & 0xFFFFFFFF
    assert out[0] == 32 and out[1] == np.uint32(expected).astype(np.int32)


def test_a_lock_before_a_barrier_and_shuffles() -> None:
    body = """__shared__ int lock, total;
    if (t == 0) { lock = 0; total = 0; }
    __syncthreads();
    while (atomicCAS(&lock, 0, 1) != 0) {}
    *(volatile int*)&total += t;
    __threadfence_block();
    atomicExch(&lock, 0);
    __syncthreads();
    int sum = total;
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, lane, d) - lane;
    out[t] = sum;"""
    expected = 96 * 95 // 2 + sum((np.arange(96) % 32 ^ d) - np.arange(96) % 32 for d in (16, 8, 4, 2, 1))
    assert (run(body, 96, block=96) == expected).all()


def test_two_warps_take_turns() -> None:
    body = """__shared__ volatile int turn, value;
    if (t == 0) { turn = 0; value = 1; }
    __syncthreads();
    for (int i = 0; i < 50; i++) {
        while (turn != t / 32) {}
        __syncwarp();
        if (lane == 3) { value = (value * 3 + t) % 1000; __threadfence_block(); turn = 1 - t / 32; }
        __syncwarp();
    }
    __syncthreads();
    out[t] = value;"""
    value = 1
    for _ in range(50):
        for thread in (3, 35):
            value = (value * 3 + thread) % 1000
    assert (run(body) == value).all()


def test_blocks_wait_for_those_before_them() -> None:
    body = """if (t == 0) {
        if (blockIdx.x) while (atomicAdd(&out[blockIdx.x - 1], 0) == 0) { __nanosleep(100); }
        atomicExch(&out[blockIdx.x], blockIdx.x ? atomicAdd(&out[blockIdx.x - 1], 0) + 2 : 1);
    }"""
    assert run(body, grid=40)[:40].tolist() == list(range(1, 81, 2))


def test_a_loop_of_atomics_that_decides_nothing_is_an_ordinary_loop() -> None:
    """It does not suspend the warp: no coroutine, and so nothing to pay."""
    assert "coro" not in kernel("for (int i = 0; i < 9; i++) atomicAdd(&out[i * t % 7], 1);").ir("k", (64, 1, 1))
    assert "coro" in kernel("while (v[0] == 0) {}").ir("k", (64, 1, 1))


def test_stopping_ends_a_wait_that_nobody_ends() -> None:
    module, out, ended = kernel("while (v[0] == 0) {} out[1] = 1;"), np.zeros(2, np.int32), threading.Event()

    def launch() -> None:
        module.launch("k", grid=(3, 1, 1), block=(64, 1, 1), args=[out], threads=2)
        ended.set()

    waiter = threading.Thread(target=launch, daemon=True)
    waiter.start()
    assert not ended.wait(0.5)
    start = time.monotonic()
    try:
        shared_pool(2).stop()
        assert ended.wait(20)
    finally:
        shared_pool(2).resume()
        out[0] = 1
    waiter.join(20)
    assert time.monotonic() - start < 10 and out[1] == 0


@pytest.mark.parametrize("who", ["t == 40", "blockIdx.x == 1 && t == 0"])
def test_a_trap_ends_those_who_wait(who: str) -> None:
    with pytest.raises(DeviceError, match="the kernel executed trap"):
        run(f"if ({who}) __trap(); while (v[0] == 0) {{}}", grid=4)
