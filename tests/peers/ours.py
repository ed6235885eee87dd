"""Our training step on a given batch, as the peers run theirs: forward, backward, clip, update and the loss read back."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from ptxtrain.data.loader import sort_rows
from ptxtrain.engine.config import Config
from ptxtrain.engine.device.base import Device, Launch, Plan
from ptxtrain.engine.step import TrainStep

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


class OurStep:
    """Call it for one step on the batch; the result is the loss."""

    def __init__(
        self,
        device: Device,
        config: Config,
        weights: F32,  # [parameters]
        tokens: I32,  # [S, T]
        targets: I32,  # [S, T]
        way: str = "fast",
    ) -> None:
        self.device, self.config, self.tokens, self.targets = device, config, tokens, targets
        self.step = TrainStep(config, device, way=way)
        self.step.load(weights, np.zeros_like(weights), np.zeros_like(weights))
        self.done = 0

    def gradient(self) -> F32:
        """The batch's gradient, without an update."""
        self.queue()
        return self.step.gradient()

    def queue(self) -> None:
        """`begin` and every micro-batch of a step; `step.finish` ends it."""
        step, vocab, size = self.step, self.config.model.vocab_size, self.step.micro_size
        step.begin(int(np.count_nonzero(self.targets >= 0)))
        for i in range(step.micro_batches):
            tokens = self.tokens[i * size : (i + 1) * size]
            order, starts = np.empty(tokens.size, np.int32), np.empty(vocab + 1, np.int32)
            sort_rows(tokens.reshape(-1), vocab, order, starts)
            step.micro_batch(i, tokens, self.targets[i * size : (i + 1) * size], order, starts)

    def __call__(self) -> float:
        self.queue()
        self.done += 1
        return self.step.finish(self.done, self.config.optimizer.lr).wait()[0]

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
        taken = {}
        for name, launches in groups.items():
            plan = device.plan(launches)
            times = []
            for _ in range(repeats):
                device.synchronize()
                start = time.perf_counter()
                device.run(plan)
                device.synchronize()
                times.append(time.perf_counter() - start)
            taken[name] = len(launches), min(times)
        return dict(sorted(taken.items(), key=lambda item: -item[1][1]))


def label(launch: Launch) -> str:
    """A kernel's name; for a product also its layout (in the file's spec) and what it multiplies."""
    if launch.kernel.name != "matmul":
        return launch.kernel.name
    names = [param.name for param in launch.kernel.params]
    sizes = {name: int(arg) for name, arg in zip(names, launch.args, strict=True) if isinstance(arg, np.generic)}
    first = launch.kernel.path.read_text(encoding="utf-8").split("\n", 1)[0]
    layout = next(word for word in ("nn", "nt", "tn") if f"'{word}'" in first)
    return f"matmul {layout} {sizes['m']} x {sizes['n']} x {sizes['k']}"
