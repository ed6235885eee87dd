"""A step: the same bits at every micro-batch size, the order of the tree, the update, the pipeline, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import modelbench as bench
import numpy as np
import pytest
from float64_model import Float64Model

from ptxtrain.engine import activations, leaves
from ptxtrain.engine.config import OptimizerConfig
from ptxtrain.engine.device.base import Buffer, Device
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.digest import state_sum
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.step import TrainStep, memory_plan
from ptxtrain.engine.ways import WAYS

SEQUENCES = 8


@pytest.mark.parametrize("count", [1, 2, 4, 8, 64])
def test_the_stack_adds_leaves_as_a_balanced_tree(count: int) -> None:
    stack: list[str] = []
    deepest = 0
    for leaf in range(count):
        assert len(stack) == leaf.bit_count()
        stack.append(str(leaf))
        deepest = max(deepest, len(stack))
        for _ in range(leaves.merges_after(leaf)):
            upper = stack.pop()
            stack[-1] = f"({stack[-1]}+{upper})"

    def tree(first: int, size: int) -> str:
        return str(first) if size == 1 else f"({tree(first, size // 2)}+{tree(first + size // 2, size // 2)})"

    assert stack == [tree(0, count)]
    assert deepest == leaves.tree_depth(count)


@pytest.mark.parametrize("way", ["f32", "bf16", "fast", "fast,attention=bf16,cross_entropy=bf16"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_micro_batch_size_does_not_show_in_the_bits(device: Device, way: str, count: int) -> None:
    model = bench.fit(bench.LONG if count == 2 else bench.SHORT, way)
    tokens, targets = bench.batch(model, SEQUENCES)
    flat = bench.weights(model)
    outcomes = {
        size: bench.one_step(device, bench.config(model, SEQUENCES, size, count), way, flat, tokens, targets)
        for size in (1, 2, 4, 8)
        if (SEQUENCES // count) % size == 0
    }
    first = outcomes.pop(1)
    assert np.all(np.isfinite(first.gradient)) and np.count_nonzero(first.gradient) > first.gradient.size // 2
    for size, other in outcomes.items():
        assert np.array_equal(first.gradient.view(np.uint32), other.gradient.view(np.uint32)), size
        assert np.array_equal(first.params.view(np.uint32), other.params.view(np.uint32)), size
        assert (first.loss, first.grad_norm) == (other.loss, other.grad_norm), size


@pytest.mark.parametrize("way", ["bf16", "fast"])
def test_the_number_of_threads_does_not_show_in_the_bits(way: str) -> None:
    model = bench.fit(bench.LONG, way)
    tokens, targets = bench.batch(model, 4)
    flat, cfg = bench.weights(model), bench.config(model, 4, 2, 2)
    one, three = (bench.one_step(CpuDevice(threads=n), cfg, way, flat, tokens, targets) for n in (1, 3))
    assert np.array_equal(one.gradient.view(np.uint32), three.gradient.view(np.uint32))
    assert np.array_equal(one.params.view(np.uint32), three.params.view(np.uint32))
    assert (one.loss, one.grad_norm) == (three.loss, three.grad_norm)


def test_leaves_are_part_of_the_definition(device: Device) -> None:
    """Another number of leaves is another order: if all gave the same bits, the test above would prove nothing."""
    tokens, targets = bench.batch(bench.SHORT, SEQUENCES)
    flat = bench.weights(bench.SHORT)
    one, four = (
        bench.one_step(device, bench.config(bench.SHORT, SEQUENCES, 2, n), "f32", flat, tokens, targets) for n in (1, 4)
    )
    assert not np.array_equal(one.gradient, four.gradient)
    np.testing.assert_allclose(one.gradient, four.gradient, rtol=1e-4, atol=1e-7)


def test_leaves_are_added_as_the_tree_says(device: Device) -> None:
    """((0 + 1) + (2 + 3)) of four one-leaf gradients, added by NumPy in f32, to the last bit. The loss goes along."""
    tokens, targets = bench.batch(bench.SHORT, SEQUENCES)
    flat, count = bench.weights(bench.SHORT), int(np.count_nonzero(targets >= 0))
    whole = bench.one_step(device, bench.config(bench.SHORT, SEQUENCES, 2, 4), "bf16", flat, tokens, targets)
    parts, losses = [], []
    for leaf in range(4):
        rows = slice(2 * leaf, 2 * leaf + 2)
        cfg = bench.config(bench.SHORT, 2, 1, 1)
        one = bench.one_step(device, cfg, "bf16", flat, tokens[rows], targets[rows], count)
        parts.append(one.gradient)
        losses.append(np.float32(one.loss * count))
    assert np.array_equal(whole.gradient, (parts[0] + parts[1]) + (parts[2] + parts[3]))
    assert whole.loss * count == pytest.approx(float((losses[0] + losses[1]) + (losses[2] + losses[3])), rel=1e-7)


@pytest.mark.parametrize("way", ["f32", "bf16", "fast"])
def test_the_heads_chunks_do_not_show_in_the_bits(device: Device, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bench.fit(bench.SHORT, way)
    tokens, targets = bench.batch(model, SEQUENCES)
    flat, cfg = bench.weights(model), bench.config(model, SEQUENCES, 8, 1)
    whole = bench.one_step(device, cfg, way, flat, tokens, targets)
    sequence = model.context * model.vocab_size * WAYS[way]
    monkeypatch.setattr(activations, "LOGITS_CAP", 3 * sequence)  # 3 + 3 + 2 sequences
    assert activations.head_sequences(model, 8, WAYS[way]) == 3
    chunked = bench.one_step(device, cfg, way, flat, tokens, targets)
    assert np.array_equal(whole.gradient, chunked.gradient) and whole.loss == chunked.loss


def adamw(
    step: TrainStep, params: np.ndarray, m: np.ndarray, v: np.ndarray, g: np.ndarray, t: int, lr: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """AdamW in float64, as the paper has it."""
    opt = step.config.optimizer
    norm = np.sqrt((g * g).sum())
    if opt.clip and norm > opt.clip:
        g = g * (opt.clip / norm)
    m = opt.beta1 * m + (1 - opt.beta1) * g
    v = opt.beta2 * v + (1 - opt.beta2) * g * g
    decay = np.zeros_like(g)
    for tensor in step.table:
        if len(tensor.shape) == 2:
            bench.part(decay, tensor)[:] = opt.weight_decay
    update = (m / (1 - opt.beta1**t)) / (np.sqrt(v / (1 - opt.beta2**t)) + opt.eps)
    return params - lr * (update + decay * params), m, v


@pytest.mark.parametrize("clip", [0.3, 0.0])
def test_three_updates_against_float64(device: Device, clip: float) -> None:
    cfg = bench.config(bench.SHORT, 4, 2, 2)
    cfg = replace(cfg, optimizer=OptimizerConfig(lr=1e-3, clip=clip))
    step = TrainStep(cfg, device, way="bf16")
    flat = bench.weights(bench.SHORT)
    bench.load(step, flat)
    params, m, v = flat.astype(np.float64), np.zeros(flat.size), np.zeros(flat.size)
    for t in range(1, 4):
        tokens, targets = bench.batch(bench.SHORT, 4, seed=t)
        bench.queue(step, tokens, targets)
        g = step.gradient().astype(np.float64)
        lr = 1e-3 * t
        _, norm = step.finish(t, lr).wait()
        assert norm == pytest.approx(np.sqrt((g * g).sum()), rel=1e-6)
        params, m, v = adamw(step, params, m, v, g, t, lr)
        got = step.snapshot()
        # m may cancel, so its rounding is that of the largest; where it does, that is up to 3e-4 of an update.
        np.testing.assert_allclose(got[1], m, rtol=2e-6, atol=1e-7 * np.abs(m).max())
        np.testing.assert_allclose(got[2], v, rtol=5e-6, atol=1e-18)
        np.testing.assert_allclose(got[0], params, rtol=1e-6, atol=3e-4 * lr)
        matrices = sum(t.size for t in step.table if t.decay)
        copies = device.read(step._weights.matrices.buffer, ml_dtypes.bfloat16, (matrices,))
        assert np.array_equal(copies, got[0][:matrices].astype(ml_dtypes.bfloat16))


def run_steps(step: TrainStep, count: int, late: int) -> list[tuple[float, float]]:
    """Train; each result is waited for `late` steps after it was queued."""
    results, values = [], []
    for t in range(1, count + 1):
        tokens, targets = bench.batch(step.config.model, step.config.batch.sequences, seed=t)
        bench.queue(step, tokens, targets)
        tokens[:], targets[:] = -7, -7  # the step must have copied them
        results.append(step.finish(t, 1e-3))
        if t > late:
            values.append(results[t - late - 1].wait())
    return values + [r.wait() for r in results[count - late :]]


def test_results_may_be_read_late(device: Device) -> None:
    cfg = bench.config(bench.SHORT, 4, 2, 2)
    seen = []
    for late in (0, 1, 5):
        step = TrainStep(cfg, device, way="bf16")
        step.initialise(3)
        seen.append((run_steps(step, 6, late), step.snapshot()))
    for values, state in seen[1:]:
        assert values == seen[0][0]
        assert all(np.array_equal(a, b) for a, b in zip(state, seen[0][1], strict=True))


def test_each_steps_state_is_summed_on_the_device(device: Device) -> None:
    """The sum that comes back with a step, however late it is read, is NumPy's of the state behind that very step."""
    cfg = bench.config(bench.SHORT, 4, 2, 2)
    step = TrainStep(cfg, device, way="bf16")
    step.initialise(3)
    assert step.state_sum() == state_sum(*step.snapshot())
    results, sums = [], []
    for t in (1, 2, 3):
        tokens, targets = bench.batch(cfg.model, 4, seed=t)
        bench.queue(step, tokens, targets)
        results.append(step.finish(t, 1e-3))
        sums.append(state_sum(*step.snapshot()))
    assert [result.state_sum for result in results] == sums and len(set(sums)) == 3
    assert step.state_sum() == sums[-1]


