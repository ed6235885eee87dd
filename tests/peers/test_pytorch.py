"""The model in PyTorch with our weights gives our loss, our gradients and our updates, but for rounding.

PyTorch shares nothing with us but the layout of parameters and the tables of RoPE, so this is a check from outside. It
skips where PyTorch is not installed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (pip install torch)")

from pytorch_model import Llama, optimizer  # noqa: E402

from ptxtrain.engine import init  # noqa: E402
from ptxtrain.engine.config import (  # noqa: E402
    BatchConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from ptxtrain.engine.device.base import Device  # noqa: E402
from ptxtrain.engine.parameters import parameter_table  # noqa: E402
from ptxtrain.engine.stepbench import BatchStep  # noqa: E402

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

# Grouped queries, T past one tile of keys, a vocabulary that no tile divides.
MODEL = ModelConfig(vocab_size=104, context=70, layers=2, width=48, heads=4, kv_heads=2, head_dim=32, mlp_width=72)
CONFIG = Config(
    "peer", MODEL, BatchConfig(4, 2, 2), OptimizerConfig(lr=1e-2, clip=0.3), TrainConfig(steps=3), DataConfig()
)


def weights(cfg: ModelConfig) -> F32:
    """Initial weights with larger matrices in the layers, so that attention is not a plain mean, and uneven norm weights."""
    flat, rng = init.initial_weights(cfg, 3), np.random.default_rng(3)
    for t in parameter_table(cfg):
        part = flat[t.offset : t.offset + t.size]
        if not t.decay:
            part += rng.normal(0.0, 0.2, t.size).astype(np.float32)
        elif t.name != "embedding":
            part *= np.float32(4.0)
    return flat


def batch(seed: int) -> tuple[I32, I32]:
    text = np.random.default_rng(seed).integers(0, MODEL.vocab_size, (4, MODEL.context + 1)).astype(np.int32)
    tokens, targets = text[:, :-1].copy(), text[:, 1:].copy()
    targets[0, 3:6] = -1  # ignored
    targets[3, -1] = -1
    return tokens, targets


def distances(ours: F32, theirs: npt.NDArray[np.floating]) -> dict[str, float]:
    """‖ours - theirs‖ / ‖theirs‖ of each tensor."""
    found = {}
    for t in parameter_table(MODEL):
        part = slice(t.offset, t.offset + t.size)
        a, b = ours[part].astype(np.float64), theirs[part].astype(np.float64)
        found[t.name] = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    return found


def peer(flat: F32, *, double: bool = False) -> Llama:
    model = Llama(MODEL)
    model.load_flat(flat)
    return model.double() if double else model


def peer_gradient(model: Llama, tokens: I32, targets: I32, *, bf16: bool = False) -> tuple[float, F32]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model(torch.from_numpy(tokens).long(), torch.from_numpy(targets).long())
    loss.backward()
    return float(loss.detach()), model.flat(gradient=True)


def test_in_f32_loss_and_gradients_are_pytorchs(device: Device) -> None:
    """Both against PyTorch in float64: our f32 way is as near to it as PyTorch's own f32, within a factor of 3."""
    flat, (tokens, targets) = weights(MODEL), batch(0)
    exact_loss, exact = peer_gradient(peer(flat, double=True), tokens, targets)
    loss, theirs = peer_gradient(peer(flat), tokens, targets)
    step = BatchStep(device, CONFIG, flat, tokens, targets, way="f32")
    ours = step.gradient()
    our_loss, _ = step.step.finish(1, 1e-3).wait()
    assert abs(our_loss - exact_loss) < 3e-6 * exact_loss and abs(loss - exact_loss) < 3e-6 * exact_loss
    allowed = distances(theirs, exact)
    for name, distance in distances(ours, exact).items():
        assert distance <= 3 * max(allowed[name], 1e-7), f"{name}: {distance:.1e}, PyTorch {allowed[name]:.1e}"


def test_the_fast_way_is_as_exact_as_autocast(device: Device) -> None:
    """Errors of bf16 against PyTorch in float64: ours at most 1.5 times those of `torch.autocast`."""
    flat, (tokens, targets) = weights(MODEL), batch(1)
    _, exact = peer_gradient(peer(flat, double=True), tokens, targets)
    _, theirs = peer_gradient(peer(flat), tokens, targets, bf16=True)
    step = BatchStep(device, CONFIG, flat, tokens, targets, way="fast")
    ours = step.gradient()
    allowed = distances(theirs, exact)
    for name, distance in distances(ours, exact).items():
        assert distance <= 1.5 * allowed[name], f"{name}: {distance:.1e}, autocast {allowed[name]:.1e}"


@pytest.mark.parametrize("way", ["f32", "fast"])
def test_three_steps_with_clip_and_adamw_are_pytorchs(device: Device, way: str) -> None:
    """Losses, norms before the clip and weights of three updates on one batch."""
    flat, (tokens, targets) = weights(MODEL), batch(2)
    model = peer(flat)
    update = optimizer(model, CONFIG.optimizer)
    step = BatchStep(device, replace(CONFIG, batch=BatchConfig(4, 4, 1)), flat, tokens, targets, way=way)
    tolerance = 2e-5 if way == "f32" else 2e-2
    for number in (1, 2, 3):
        loss, _ = peer_gradient(model, tokens, targets)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG.optimizer.clip))
        update.step()
        step.queue()
        our_loss, our_norm = step.step.finish(number, CONFIG.optimizer.lr).wait()
        assert norm > CONFIG.optimizer.clip, "the clip does not act"
        assert our_loss == pytest.approx(loss, rel=tolerance) and our_norm == pytest.approx(norm, rel=tolerance)
    moved = np.linalg.norm(model.flat() - flat)
    assert np.linalg.norm(step.step.snapshot()[0] - model.flat()) < (5e-3 if way == "f32" else 0.2) * moved
