"""The whole model: loss and every gradient against float64 NumPy, with and without rounding to bf16, and the two ways
against each other.

How far apart they may be is derived, not tuned. Relative errors of independent roundings add as their squares.

f32 against float64
    An f32 rounding is off by at most u = 2^-24 of the value. On the path from a token to a gradient lie P roundings (10
    kernels forward and 12 backward in a layer, 5 about the head), each the end of a sum of up to K terms whose partial
    sums were rounded: sqrt(P K) u.
bf16 against f32
    A bf16 rounding is off by at most 2^-9. The path has, in a layer, 7 rounded activations forward, 9 gradients backward
    and 4 weights, and 5 about the head: sqrt(20 L + 5) 2^-9.
bf16 against float64 rounded at the same points
    Both round the same numbers, but numbers that are d = sqrt(K) u apart fall on two sides of a boundary (boundaries are at
    least 2^-8 of the value apart) with probability d 2^8, and are then 2^-8 apart: the mean square after one rounding
    is d 2^-8, so the error becomes sqrt(d 2^-8). The next point makes the same of that, and so on: from 2^-21 the error
    climbs to where it stays, 2^-8.
"""

from __future__ import annotations

import math

import modelbench as bench
import numpy as np
import pytest
from float64_model import Float64Model

from ptxtrain.engine.config import ModelConfig
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.model import parameter_count, parameter_table

SEQUENCES = 4
TINY = ModelConfig(vocab_size=4096, context=256, layers=4, width=128, heads=4, kv_heads=2, head_dim=32, mlp_width=384)
DEV = ModelConfig(vocab_size=32768, context=512, layers=6, width=384, heads=6, kv_heads=2, head_dim=64, mlp_width=1024)


@pytest.mark.parametrize(("model", "count"), [(TINY, 1_311_872), (DEV, 22_025_088)])
def test_parameter_counts(model: ModelConfig, count: int) -> None:
    assert parameter_count(parameter_table(model)) == count


def test_the_table_has_no_gaps_and_matrices_lie_first() -> None:
    table = parameter_table(bench.LONG)
    offset = 0
    for t in table:
        assert t.offset == offset and t.size == math.prod(t.shape) and t.decay == (len(t.shape) == 2)
        offset += t.size
    assert [t.decay for t in table] == sorted((t.decay for t in table), reverse=True)
    assert len({t.name for t in table}) == len(table) == 6 * bench.LONG.layers + 2


def allowed_f32(model: ModelConfig, rows: int) -> float:
    longest = max(rows, model.vocab_size, 2 * model.mlp_width, model.width, model.context)
    return math.sqrt((22 * model.layers + 5) * longest) * 2.0**-24


def allowed_bf16(model: ModelConfig) -> float:
    return math.sqrt(20 * model.layers + 5) * 2.0**-9


ALLOWED_ROUNDED = 2.0**-8


def compare(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], allowed: float, what: str) -> dict[str, float]:
    """Norm of the difference over norm, for every tensor; all must be within `allowed`."""
    errors = {n: float(np.linalg.norm(got[n] - e) / np.linalg.norm(e)) for n, e in expected.items()}
    worst = sorted(errors, key=lambda n: -errors[n])[:5]
    assert errors[worst[0]] <= allowed, f"{what}: allowed {allowed:.1e}, worst " + ", ".join(
        f"{n} {errors[n]:.1e}" for n in worst
    )
    return errors


@pytest.mark.parametrize("context", [11, 70])
def test_loss_and_every_gradient(device: Device, context: int) -> None:
    model = bench.SHORT if context == 11 else bench.LONG
    assert model.context == context
    tokens, targets = bench.batch(model, SEQUENCES)
    flat = bench.weights(model)
    count = int(np.count_nonzero(targets >= 0))
    cfg = bench.config(model, SEQUENCES, 2, 2)
    loss: dict[str, float] = {}
    gradient: dict[str, dict[str, np.ndarray]] = {}
    for way in ("f32", "bf16"):
        outcome = bench.one_step(device, cfg, way, flat, tokens, targets)
        loss[way] = outcome.loss
        gradient[way] = {
            t.name: bench.part(outcome.gradient, t).astype(np.float64).reshape(t.shape) for t in parameter_table(model)
        }
    for name, bf16 in (("exact", False), ("rounded", True)):
        result = Float64Model(flat, model, bf16=bf16)(tokens, targets)
        loss[name], gradient[name] = float(result.losses.sum()) / count, result.gradients
    f32, bf16 = allowed_f32(model, tokens.size), allowed_bf16(model)
    compare(gradient["f32"], gradient["exact"], f32, "f32 against float64")
    compare(gradient["bf16"], gradient["f32"], bf16, "bf16 against f32")
    compare(gradient["bf16"], gradient["rounded"], ALLOWED_ROUNDED, "bf16 against float64 rounded to bf16")
    assert loss["f32"] == pytest.approx(loss["exact"], rel=f32)
    assert loss["bf16"] == pytest.approx(loss["f32"], rel=bf16)
    assert loss["bf16"] == pytest.approx(loss["rounded"], rel=ALLOWED_ROUNDED)