def test_an_abandoned_step_leaves_nothing_behind(device: Device) -> None:
    cfg = bench.config(bench.SHORT, 8, 1, 4)
    step = TrainStep(cfg, device, way="f32")
    tokens, targets = bench.batch(bench.SHORT, 8)
    flat = bench.weights(bench.SHORT)
    bench.load(step, flat)
    bench.queue(step, tokens, targets)
    expected = step.gradient()
    other, ignored = bench.batch(bench.SHORT, 8, seed=9)
    for stop in (1, 3, 6):
        step.begin(5)
        for i in range(stop):
            order, starts = bench.sorted_rows(other[i : i + 1], bench.SHORT.vocab_size)
            step.micro_batch(i, other[i : i + 1], ignored[i : i + 1], order, starts)
        bench.queue(step, tokens, targets)
        assert np.array_equal(step.gradient(), expected)
    assert np.array_equal(step.snapshot()[0], flat)


def test_evaluation(device: Device) -> None:
    """Against float64, with fewer sequences than a micro-batch, and in the middle of a step."""
    cfg = bench.config(bench.SHORT, 8, 4, 2)
    step = TrainStep(cfg, device, way="f32")
    flat = bench.weights(bench.SHORT)
    bench.load(step, flat)
    tokens, targets = bench.batch(bench.SHORT, 8)
    bench.queue(step, tokens, targets)
    before = step.gradient()
    for sequences in (4, 3, 1):
        expected = Float64Model(flat, bench.SHORT)(tokens[:sequences], targets[:sequences]).losses
        total, count = step.evaluate(tokens[:sequences], targets[:sequences])
        assert count == np.count_nonzero(targets[:sequences] >= 0)
        assert total == pytest.approx(expected.sum(), rel=1e-6)
        rows = step.row_losses(tokens[:sequences], targets[:sequences], lambda: False)
        np.testing.assert_allclose(rows, expected, rtol=1e-6, atol=1e-6)
        assert np.all(rows[targets[:sequences] < 0] == 0.0)
    assert np.array_equal(step.gradient(), before)


