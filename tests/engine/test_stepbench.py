"""Timing a step: every launch is counted once under its own name, and timing changes no step before it."""

from __future__ import annotations

import numpy as np

from ptxtrain.engine import init, stepbench
from ptxtrain.engine.config import load_preset
from ptxtrain.engine.device.base import Device

CONFIG = load_preset(
    "tiny",
    (
        *("vocab_size=512", "context=64", "layers=2", "width=64", "heads=2", "kv_heads=1", "mlp_width=96"),
        *("sequences=4", "micro_batch=2", "leaves=2"),
    ),
)


def test_the_profile_counts_every_launch(device: Device) -> None:
    """Two micro-batches of two layers: each kernel as often as the model has it, products by layout and sizes."""
    batch = stepbench.BatchStep(device, CONFIG, init.initial_weights(CONFIG.model, 1), *stepbench.random_batch(CONFIG))
    batch()
    kernels = batch.profile(repeats=1)
    counts = {name: count for name, (count, _) in kernels.items()}
    assert counts["attention_forward"] == counts["attention_dq"] == counts["attention_dkv"] == 2 * 2
    assert counts["matmul nn 128 x 192 x 64"] == 2 * 2  # gate/up
    assert counts["matmul nt 128 x 512 x 64"] == counts["cross_entropy"] == 2  # the head
    assert counts["adamw_update"] == 2  # matrices, norm weights
    assert all(seconds > 0 for _, seconds in kernels.values())
    assert list(kernels.values()) == sorted(kernels.values(), key=lambda found: -found[1])


def test_steps_in_a_row_learn_the_batch_as_single_ones_do(device: Device) -> None:
    """Queued ahead or waited for one by one: the same bits."""
    weights = init.initial_weights(CONFIG.model, 1)
    one, two = (stepbench.BatchStep(device, CONFIG, weights, *stepbench.random_batch(CONFIG)) for _ in range(2))
    losses = [one() for _ in range(4)]
    assert len(two.seconds(3)) == 3 and losses[-1] < losses[0]
    for ours, theirs in zip(one.step.snapshot(), two.step.snapshot(), strict=True):
        np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def test_a_report_is_tokens_over_seconds(device: Device) -> None:
    times = stepbench.measure(device, CONFIG, steps=2)
    report = times.to_json()
    assert times.tokens == 256 and report["tokens_per_second"] == round(256 / times.median)
    assert times.best <= times.median and report["way"] == "fast"
