"""How fast a model decodes and reads prompts on the CPU device, beside the memory's own speed, all in one run.

A token needs every weight once, so the bound is the time to read that many bytes at the fastest rate measured: by our own vector
loads or by NumPy's, over a buffer past the caches. Rounds of all measurements take turns, and of each the best time counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import numpy as np
import numpy.typing as npt

from ptxtrain.engine import init
from ptxtrain.engine.cache import cache_dir, write_once
from ptxtrain.engine.config import ModelConfig
from ptxtrain.engine.decode import MOST_ROWS, Decoder
from ptxtrain.engine.device.base import Device, Launch, Plan
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.generate import load_weights
from ptxtrain.engine.parameters import matrix_count, parameter_table

READ_BYTES = 1 << 29  # 512 MiB: past the last cache of a large server too
PART_BYTES = (
    1 << 26
)  # read at a time, in turns: about as long as a token, so that a busy machine's pauses hit both alike
PROMPT = 256  # tokens before those that are timed: half of the dev preset's context
STEPS = 16  # tokens of a round
ROUNDS = 6

# Every warp reads 64 KiB; one in 2^32 times the sum of its words is what makes it write, so that nothing is optimised away.
_READ = """// read: x is read once, 16 times 128 bytes of a warp in flight
.version 7.0
.target sm_80
.address_size 64
.visible .entry read(.param .u64 out, .param .u64 x)
.reqntid 32, 4, 1
{
    .reg .u64 %out, %x, %at;
    .reg .u32 %i, %warp, %lane, %turn, %sum, %v<16>;
    .reg .pred %more, %is_rare;
    ld.param.u64 %out, [out];
    ld.param.u64 %x, [x];
    mov.u32 %i, %ctaid.x;
    mov.u32 %warp, %tid.y;
    mov.u32 %lane, %tid.x;
    mad.lo.u32 %i, %i, 4, %warp;
    mul.wide.u32 %at, %i, 65536;
    add.u64 %x, %x, %at;
    mul.wide.u32 %at, %lane, 4;
    add.u64 %x, %x, %at;
    mov.u32 %sum, 0;
    mov.u32 %turn, 0;
TURN:
LOADS
    add.u64 %x, %x, 2048;
    add.u32 %turn, %turn, 1;
    setp.lt.u32 %more, %turn, 32;
    @%more bra TURN;
    setp.eq.u32 %is_rare, %sum, 0x12345678;
    @%is_rare st.global.u32 [%out], %sum;
    ret;
}
"""
_WARP_BYTES, _WARPS = 1 << 16, 4


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """The best times of a run, in seconds."""

    step: float  # one token of one text
    step_of_four: float  # one token of each of MOST_ROWS texts
    prefill: float  # a prompt of T tokens
    context: int
    weight_bytes: int  # of the matrices, as the kernels read them
    bandwidth: float  # bytes a second, read

    @property
    def bound(self) -> float:
        """Seconds to read the weights once."""
        return self.weight_bytes / self.bandwidth

    @property
    def ratios(self) -> dict[str, float]:
        """As `ptxtrain bench` prints them."""
        return {
            "decode_vs_bandwidth": self.bound / self.step,
            "prefill_vs_decode": self.step / (self.prefill / self.context),
        }

    @property
    def rates(self) -> dict[str, float]:
        """Tokens a second, and GB/s."""
        return {
            "decode_tokens": 1 / self.step,
            "decode_tokens_of_4": MOST_ROWS / self.step_of_four,
            "prefill_tokens": self.context / self.prefill,
            "memory_read": self.bandwidth / 1e9,
        }


def measure(cfg: ModelConfig, threads: int, *, way: str = "fast", rounds: int = ROUNDS) -> DecodeTimes:
    """Decode and read prompts of T tokens with a model of initial weights. Some ten seconds for the dev preset."""
    device = CpuDevice(threads)
    try:
        weights = load_weights(cfg, device, init.initial_weights(cfg, 1), way)
        one, four = (Decoder(cfg, device, weights, way=way, sequences=n) for n in (1, MOST_ROWS))
        text = np.random.default_rng(0).integers(0, cfg.vocab_size, cfg.context).astype(np.int32)
        prompt = text[: min(PROMPT, cfg.context // 2)]
        readers = _readers(device, threads)
        works: dict[str, Callable[[], object]] = {
            "prefill": partial(one.read, text),
            "step": partial(one.step, [1]),
            "four": partial(four.step, [1] * MOST_ROWS),
        }
        best = dict.fromkeys((*works, *readers), float("inf"))
        for _ in range(rounds):
            for decoder in (one, four):
                decoder.read(prompt)
            turns = min(STEPS, cfg.context - len(prompt))
            for name in ("step", "four"):
                best[name] = min(best[name], *(_timed(works[name]) for _ in range(turns)))
            for name, work in readers.items():
                best[name] = min(best[name], *(_timed(work) for _ in range(READ_BYTES // PART_BYTES)))
            best["prefill"] = min(best["prefill"], _timed(works["prefill"]))
        table = parameter_table(cfg)
        item = 4 if weights.matrices is weights.f32 else 2
        return DecodeTimes(
            step=best["step"],
            step_of_four=best["four"],
            prefill=best["prefill"],
            context=cfg.context,
            weight_bytes=item * matrix_count(table),
            bandwidth=PART_BYTES / min(best[name] for name in readers),
        )
    finally:
        device.close()


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _readers(device: CpuDevice, threads: int) -> dict[str, Callable[[], object]]:
    """Ways to read the next PART_BYTES on all threads."""
    buffer = device.alloc(READ_BYTES)
    device.fill(buffer, 0)
    device.synchronize()
    lines = [f"    ld.global.u32 %v{i}, [%x + {128 * i}];" for i in range(16)]
    lines += [f"    xor.b32 %sum, %sum, %v{i};" for i in range(16)]
    path = cache_dir("kernels") / "bench-read.ptx"
    write_once(path, _READ.replace("LOADS", "\n".join(lines)).encode())
    kernel, out = device.load(path, "read"), device.alloc(4)
    grid = (PART_BYTES // _WARP_BYTES // _WARPS, 1, 1)
    starts = range(0, READ_BYTES, PART_BYTES)
    plans = cycle(
        [device.plan([Launch(kernel, grid, (32, _WARPS, 1), (out, buffer.view(s, PART_BYTES)))]) for s in starts]
    )
    owner = buffer.owner
    assert isinstance(owner, np.ndarray)
    words = cycle([owner[start : start + PART_BYTES].view(np.int64) for start in starts])
    return {"loads": lambda: _run(device, next(plans)), "numpy": lambda: _numpy_read(next(words), threads)}


def _run(device: Device, plan: Plan) -> None:
    device.run(plan)
    device.synchronize()


def _numpy_read(words: npt.NDArray[np.int64], threads: int) -> None:
    parts = [threading.Thread(target=part.max) for part in np.array_split(words, threads)]
    for part in parts:
        part.start()
    for part in parts:
        part.join()
