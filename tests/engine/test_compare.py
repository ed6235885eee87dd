"""The first step, tensor and index where two states or two runs differ, to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from statebench import TABLE, Bench, snapshot

from ptxtrain.engine import compare as module
from ptxtrain.engine.compare import compare, differences, first_unequal
from ptxtrain.engine.errors import PtxtrainError


def test_the_first_number_is_named_with_both_values() -> None:
    a, b = snapshot(3), snapshot(3)
    assert first_unequal(TABLE, a, b) is None and differences(TABLE, a, b) == []
    b.params[20 + 7] = np.float32(0.5)  # layers.0.qkv is [4, 3] from 20
    b.params[20 + 11] += 1
    b.v[35] = 2.0
    found = first_unequal(TABLE, a, b)
    assert found is not None
    assert (found.tensor, found.index, found.numbers, found.tensors) == ("layers.0.qkv", (2, 1), (2, 12), (2, 9))
    assert found.values == (float(a.params[27]), 0.5) and found.bits[1] == 0x3F000000
    assert (
        f"layers.0.qkv[2, 1] is {found.bits[0]:08x} {a.params[27]:.9g} | 3f000000 0.5; 2 of its 12 numbers and 2 of 9"
        in str(found)
    )


@pytest.mark.parametrize(("array", "prefix"), [("params", ""), ("m", "m."), ("v", "v.")])
@pytest.mark.parametrize(("at", "where"), [(0, "embedding[0, 0]"), (19, "embedding[4, 3]"), (35, "final_norm[3]")])
def test_every_buffer_and_both_ends_of_a_tensor(array: str, prefix: str, at: int, where: str) -> None:
    a, b = snapshot(1), snapshot(1)
    getattr(b, array).view(np.uint32)[at] ^= np.uint32(1)
    assert str(first_unequal(TABLE, a, b)).startswith(prefix + where)


def test_signs_of_zero_and_kinds_of_nan_differ() -> None:
    a, b = snapshot(1), snapshot(1)
    a.m[4], b.m[4] = 0.0, -0.0
    assert "m.embedding[1, 0] is 00000000 0 | 80000000 -0" in str(first_unequal(TABLE, a, b))


def test_what_later_steps_depend_on_counts_too() -> None:
    a, b = (
        snapshot(1, state={"losses": [1.0, 2.0, 3.0], "skipped": 0}),
        snapshot(1, state={"losses": [2.0, 3.0], "skipped": 1}),
    )
    b.position = (9, 9)
    assert differences(TABLE, a, b) == ["its place in the data is (0, 3) | (9, 9)", "its state's skipped is 0 | 1"]
    b.state["losses"] = [2.5, 3.0]
    assert "its state's losses is [1.0, 2.0, 3.0] | [2.5, 3.0]" in differences(TABLE, a, b)


def lines(bench: Bench, *steps: int, changed: int = 0) -> None:
    with open(bench.path / "metrics.jsonl", "a") as file:
        for step in steps:
            loss = 3.0 if step == changed else 2.0
            file.write(
                json.dumps({"attempt": 1, "step": step, "loss": loss, "grad_norm": 1.0, "digest": f"d{step}"}) + "\n"
            )


@pytest.fixture
def benches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Bench, Bench]:
    monkeypatch.setattr(module, "parameter_table", lambda model: TABLE)
    return Bench(tmp_path / "a"), Bench(tmp_path / "b")


def test_equal_runs(benches: tuple[Bench, Bench]) -> None:
    for bench in benches:
        lines(bench, 1, 2, 3)
        assert bench.save(1) and bench.save(3)
    found = compare(benches[0].path, benches[1].path)
    assert found.first is None
    assert found.lines == ["metrics of steps 1 to 3: the same", "checkpoints of steps 1, 3: the same bits"]
    one = compare(benches[0].path / "ckpt/step-00000003", benches[1].path)
    assert one.first is None and one.lines == [f"step 3: 9 tensors have the same bits, digest {snapshot(3).digest()}"]


def test_the_first_step_that_differs_is_named_in_metrics_and_checkpoints(benches: tuple[Bench, Bench]) -> None:
    a, b = benches
    lines(a, 1, 2, 3, 4)
    lines(b, 1, 2, 3, 4, changed=2)
    for bench in benches:
        assert bench.save(1)
    other = snapshot(3)
    other.m[25] += 1
    b.saver.submit(other)
    assert b.saver.wait().saved and a.save(3) and a.save(4) and b.save(4)  # type: ignore[union-attr]
    found = compare(a.path, b.path)
    assert found.first is not None
    first, then = found.first.split("; of the checkpoints in ")
    assert first == "step 2: loss is 2.0 (0x1.0000000000000p+1) | 3.0 (0x1.8000000000000p+1)"
    assert then.startswith("step 3: m.layers.0.qkv[1, 2] is ")
    assert found.lines[0] == "metrics of step 1: the same" and found.lines[-1] == "checkpoints of step 1: the same bits"
    assert any(line.startswith("checkpoint, step 3: m.layers.0.qkv[1, 2] is ") for line in found.lines)
    assert not any("step 4" in line for line in found.lines), "only the first"
    ckpt = compare(a.path / "ckpt/step-00000003", b.path / "ckpt/step-00000003")
    assert ckpt.first is not None and ckpt.first.startswith("step 3: m.layers.0.qkv[1, 2] is ")
    apart = compare(a.path / "ckpt/step-00000001", b.path / "ckpt/step-00000003")
    assert apart.first is not None and apart.first.startswith("steps 1 | 3: embedding[0, 0]")


def test_what_cannot_be_compared_is_said(benches: tuple[Bench, Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = benches
    with pytest.raises(PtxtrainError, match="have no step in common"):
        compare(a.path, b.path)
    assert a.save(1) and b.save(1)
    shutil.copy(a.path / "ckpt/step-00000001/MANIFEST.json", b.path / "ckpt/step-00000001/MANIFEST.json")
    with pytest.raises(PtxtrainError, match="belongs to another run"):
        compare(a.path, b.path)
    with pytest.raises(PtxtrainError, match=r"cannot be used"):
        compare(a.path / "ckpt/step-00000001", b.path)
    tables = iter([TABLE, TABLE[:1]])
    monkeypatch.setattr(module, "parameter_table", lambda model: next(tables))
    assert compare(a.path, b.path).first == "the models have tensors of other shapes"
