"""A Llama-style block and a training run written from kit calls alone, against the engine's model and float64 NumPy.

How far apart they may be is derived in `tests/engine/test_model.py`: both sides round at the same points.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import modelbench as bench
import numpy as np
import pytest
from float64_model import Float64Model
from kitbench import slope
from kitmodel import IGNORED, KitModel

from ptxtrain.engine import kit
from ptxtrain.engine.config import OptimizerConfig
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.parameters import parameter_table
from ptxtrain.engine.step import TrainStep

SEQUENCES = 2
SHORT = bench.SHORT  # heads of 10 channels and rows of 67: nothing that tensor cores take
FLASH = replace(bench.FAST, context=37)  # heads of 32, rows of multiples of 8: flash attention and tensor cores


@pytest.fixture(scope="module")
def cpu() -> Iterator[Device]:
    device = CpuDevice()
    with kit.on(device):
        yield device
    device.close()


def by_name(cfg: Any, flat: Any) -> dict[str, Any]:
    return {t.name: flat[t.offset : t.offset + t.size] for t in parameter_table(cfg)}


def compare(what: str, cfg: Any, found: Any, expected: Any, allowed: float) -> None:
    """Norm of the difference over norm, tensor by tensor."""
    wanted = by_name(cfg, expected)
    for name, x in by_name(cfg, found).items():
        error = np.linalg.norm(x - wanted[name]) / np.linalg.norm(wanted[name])
        assert error <= allowed, f"{what}: {name} is {error:.2e} off, allowed {allowed:.2e}"


def flat_of(cfg: Any, tensors: dict[str, Any]) -> Any:
    return np.concatenate([tensors[t.name].reshape(-1) for t in parameter_table(cfg)])


# Of test_model.py: sqrt((22 L + 5) K) 2^-24 for f32, 2^-8 for bf16 rounded at the same points; flash attention rounds P and
# dS as well, so there it is bf16 against bf16: sqrt(20 L + 5) 2^-9.
F32, SAME, FAST = (49 * 134) ** 0.5 * 2.0**-24, 2.0**-8, 45**0.5 * 2.0**-9


@pytest.mark.parametrize(
    ("model", "dtype", "way", "allowed"),
    [
        (SHORT, "f32", "f32", F32),
        (SHORT, "bf16", "bf16", SAME),
        (FLASH, "bf16", "fast", FAST),
        (FLASH, "f32", "f32", F32),
    ],
    ids=["dense f32", "dense bf16", "flash bf16", "aligned f32"],
)
def test_gradients_of_a_whole_model(cpu: Device, model: Any, dtype: str, way: str, allowed: float) -> None:
    """Embedding, two blocks, head and loss: every gradient, against the engine's own step and float64."""
    flat = bench.weights(model)
    tokens, targets = bench.batch(model, SEQUENCES)
    net = KitModel(model, flat, dtype)
    loss = net.gradient(tokens, targets)
    exact = Float64Model(flat, model, bf16=dtype == "bf16")(tokens, targets)
    wanted = flat_of(model, exact.gradients)
    compare(f"{way} against float64", model, net.grads, wanted, allowed)
    assert loss == pytest.approx(exact.losses.sum() / (targets != IGNORED).sum(), rel=allowed)
    engine = bench.one_step(cpu, bench.config(model, SEQUENCES, 1, 1), way, flat, tokens, targets)
    compare(f"{way} against the engine", model, net.grads, engine.gradient, allowed)


def test_a_block_repeats_to_the_bit_and_needs_no_thread(cpu: Device) -> None:
    """Forward and backward of one block, on one thread and on two, and in the checked mode: the same bits, nothing found."""
    flat = bench.weights(FLASH)
    x = np.random.default_rng(1).standard_normal((1, FLASH.context, FLASH.width)).astype(np.float32)
    found = []
    for device in (cpu, CpuDevice(1), CpuDevice(checked=True)):
        with kit.on(device):
            net = KitModel(FLASH, flat, "bf16")
            out, keep = net.block_forward(0, x)
            found.append((out.tobytes(), net.block_backward(0, out, keep).tobytes(), net.grads.tobytes()))
    assert found[0] == found[1] == found[2]


def test_a_block_against_finite_differences(cpu: Device) -> None:
    """In f32: the gradient of a block's input and of a norm weight are the slopes of its output."""
    cfg = replace(SHORT, context=3, width=8, heads=2, kv_heads=1, head_dim=4, mlp_width=6, vocab_size=5, layers=1)
    flat = bench.weights(cfg)
    rng = np.random.default_rng(2)
    x, dout = (rng.standard_normal((1, 3, 8)).astype(np.float32) for _ in range(2))
    net = KitModel(cfg, flat, "f32")
    _, keep = net.block_forward(0, x)
    dx = net.block_backward(0, dout, keep)

    def loss(x: Any) -> float:
        return float((net.block_forward(0, x)[0].astype(np.float64) * dout).sum())

    np.testing.assert_allclose(dx, slope(loss, x, 1e-2), rtol=5e-3, atol=5e-3)
    gamma = net.tensor(net.flat, "layers.0.mlp_norm")

    def of_gamma(moved: Any) -> float:
        before = gamma.copy()
        gamma[:] = moved
        value = loss(x)
        gamma[:] = before
        return value

    np.testing.assert_allclose(
        net.tensor(net.grads, "layers.0.mlp_norm"), slope(of_gamma, gamma.copy(), 1e-2), rtol=5e-3, atol=5e-3
    )


@pytest.mark.parametrize(("dtype", "way", "allowed"), [("f32", "f32", 2e-5), ("bf16", "fast", 2e-2)])
def test_a_training_run(cpu: Device, dtype: str, way: str, allowed: float) -> None:
    """Twelve steps on one batch: the loss falls as the engine's does, step by step, and the weights end where its end."""
    model, steps, lr = replace(FLASH, context=21), 12, 3e-3
    optimizer = OptimizerConfig(lr=lr, clip=0.0)
    config = replace(bench.config(model, SEQUENCES, 1, 1), optimizer=optimizer)
    flat = bench.weights(model)
    tokens, targets = bench.batch(model, SEQUENCES)
    step = TrainStep(config, cpu, way=way)
    bench.load(step, flat)
    net = KitModel(model, flat, dtype)
    betas = (optimizer.beta1, optimizer.beta2)
    losses = []
    for t in range(1, steps + 1):
        bench.queue(step, tokens, targets)
        engine_loss, _ = step.finish(t, lr).wait()
        losses.append((net.gradient(tokens, targets), engine_loss))
        net.update(t, lr, betas, optimizer.eps, optimizer.weight_decay)
    found, wanted = np.array(losses).T
    np.testing.assert_allclose(found, wanted, rtol=allowed)
    assert found[-1] < found[0] - 1.0, found
    compare("weights", model, net.flat - flat, step.snapshot()[0] - flat, 30 * allowed)