@pytest.mark.parametrize("way", ["f32", "bf16", "fast"])
def test_logits_of_the_next_token(device: Device, way: str) -> None:
    """Lengths in several windows, each against float64 over the whole context."""
    model = bench.fit(bench.LONG, way)
    step = TrainStep(bench.config(model, 2, 1, 1), device, way=way)
    flat = bench.weights(model)
    bench.load(step, flat)
    tokens, targets = bench.batch(model, 1)
    expected = Float64Model(flat, model, bf16=way != "f32")(tokens, targets).logits[0]
    # The last row of logits is f32 here, and bf16 in training: half a unit of 8 bits apart.
    tolerance = 1e-5 if way == "f32" else 2.0**-7
    scale = np.abs(expected).max()
    for length in (1, 2, 16, 17, 33, 70, 5):
        got = step.logits(tokens[:, :length])
        assert got.shape == (model.vocab_size,) and got.dtype == np.float32
        assert np.abs(got - expected[length - 1]).max() <= tolerance * scale, length


def test_a_copy_is_of_the_state_behind_what_was_queued_and_belongs_to_whoever_took_it(device: Device) -> None:
    step = TrainStep(bench.config(bench.SHORT, 2, 1, 1), device, way="f32")
    flat = bench.weights(bench.SHORT)
    bench.load(step, flat)
    tokens, targets = bench.batch(bench.SHORT, 2)
    step.prepare_snapshot()
    copies = [step.begin_snapshot()]
    for number in (1, 2):
        bench.queue(step, tokens, targets)
        step.finish(number, 1e-3)
        copies.append(step.begin_snapshot())  # the second and third without memory taken ahead
    states = [copy.wait() for copy in copies]
    assert np.array_equal(states[0][0], flat) and not states[0][1].any()
    params = [state[0].tobytes() for state in states]
    assert len(set(params)) == 3 and params[2] == step.snapshot()[0].tobytes()
    assert states[1][1].any() and states[1][2].any()


