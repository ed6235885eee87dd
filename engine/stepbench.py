"""A training step on one batch, over and over: how long it takes, and which kernels the time goes to."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ptxtrain.data.loader import sort_rows
from ptxtrain.engine import init
from ptxtrain.engine.config import Config, flops_per_token, tokens_per_step
from ptxtrain.engine.device.base import Device, Launch, Plan
from ptxtrain.engine.init import F32
from ptxtrain.engine.step import StepResult, TrainStep

I32: TypeAlias = npt.NDArray[np.int32]


class BatchStep:
    """Calling it takes one step on the batch and gives the loss before the update."""

    def __init__(
        self,
        device: Device,
        config: Config,
        weights: F32,  # [parameters]
        tokens: I32,  # [S, T]
        targets: I32,  # [S, T], below 0: ignored
        way: str | None = None,
    ) -> None:
        """Take all memory and load the weights; m and v are zero."""
        self.device, self.config, self.tokens, self.targets = device, config, tokens, targets
        self.step = TrainStep(config, device, way=way)
        self.step.load(weights, np.zeros_like(weights), np.zeros_like(weights))
        self.taken = 0

    def queue(self) -> None:
        """`begin` and every micro-batch, each sorted as the trainer does; `step.finish` ends it."""
        step, vocab, size = self.step, self.config.model.vocab_size, self.step.micro_size
        step.begin(int(np.count_nonzero(self.targets >= 0)))
        for i in range(step.micro_batches):
            tokens = self.tokens[i * size : (i + 1) * size]
            order, starts = np.empty(tokens.size, np.int32), np.empty(vocab + 1, np.int32)
            sort_rows(tokens.reshape(-1), vocab, order, starts)
            step.micro_batch(i, tokens, self.targets[i * size : (i + 1) * size], order, starts)

    def start(self) -> StepResult:
        """Queue a whole step."""
        self.queue()
        self.taken += 1
        return self.step.finish(self.taken, self.config.optimizer.lr)

    def __call__(self) -> float:
        return self.start().wait()[0]

    def gradient(self) -> F32:
        """The batch's gradient, without an update, f32 [parameters]."""
        self.queue()
        return self.step.gradient()

    def seconds(self, steps: int) -> list[float]:
        """From the end of each of `steps` steps to the next, each queued while the one before it runs, as in training."""
        ends = []
        before = self.start()
        for _ in range(steps):
            after = self.start()
            before.wait()
            ends.append(time.perf_counter())
            before = after
        before.wait()
        ends.append(time.perf_counter())
        return [later - earlier for earlier, later in itertools.pairwise(ends)]

    def profile(self, repeats: int = 3) -> dict[str, tuple[int, float]]:
        """Launches and seconds of each kernel in a step, most seconds first; the launches of one kernel run together.

        The last thing to do with a step: its weights are those of no step afterwards.
        """
        device, run = self.device, self.device.run
        groups: dict[str, list[Launch]] = {}

        def collect(plan: Plan) -> None:
            for launch in plan.launches:
                groups.setdefault(label(launch), []).append(launch)
            run(plan)

        device.run = collect  # type: ignore[method-assign]
        try:
            self()
        finally:
            device.run = run  # type: ignore[method-assign]
        taken = {name: (len(launches), together(device, launches, repeats)) for name, launches in groups.items()}
        return dict(sorted(taken.items(), key=lambda item: -item[1][1]))


def together(device: Device, launches: Sequence[Launch], repeats: int) -> float:
    """The device's seconds for launches in a row, the best of several tries after one that does not count."""
    plan = device.plan(launches)
    device.run(plan)
    times = []
    for _ in range(repeats):
        before = device.record()
        device.run(plan)
        after = device.record()
        after.wait()
        times.append(after.since(before))
    return min(times)


def label(launch: Launch) -> str:
    """A kernel's name; for a product on the tensor cores also its layout and its sizes M x N x K."""
    kernel = launch.kernel
    if kernel.name != "matmul":
        return kernel.name
    numbers = {
        param.name: int(arg)
        for param, arg in zip(kernel.params, launch.args, strict=True)
        if isinstance(arg, np.generic) and param.name in ("m", "n", "k")
    }
    with kernel.path.open(encoding="utf-8") as file:
        spec = file.readline()  # the first line of a rendered file names its Spec
    layout = next(word for word in ("nn", "nt", "tn") if f"'{word}'" in spec)
    return "matmul {} {m} x {n} x {k}".format(layout, **numbers)


def random_batch(config: Config, seed: int = 0) -> tuple[I32, I32]:
    """Random tokens and those that follow them, each [S, T]."""
    size = (config.batch.sequences, config.model.context + 1)
    text = np.random.default_rng(seed).integers(0, config.model.vocab_size, size).astype(np.int32)
    return text[:, :-1].copy(), text[:, 1:].copy()


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A preset's step. `median` and `best` are in seconds, `kernels` as `BatchStep.profile` gives them."""

    preset: str
    way: str
    tokens: int
    flops: int
    median: float
    best: float
    kernels: dict[str, tuple[int, float]]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.median

    @property
    def tflops(self) -> float:
        """By 6 x parameters + 6·L·H·C·T for a token, as `train` prints it."""
        return self.flops / self.median / 1e12

    def to_json(self) -> dict[str, Any]:
        """Its part of the reports of `ptxtrain bench --json`."""
        return {
            "preset": self.preset,
            "way": self.way,
            "tokens": self.tokens,
            "median_ms": round(1e3 * self.median, 2),
            "best_ms": round(1e3 * self.best, 2),
            "tokens_per_second": round(self.tokens_per_second),
            "tflops": round(self.tflops, 3),
            "kernels": {
                name: {"launches": count, "ms": round(1e3 * seconds, 3)}
                for name, (count, seconds) in self.kernels.items()
            },
        }


def measure(device: Device, config: Config, steps: int = 5, way: str | None = None) -> StepTimes:
    """Steps of a config on a random batch."""
    batch = BatchStep(device, config, init.initial_weights(config.model, 1), *random_batch(config), way=way)
    batch()
    taken = batch.seconds(steps)
    tokens = tokens_per_step(config)
    return StepTimes(
        preset=config.name,
        way=batch.step.way,
        tokens=tokens,
        flops=tokens * flops_per_token(config.model),
        median=float(np.median(taken)),
        best=min(taken),
        kernels=batch.profile(),
    )
