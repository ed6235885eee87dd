"""Whole training steps through the CUDA device's code: the same bits as the CPU device, whose kernels the fake runs.

What differs between the two is all that the CUDA device does: arguments, copies, graphs, the order on the stream. The fake
puts off everything until something waits, so a host array that is reused too early shows in the bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from fake_cupy import FakeCupy, open_fake

from ptxtrain.data.loader import sort_rows
from ptxtrain.engine import init
from ptxtrain.engine.checkpoint import Snapshot
from ptxtrain.engine.config import BatchConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.progress import Cadence, View
from ptxtrain.engine.signals import Stop
from ptxtrain.engine.step import TrainStep
from ptxtrain.engine.trainer import Trainer

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


class Reader:
    """Random sequences that follow from their place alone."""

    def __init__(self) -> None:
        self.position = (0, 0)

    def read(self, sequences: int, tokens: np.ndarray, targets: np.ndarray) -> None:
        step = self.position[1] + 1
        text = np.random.default_rng(step).integers(0, MODEL.vocab_size, (sequences, MODEL.context + 1))
        tokens[:], targets[:] = text[:, :-1], text[:, 1:]
        self.position = (0, step)


class Saves:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.states: list[Snapshot] = []

    def submit(self, snapshot: Snapshot) -> None:
        self.states.append(snapshot)

    def validated(self, step: int, loss: float) -> None:
        pass


def loop(device: Device) -> tuple[list[dict[str, Any]], list[Snapshot]]:
    """The real loop: its metrics, and the states that it saved."""
    train = replace(CONFIG.train, steps=4, save_every=2, validate_every=3, sample_every=0, way="bf16")
    config = replace(CONFIG, train=train, batch=BatchConfig(2, 1, 1))
    step, lines, saves = TrainStep(config, device), [], Saves()
    weights = init.initial_weights(MODEL, 5)
    zero = np.zeros_like(weights)
    step.load(weights, zero, zero)
    text = np.random.default_rng(99).integers(0, MODEL.vocab_size, (2, MODEL.context + 1)).astype(np.int32)
    Trainer(
        config,
        device,
        step,
        Snapshot(0, weights, zero, zero, (0, 0)),
        last=4,
        reader=Reader(),
        sort=sort_rows,
        locate=lambda number, position: "",
        validation=(text[:, :-1].copy(), text[:, 1:].copy()),
        sample=lambda stopping: None,
        saves=saves,
        metrics=lambda **line: lines.append(line),
        cadence=Cadence(2),
        stop=Stop(),
        view=View(),
    ).run()
    return lines, saves.states


def test_the_loop_gives_the_bits_of_the_cpu_device(fake: FakeCupy) -> None:
    """Batches are read and copies of the state are made as late as the stream allows: one given back or taken too early shows."""
    from ptxtrain.engine.device.cpu import CpuDevice

    lines, states = loop(open_fake(fake))
    cpu_lines, cpu_states = loop(CpuDevice(2))
    same = ("step", "loss", "grad_norm", "lr", "digest", "validation_loss")
    assert [{k: line.get(k) for k in same} for line in lines] == [{k: line.get(k) for k in same} for line in cpu_lines]
    assert [state.step for state in states] == [state.step for state in cpu_states] == [2, 4]
    for ours, theirs in zip(states, cpu_states, strict=True):
        assert ours.digest() == theirs.digest() and ours.sum() == ours.device_sum
    assert all(line["device_wait"] >= 0 for line in lines if "device_wait" in line)


def test_training_gives_the_bits_of_the_cpu_device(fake: FakeCupy) -> None:
    from ptxtrain.engine.device.cpu import CpuDevice

    losses, state = train(open_fake(fake), "bf16")
    assert losses[-1][0] < losses[0][0] + 1 and all(np.isfinite(values).all() for values in state)
    cpu_losses, cpu_state = train(CpuDevice(2), "bf16")
    assert losses == cpu_losses
    for name, ours, theirs in zip(("weights", "m", "v"), state, cpu_state, strict=True):
        assert ours.tobytes() == theirs.tobytes(), f"{name}: {np.flatnonzero(ours != theirs)[:5]} differ"
    assert fake.state.log.count("graph") >= 3 * (4 + 2 + 1)  # micro-batches, leaves, update
