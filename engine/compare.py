"""Where two runs or two checkpoints differ first: the step, the tensor, the index, with both values to the bit.

Reads only. Checkpoints are verified as they are read; metrics are compared step by step, of steps that several attempts made
the newest one's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ptxtrain.engine.checkpoint import list_steps, load
from ptxtrain.engine.checkpointfiles import Floats, Snapshot
from ptxtrain.engine.config import Config, to_dict
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.history import BITS, History, read_history, shown
from ptxtrain.engine.parameters import parameter_table
from ptxtrain.engine.rundir import RunInfo, read_info, run_and_step
from ptxtrain.engine.sealed import Damaged
from ptxtrain.engine.tensorfile import TensorPlace

# Of a checkpoint's `state`: follows from how often the run was validated, which does not show in its result.
_APART = ("validated",)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared, a line each, and the first difference in words; None: everything that was compared is equal."""

    lines: list[str]
    first: str | None


@dataclass(frozen=True, slots=True)
class Unequal:
    """The first number in which two states differ, and how many do."""

    tensor: str  # its name in the checkpoint's files: "layers.0.qkv", "m.layers.0.qkv", "v.layers.0.qkv"
    index: tuple[int, ...]
    values: tuple[float, float]
    bits: tuple[int, int]
    numbers: tuple[int, int]  # (that differ, in all) of that tensor
    tensors: tuple[int, int]  # (that differ, in all) of the state

    def __str__(self) -> str:
        a, b = (f"{bits:08x} {value:.9g}" for bits, value in zip(self.bits, self.values, strict=True))
        index = ", ".join(map(str, self.index))
        return (
            f"{self.tensor}[{index}] is {a} | {b}; {self.numbers[0]:,} of its {self.numbers[1]:,} numbers and "
            f"{self.tensors[0]} of {self.tensors[1]} tensors differ"
        )


def first_unequal(table: Sequence[TensorPlace], a: Snapshot, b: Snapshot) -> Unequal | None:
    """Bit by bit, weights first, then m, then v, in the table's order: a zero and a negative zero differ."""
    first: Unequal | None = None
    tensors = 0
    for prefix, one, other in (("", a.params, b.params), ("m.", a.m, b.m), ("v.", a.v, b.v)):
        for place in table:
            part = slice(place.offset, place.offset + math.prod(place.shape))
            wrong = np.flatnonzero(one[part].view(np.uint32) != other[part].view(np.uint32))
            if not wrong.size:
                continue
            tensors += 1
            if first is None:
                first = _unequal(prefix + place.name, place.shape, one[part], other[part], wrong)
    if first is None:
        return None
    return Unequal(first.tensor, first.index, first.values, first.bits, first.numbers, (tensors, 3 * len(table)))


def _unequal(name: str, shape: tuple[int, ...], one: Floats, other: Floats, wrong: Any) -> Unequal:
    at = int(wrong[0])
    return Unequal(
        name,
        tuple(int(i) for i in np.unravel_index(at, shape)),
        (float(one[at]), float(other[at])),
        (int(one.view(np.uint32)[at]), int(other.view(np.uint32)[at])),
        (wrong.size, one.size),
        (0, 0),
    )


def differences(table: Sequence[TensorPlace], a: Snapshot, b: Snapshot) -> list[str]:
    """Everything in which two states differ, the tensors first; empty: the same bits and all that later steps depend on."""
    unequal = first_unequal(table, a, b)
    found = [] if unequal is None else [str(unequal)]
    if a.position != b.position:
        found.append(f"its place in the data is {a.position} | {b.position}")
    one, other = ({key: value for key, value in s.state.items() if key not in _APART} for s in (a, b))
    found += [
        f"its state's {key} is {_short(one.get(key))} | {_short(other.get(key))}"
        for key in sorted(one.keys() | other.keys())
        if not _same(one.get(key), other.get(key))
    ]
    return found


def _same(a: Any, b: Any) -> bool:
    """Of two histories the newest part that both have: how long one is kept does not show in a result."""
    if isinstance(a, list) and isinstance(b, list):
        common = min(len(a), len(b))
        return a[len(a) - common :] == b[len(b) - common :]
    return bool(a == b)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:28]} … {text[-28:]}"


def config_differences(a: Config, b: Config) -> list[str]:
    """Keys that differ, with both values; but for where the data lie, which says nothing about them."""
    one, other = to_dict(a), to_dict(b)
    return [
        f"{section}.{key} is {value} | {other[section][key]}"
        for section, keys in one.items()
        if isinstance(keys, Mapping)
        for key, value in keys.items()
        if value != other[section][key] and (section, key) != ("data", "path")
    ]


