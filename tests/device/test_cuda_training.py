"""Whole training steps through the CUDA device's code: the same bits as the CPU device, whose kernels the fake runs.

What differs between the two is all that the CUDA device does: arguments, copies, graphs, the order on the stream. The fake
puts off everything until something waits, so a host array that is reused too early shows in the bits.
"""

from __future__ import annotations

import numpy as np
from fake_cupy import FakeCupy, open_fake

from ptxtrain.engine.config import BatchConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.step import TrainStep

MODEL = ModelConfig(vocab_size=61, context=9, layers=1, width=32, heads=4, kv_heads=2, head_dim=8, mlp_width=48)
CONFIG = Config("cuda", MODEL, BatchConfig(4, 1, 2), OptimizerConfig(lr=1e-2), TrainConfig(steps=3), DataConfig())


def train(device: Device, way: str) -> tuple[list[tuple[float, float]], list[np.ndarray]]:
    """Three steps, the second queued while the first may still run; losses and norms, then weights, m and v."""
    step = TrainStep(CONFIG, device, way=way)
    step.initialise(5)
    results = []
    for number in (1, 2, 3):
        text = np.random.default_rng(number).integers(0, MODEL.vocab_size, (4, MODEL.context + 1)).astype(np.int32)
        step.begin(text[:, 1:].size)
        for index in range(4):
            tokens, targets = text[index : index + 1, :-1], text[index : index + 1, 1:]
            order = np.argsort(tokens.ravel(), kind="stable").astype(np.int32)
            starts = np.searchsorted(tokens.ravel()[order], np.arange(MODEL.vocab_size + 1)).astype(np.int32)
            step.micro_batch(index, tokens, targets, order, starts)
        results.append(step.finish(number, 1e-2))
    return [result.wait() for result in results], list(step.snapshot())


def test_training_gives_the_bits_of_the_cpu_device(fake: FakeCupy) -> None:
    from ptxtrain.engine.device.cpu import CpuDevice

    losses, state = train(open_fake(fake), "bf16")
    assert losses[-1][0] < losses[0][0] + 1 and all(np.isfinite(values).all() for values in state)
    cpu_losses, cpu_state = train(CpuDevice(2), "bf16")
    assert losses == cpu_losses
    for name, ours, theirs in zip(("weights", "m", "v"), state, cpu_state, strict=True):
        assert ours.tobytes() == theirs.tobytes(), f"{name}: {np.flatnonzero(ours != theirs)[:5]} differ"
    assert fake.state.log.count("graph") >= 3 * (4 + 2 + 1)  # micro-batches, leaves, update