def test_a_gradient_that_is_not_finite_changes_nothing(device: Device) -> None:
    """Weights so large that the loss is no number: weights, m, v and the copies keep their bits, and the norm says it."""
    step = TrainStep(bench.config(bench.SHORT, 2, 1, 1), device, way="bf16")
    flat = bench.weights(bench.SHORT) * np.float32(1e30)
    m, v = np.full_like(flat, 0.5), np.full_like(flat, 0.25)
    step.load(flat, m, v)
    tokens, targets = bench.batch(bench.SHORT, 2)
    bench.queue(step, tokens, targets)
    _, norm = step.finish(1, 1e-3).wait()
    assert not np.isfinite(norm)
    for got, before in zip(step.snapshot(), (flat, m, v), strict=True):
        assert np.array_equal(got.view(np.uint32), before.view(np.uint32))


def test_the_memory_plan_is_what_is_taken(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0
    alloc: Callable[[int], Buffer] = device.alloc

    def counted(nbytes: int) -> Buffer:
        nonlocal taken
        taken += nbytes
        return alloc(nbytes)

    monkeypatch.setattr(device, "alloc", counted)
    for way in ("f32", "bf16", "fast", "fast,attention=bf16", "fast,matmul=bf16"):
        taken = 0
        cfg = bench.config(bench.fit(bench.LONG, way), 8, 2, 4)
        step = TrainStep(cfg, device, way=way)
        assert sum(step.memory().values()) == taken
        assert memory_plan(cfg, way) == step.memory()


@pytest.mark.parametrize(
    ("sequences", "micro_batch", "count", "says"),
    [
        (8, 2, 3, "batch.leaves is 3; it must be a power of two"),
        (8, 2, 0, "batch.leaves is 0; it must be a power of two"),
        (6, 1, 4, "batch.sequences is 6; it must be a multiple of batch.leaves (4)"),
        (8, 3, 2, "a micro-batch of 3 sequences does not divide a leaf of 4"),
        (8, 8, 2, "a micro-batch of 8 sequences does not divide a leaf of 4"),
        (8, -1, 2, "a micro-batch of -1 sequences does not divide a leaf of 4"),
    ],
)
def test_impossible_splits_are_refused(device: Device, sequences: int, micro_batch: int, count: int, says: str) -> None:
    with pytest.raises(PtxtrainError, match="^" + says.replace("(", r"\(").replace(")", r"\)")) as caught:
        TrainStep(bench.config(bench.SHORT, sequences, micro_batch, count), device, way="f32")
    assert "\n" not in str(caught.value)


def test_unknown_ways_and_steps_without_targets_are_refused(device: Device) -> None:
    cfg = bench.config(bench.SHORT, 2, 1, 1)
    with pytest.raises(PtxtrainError, match="unknown way 'f16': it must be one of f32, bf16, fast"):
        TrainStep(cfg, device, way="f16")
    with pytest.raises(PtxtrainError, match="no target to learn from"):
        TrainStep(cfg, device, way="f32").begin(0)