def compare(a: Path, b: Path) -> Comparison:
    """Compare two runs, two checkpoints, or a checkpoint with the same step of a run.

    Raises:
        PtxtrainError: no such run, a checkpoint that cannot be used, or nothing that both have.
    """
    (run_a, step_a), (run_b, step_b) = run_and_step(a), run_and_step(b)
    info_a, info_b = read_info(run_a), read_info(run_b)
    lines = [f"config: {text}" for text in config_differences(info_a.config, info_b.config)]
    if info_a.data_id != info_b.data_id:
        lines.append(f"data: others ({info_a.data_id} | {info_b.data_id})")
    if info_a.numerics_id != info_b.numerics_id:
        lines.append(f"numerics: [{info_a.numerics_id}] | [{info_b.numerics_id}]")
    table = parameter_table(info_a.config.model)
    if table != parameter_table(info_b.config.model):
        return Comparison(lines, "the models have tensors of other shapes")
    if step_a is None and step_b is None:
        return _compare_runs(info_a, info_b, table, lines)
    one, other = _load(info_a, table, step_a, step_b), _load(info_b, table, step_b, step_a)
    return _compare_states(table, one, other, lines)


def _load(info: RunInfo, table: Sequence[TensorPlace], step: int | None, same_as: int | None) -> Snapshot:
    def strict(line: str) -> None:
        raise PtxtrainError(line)

    return load(info.path, table, step=step if step is not None else same_as, note=strict)


def _compare_states(table: Sequence[TensorPlace], a: Snapshot, b: Snapshot, lines: list[str]) -> Comparison:
    steps = f"step {a.step}" if a.step == b.step else f"steps {a.step} | {b.step}"
    found = differences(table, a, b)
    if a.step != b.step:
        found.append(f"the step is {a.step} | {b.step}")
    if not found:
        return Comparison([*lines, f"{steps}: {3 * len(table)} tensors have the same bits, digest {a.digest()}"], None)
    return Comparison([*lines, *(f"{steps}: {text}" for text in found)], f"{steps}: {found[0]}")


def _compare_runs(a: RunInfo, b: RunInfo, table: Sequence[TensorPlace], lines: list[str]) -> Comparison:
    try:
        metrics = _compare_metrics(read_history(a.metrics), read_history(b.metrics))
    except Damaged as error:
        raise PtxtrainError(f"{error} ({a.path} or {b.path})") from error
    common = [step for step in list_steps(a.path) if step in list_steps(b.path)]
    if metrics is None and not common:
        raise PtxtrainError(f"{a.path} and {b.path} have no step in common: there is nothing to compare")
    first = metrics.first if metrics else None
    lines = lines + (metrics.lines if metrics else [])
    equal: list[int] = []
    for step in common:
        states = _compare_states(table, _load(a, table, step, None), _load(b, table, step, None), [])
        if states.first is not None:
            lines += [f"checkpoint, {line}" for line in states.lines]
            first = states.first if first is None else f"{first}; of the checkpoints in {states.first}"
            break
        equal.append(step)
    if equal:
        lines.append(f"checkpoints of {_steps(equal)}: the same bits")
    return Comparison(lines, first)


def _compare_metrics(a: History, b: History) -> Comparison | None:
    """Step by step; None where no step is in both."""
    equal: list[int] = []
    for step in sorted(a.steps() & b.steps()):
        one, other = a.expected(step), b.expected(step)
        assert one is not None and other is not None
        wrong = [
            f"{key} is {shown(one[key])} | {shown(other[key])}"
            for key in BITS
            if key in one and key in other and one[key] != other[key]
        ]
        if wrong:
            before = [f"metrics of {_steps(equal)}: the same"] if equal else []
            return Comparison(
                [*before, *(f"metrics of step {step}: {text}" for text in wrong)], f"step {step}: {wrong[0]}"
            )
        equal.append(step)
    return Comparison([f"metrics of {_steps(equal)}: the same"], None) if equal else None


def _steps(steps: Sequence[int]) -> str:
    """`step 5`, `steps 1 to 12`, `steps 5, 10, 12`."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    if steps[-1] - steps[0] + 1 == len(steps):
        return f"steps {steps[0]} to {steps[-1]}"
    shown_ones = [*map(str, steps[:6]), *(["…", str(steps[-1])] if len(steps) > 6 else [])]
    return "steps " + ", ".join(shown_ones)
