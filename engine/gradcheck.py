"""The gradient check: every parameter tensor's gradient against differences of the loss, then one batch learned by
heart.

A model of awkward sizes runs the f32 way on 3 random sequences of 9 tokens. For each tensor and each of two unit
directions u (along the gradient, and random) the directional derivative g.u is compared with (L(w + eps u) - L(w - eps
u)) / 2 eps.

The step: eps is chosen so that the loss moves by about 2e-4, and is never below 1e-3. The f32 loss is noisy, which puts
a floor of about 3e-5 on the measured derivative, and norm weights have gradients around 1e-3, so a fixed small step
would mostly measure rounding. Nor does a step move a tensor by more than a fiftieth of its norm: a random direction may
happen to have no slope.

The point: the weights are the initial ones, but the layers' matrices are 8 times as large. At the usual size a query's
scores are nearly equal and the gradient of Q and K is a hundredth of that of V (measured), so an error in them would
hide in the tolerance. At 8 times the scores differ by about one and Q, K and V weigh alike. The size of the logits
depends on the embedding alone, so the loss stays near ln V.

The gradient is taken twice: in one micro-batch, which the direction along the gradient checks, and in three of one sequence
each, which add up in place and which the random direction checks.

Differences cannot see a forward and a backward that agree on the wrong function, so the loss at init is held against a
float64 model's as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ptxtrain.engine import init, philox
from ptxtrain.engine.config import BatchConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.init import F32
from ptxtrain.engine.kernels import Override
from ptxtrain.engine.model import I32
from ptxtrain.engine.parameters import Tensor
from ptxtrain.engine.step import TrainStep

MODEL = ModelConfig(vocab_size=97, context=9, layers=2, width=48, heads=4, kv_heads=2, head_dim=12, mlp_width=80)
SEQUENCES = 3
SEED = 17  # six of its 27 tokens repeat, three within their sequence: the embedding adds them up
LAYER_SCALE = 8.0
UNIFORM_LOSS = math.log(MODEL.vocab_size)  # what a model that knows nothing has, about
REFERENCE_LOSS = 4.576277  # of these weights and this batch in float64; a test computes it anew

LOSS_MOVES = 2e-4
SMALLEST_STEP = 1e-3
LARGEST_STEP = 0.02  # of the tensor's norm
RELATIVE, ABSOLUTE = 1e-2, 1e-4  # a row passes at |analytic - numeric| <= RELATIVE * max(|.|, |.|) + ABSOLUTE

INITIAL_WITHIN = 0.05  # of ln V
REFERENCE_WITHIN = 2e-5  # of the float64 model: 20 times the f32 rounding of a loss of 4.6 summed over 27 rows
MEMORISE_STEPS, MEMORISE_LR, MEMORISED_BELOW = 200, 3e-3, 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor along one direction. `error` is relative to the larger of the two derivatives."""

    tensor: str
    direction: str  # "gradient" or "random"
    analytic: float
    numeric: float
    error: float
    passed: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What the check found. `passed`: every row, the loss at init and the memorised loss."""

    passed: bool
    loss_at_init: float  # nats per token
    memorised_loss: float  # after 200 steps on the one batch
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        """The report as one JSON object; numbers that are not finite become null."""

        def finite(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: finite(item) for key, item in value.items()}
            if isinstance(value, list | tuple):
                return [finite(item) for item in value]
            return None if isinstance(value, float) and not math.isfinite(value) else value

        return json.dumps(finite(asdict(self)), allow_nan=False)


def check_config() -> Config:
    """The run that the check trains: one micro-batch, one leaf, a constant learning rate."""
    return Config(
        name="gradcheck",
        model=MODEL,
        batch=BatchConfig(sequences=SEQUENCES, micro_batch=SEQUENCES, leaves=1),
        optimizer=OptimizerConfig(lr=MEMORISE_LR, schedule="constant"),
        train=TrainConfig(steps=MEMORISE_STEPS, seed=SEED, way="f32"),
        data=DataConfig(),
    )


def initial_loss_is_right(loss: float) -> bool:
    """Near ln V, and what float64 says it is."""
    return abs(loss - UNIFORM_LOSS) <= INITIAL_WITHIN and abs(loss - REFERENCE_LOSS) <= REFERENCE_WITHIN


def run(
    device: Device,
    overrides: Mapping[str, Override] | None = None,
    progress: Callable[[int, int], None] | None = None,
    stop_at_failure: bool = False,
) -> Report:
    """Check every gradient on this device.

    `overrides` are kernel texts by stem that stand in for the shipped ones; `progress` is called with (done, of how
    many). `stop_at_failure` ends the check at the first thing that is off, with the rows so far and a memorised loss of
    NaN.
    """
    check = Check(device, overrides)
    total = 2 * len(check.step.table) + MEMORISE_STEPS
    loss_at_init = check.loss_at_init()
    if stop_at_failure and not initial_loss_is_right(loss_at_init):
        return Report(False, loss_at_init, math.nan, ())
    gradients = {"gradient": check.gradient(check.step), "random": check.gradient(check.pieces)}
    rows: list[Row] = []
    for index, tensor in enumerate(check.step.table):
        for direction, gradient in gradients.items():
            rows.append(check.row(index, tensor, direction, gradient))
            if stop_at_failure and not rows[-1].passed:
                return Report(False, loss_at_init, math.nan, tuple(rows))
            if progress is not None:
                progress(len(rows), total)
    memorised = check.memorise(lambda done: progress(len(rows) + done, total) if progress is not None else None)
    passed = all(row.passed for row in rows) and initial_loss_is_right(loss_at_init) and memorised < MEMORISED_BELOW
    return Report(passed, loss_at_init, memorised, tuple(rows))


class Check:
    """The small model, its batch and its weights."""

    def __init__(self, device: Device, overrides: Mapping[str, Override] | None = None) -> None:
        self.step, self.pieces = (
            TrainStep(check_config(), device, way="f32", micro_batch=size, overrides=overrides)
            for size in (SEQUENCES, 1)
        )
        context, vocab = MODEL.context, MODEL.vocab_size
        words = philox.words(SEED, philox.GRADIENT_CHECK, 0, 0, SEQUENCES * (context + 1))
        text = (words % vocab).astype(np.int32).reshape(SEQUENCES, context + 1)
        self.tokens: I32 = np.ascontiguousarray(text[:, :-1])
        self.targets: I32 = np.ascontiguousarray(text[:, 1:])
        self.weights = init.initial_weights(MODEL, SEED)
        for tensor in self.step.table:
            if tensor.decay and tensor.name != "embedding":
                self.weights[tensor.offset : tensor.offset + tensor.size] *= np.float32(LAYER_SCALE)
        self.zero = np.zeros_like(self.weights)

    def loss_at_init(self) -> float:
        """The mean loss at the weights, through the step's own sum."""
        self.step.load(self.weights, self.zero, self.zero)
        total, count = self.step.evaluate(self.tokens, self.targets)
        return total / count

    def loss(self, weights: F32) -> float:
        """The mean of the rows' f32 losses, taken in float64: summing them in f32 would double the noise."""
        self.step.load(weights, self.zero, self.zero)
        return float(self.step.row_losses(self.tokens, self.targets).astype(np.float64).mean())

    def gradient(self, step: TrainStep) -> F32:
        """The gradient of the mean loss at the weights, f32 [parameters]."""
        step.load(self.weights, self.zero, self.zero)
        self._forward_backward(step)
        return step.gradient()

    def _forward_backward(self, step: TrainStep) -> None:
        """The batch, in micro-batches of the step's size."""
        step.begin(self.targets.size)
        for i in range(step.micro_batches):
            part = slice(i * step.micro_size, (i + 1) * step.micro_size)
            flat = self.tokens[part].reshape(-1)
            order = np.argsort(flat, kind="stable").astype(np.int32)
            starts = np.searchsorted(flat[order], np.arange(MODEL.vocab_size + 1)).astype(np.int32)
            step.micro_batch(i, self.tokens[part], self.targets[part], order, starts)

    def row(self, index: int, tensor: Tensor, direction: str, gradient: F32) -> Row:
        """One tensor along its gradient or along a random direction (stream `index + 1` of the check's numbers)."""
        where = slice(tensor.offset, tensor.offset + tensor.size)
        g = gradient[where].astype(np.float64)
        if direction == "gradient":
            u = g
        else:
            u = init.normal(SEED, philox.GRADIENT_CHECK, index + 1, tensor.size).astype(np.float64)
        u = u / max(float(np.sqrt((u * u).sum())), 1e-300)
        w = self.weights[where].astype(np.float64)
        slope = abs(float((g * u).sum()))
        largest = LARGEST_STEP * float(np.sqrt((w * w).sum()))
        eps = max(SMALLEST_STEP, min(LOSS_MOVES / max(slope, 1e-300), largest))
        up, down = self.weights.copy(), self.weights.copy()
        up[where], down[where] = w + eps * u, w - eps * u
        # The weights are f32, so the step that was really taken is not quite 2 eps u.
        taken = up[where].astype(np.float64) - down[where].astype(np.float64)
        analytic = float((g * taken).sum()) / (2.0 * eps)
        numeric = (self.loss(up) - self.loss(down)) / (2.0 * eps)
        largest_of_both = max(abs(analytic), abs(numeric))
        apart = abs(analytic - numeric)
        return Row(
            tensor.name,
            direction,
            analytic,
            numeric,
            error=apart / max(largest_of_both, 1e-300),
            passed=apart <= RELATIVE * largest_of_both + ABSOLUTE,
        )

    def memorise(self, progress: Callable[[int], None]) -> float:
        """The mean loss of the one batch after 200 AdamW steps on it."""
        self.step.load(self.weights, self.zero, self.zero)
        for t in range(1, MEMORISE_STEPS + 1):
            self._forward_backward(self.step)
            self.step.finish(t, MEMORISE_LR)
            progress(t)
        total, count = self.step.evaluate(self.tokens, self.targets)
        return total / count
