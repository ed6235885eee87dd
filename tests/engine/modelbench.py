"""What the tests of model and step share: awkward shapes, batches with ignored targets, a step's gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ptxtrain.engine import init
from ptxtrain.engine.config import BatchConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.parameters import Tensor, parameter_table
from ptxtrain.engine.step import TrainStep

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

# Nothing divides anything: three parts of rows to a sequence, a vocabulary of no whole warps, heads of 10.
LONG = ModelConfig(vocab_size=67, context=70, layers=2, width=40, heads=4, kv_heads=2, head_dim=10, mlp_width=56)
SHORT = replace(LONG, context=11)
# As awkward as the fast kernels take it: rows of 8, 40 or 56 numbers, nothing a multiple of a tile.
FAST = ModelConfig(vocab_size=72, context=70, layers=2, width=40, heads=4, kv_heads=2, head_dim=32, mlp_width=56)


def fit(model: ModelConfig, way: str) -> ModelConfig:
    """The model, or for fast kernels one of its context that they take."""
    return replace(FAST, context=model.context) if way.startswith("fast") else model


def config(model: ModelConfig, sequences: int, micro_batch: int, leaves: int) -> Config:
    return Config(
        name="test",
        model=model,
        batch=BatchConfig(sequences, micro_batch, leaves),
        optimizer=OptimizerConfig(lr=1e-3),
        train=TrainConfig(steps=10),
        data=DataConfig(),
    )


def batch(model: ModelConfig, sequences: int, seed: int = 0) -> tuple[I32, I32]:
    """Random tokens and targets [S, T]; some targets are ignored, in the middle and at the end."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, model.vocab_size, (sequences, model.context + 1)).astype(np.int32)
    tokens, targets = text[:, :-1].copy(), text[:, 1:].copy()
    targets[0, 3:6] = -1
    targets[-1, -1] = -1
    return tokens, targets


def sorted_rows(tokens: I32, vocab: int) -> tuple[I32, I32]:
    order = np.argsort(tokens.reshape(-1), kind="stable").astype(np.int32)
    counts = np.bincount(tokens.reshape(-1), minlength=vocab)
    return order, np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def weights(model: ModelConfig, seed: int = 1, layer_scale: float = 2.0) -> F32:
    """Initial weights with the layers' matrices enlarged, so that attention is not a plain mean, and uneven norm weights."""
    flat = init.initial_weights(model, seed)
    rng = np.random.default_rng(seed)
    for t in parameter_table(model):
        part = flat[t.offset : t.offset + t.size]
        if not t.decay:
            part += rng.normal(0.0, 0.2, t.size).astype(np.float32)
        elif t.name != "embedding":
            part *= np.float32(layer_scale)
    return flat


def load(step: TrainStep, flat: F32) -> None:
    step.load(flat, np.zeros_like(flat), np.zeros_like(flat))


def queue(step: TrainStep, tokens: I32, targets: I32, count: int | None = None) -> None:
    """`begin` and every micro-batch."""
    step.begin(int(np.count_nonzero(targets >= 0)) if count is None else count)
    size = step.micro_size
    for i in range(step.micro_batches):
        part = slice(i * size, (i + 1) * size)
        order, starts = sorted_rows(tokens[part], step.config.model.vocab_size)
        step.micro_batch(i, tokens[part], targets[part], order, starts)


@dataclass
class Outcome:
    gradient: F32
    loss: float
    grad_norm: float
    params: F32


def one_step(
    device: Device, cfg: Config, way: str, flat: F32, tokens: I32, targets: I32, count: int | None = None
) -> Outcome:
    """A whole first step from these weights."""
    step = TrainStep(cfg, device, way=way)
    load(step, flat)
    queue(step, tokens, targets, count)
    gradient = step.gradient()
    loss, norm = step.finish(1, cfg.optimizer.lr).wait()
    return Outcome(gradient, loss, norm, step.snapshot()[0])


def part(flat: npt.NDArray[np.floating], t: Tensor) -> npt.NDArray[np.floating]:
    return flat[t.offset : t.offset + t.size]
