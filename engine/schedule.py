"""The learning rate and AdamW's bias corrections: pure functions of the step, in float64 `math`.

Steps count from 1: step t is the t-th update, and `lr(steps)` is the schedule's last value. Python's `math` is used
because NumPy's transcendentals change bits with the SIMD level of the machine.
"""

from __future__ import annotations

import math

from ptxtrain.engine.config import Config, OptimizerConfig, tokens_per_step


def learning_rate(step: int, config: Config) -> float:
    """The learning rate of update `step` (1, 2, …) of a run; see `lr`."""
    return lr(step, config.optimizer, config.train.steps, tokens_per_step(config))


def warmup_steps(optimizer: OptimizerConfig, tokens: int) -> int:
    """How many updates of `tokens` tokens each warm-up takes: `warmup_steps`, or enough for `warmup_tokens`."""
    return optimizer.warmup_steps or -(-optimizer.warmup_tokens // tokens)


def lr(
    step: int,
    optimizer: OptimizerConfig,
    steps: int,
    tokens: int,  # in a step: S x T
) -> float:
    """The learning rate of update `step` (1, 2, …) in a run of `steps` updates.

    Warm-up rises as lr * step / w up to step w = warmup_steps(optimizer, tokens). Then, with x going from 0 at the
    warm-up's end to 1 at `steps`, and r = min_lr_ratio:
        cosine    lr * (r + (1 - r) * (1 + cos(pi * x)) / 2)
        linear    lr * (1 - (1 - r) * x)
        constant  lr
        wsd       lr, then linearly down to lr * r over the last decay_ratio of all steps
    Past `steps` it stays at its last value.
    """
    peak, warmup, ratio = optimizer.lr, warmup_steps(optimizer, tokens), optimizer.min_lr_ratio
    if step < 1:
        raise ValueError(f"steps count from 1, not {step}")
    if step <= warmup:
        return peak * step / warmup
    if optimizer.schedule == "constant":
        return peak
    start = warmup
    if optimizer.schedule == "wsd":
        start = max(warmup, steps - round(optimizer.decay_ratio * steps))
        if step <= start:
            return peak
    x = 1.0 if step >= steps else (step - start) / (steps - start)
    if optimizer.schedule == "cosine":
        return peak * (ratio + (1.0 - ratio) * 0.5 * (1.0 + math.cos(math.pi * x)))
    return peak * (1.0 - (1.0 - ratio) * x)
