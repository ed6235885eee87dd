"""What `metrics.jsonl` tells about a run: its attempts, the steps of each, and whether they agree to the last bit.

The same state, the same data and the same numerics give the same step, whatever stopped the run in between. So a step that two
attempts made must have equal numbers in both, and an attempt must begin with a state that an earlier one left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ptxtrain.engine.durable import read_regular
from ptxtrain.engine.sealed import Damaged

# What a step's line says that its state, data and numerics determine.
BITS = ("loss", "grad_norm", "lr", "digest")

# Whatever else a line holds, these are of their kinds.
_NUMBERS = ("step", "begins_after", "validation_tokens")
_TEXTS = ("digest", "numerics", "data")

Line = dict[str, Any]


@dataclass(slots=True)
class Attempt:
    """The lines of one process. `begin` is empty where its first line was lost."""

    number: int
    begin: Line = field(default_factory=dict)
    steps: dict[int, Line] = field(default_factory=dict)
    validations: dict[tuple[int, int], float | None] = field(default_factory=dict)  # (step, tokens) -> loss

    @property
    def basis(self) -> tuple[Any, Any]:
        """What its bits depend on: (numerics, data)."""
        return self.begin.get("numerics"), self.begin.get("data")

    @property
    def accepted(self) -> list[str]:
        """The differences that its user accepted."""
        found = self.begin.get("accepted")
        return [str(what) for what in found] if isinstance(found, list) else []

    def before(self, step: int) -> str | None:
        """The digest of the state in front of `step`; None where no line has it."""
        if self.begin.get("begins_after") == step - 1:
            return self.begin.get("digest")
        return self.steps.get(step - 1, {}).get("digest")


@dataclass(slots=True)
class History:
    """All attempts in order, and what is wrong with the file itself."""

    attempts: list[Attempt]
    faults: list[str]  # lines that are no metrics, steps out of order
    gaps: list[str]  # lines that were lost: allowed, for nothing here is fsynced
    lines: int

    def of_step(self, step: int) -> Iterator[tuple[Attempt, Line]]:
        """Every attempt that made `step`, with its line."""
        for attempt in self.attempts:
            if step in attempt.steps:
                yield attempt, attempt.steps[step]

    def expected(self, step: int, before: str | None = None) -> Line | None:
        """The line of `step`: of the attempts that made it from the state `before` if any did, the newest one's."""
        made = list(self.of_step(step))
        same = [line for attempt, line in made if before is not None and attempt.before(step) == before]
        return same[-1] if same else made[-1][1] if made else None

    def steps(self) -> set[int]:
        """Every step that some attempt made."""
        return {step for attempt in self.attempts for step in attempt.steps}


def read_history(path: Path) -> History:
    """Reads `metrics.jsonl`. No file is an empty history. Raises Damaged where it cannot be read."""
    try:
        text = read_regular(path, 1 << 40)
    except FileNotFoundError:
        return History([], [], [], 0)
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from error
    raw = text.split(b"\n")
    history = History([], [], [], len(raw) - 1)
    if raw[-1]:
        history.gaps.append("its last line is not whole: a write was cut short")
    for number, line in enumerate(raw[:-1], 1):
        values = _parsed(line)
        if values is None:
            history.faults.append(f"line {number} is not a line of metrics")
        else:
            _take(history, values, number)
    for attempt in history.attempts:
        history.gaps += _missing(attempt)
    return history


def _parsed(line: bytes) -> Line | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not _natural(values.get("attempt")) or values["attempt"] == 0:
        return None
    numbers = all(_natural(values[key]) for key in _NUMBERS if key in values)
    texts = all(isinstance(values[key], str) for key in _TEXTS if key in values)
    return values if numbers and texts else None


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _take(history: History, line: Line, number: int) -> None:
    attempts = history.attempts
    if attempts and line["attempt"] < attempts[-1].number:
        history.faults.append(
            f"line {number} is of attempt {line['attempt']}, behind one of attempt {attempts[-1].number}"
        )
        return
    if not attempts or line["attempt"] > attempts[-1].number:
        attempts.append(Attempt(line["attempt"]))
    attempt = attempts[-1]
    if "begins_after" in line:
        attempt.begin = line
    elif "validation_loss" in line:
        attempt.validations[line.get("step", 0), line.get("validation_tokens", 0)] = line["validation_loss"]
    elif "step" in line and "loss" in line:
        if attempt.steps and line["step"] <= max(attempt.steps):
            history.faults.append(
                f"line {number} is step {line['step']} of attempt {attempt.number}, behind step {max(attempt.steps)}"
            )
        else:
            attempt.steps[line["step"]] = line


def _missing(attempt: Attempt) -> list[str]:
    """Steps that the attempt must have made and that have no line."""
    known = sorted(attempt.steps)
    if not known:
        return []
    first = attempt.begin.get("begins_after")
    if first is None:
        return [f"attempt {attempt.number} lacks its first line"]
    gaps, at = [], first
    for step in known:
        if step > at + 1:
            which = f"step {at + 1}" if step == at + 2 else f"steps {at + 1} to {step - 1}"
            gaps.append(f"attempt {attempt.number} has no line of {which}")
        at = step
    return gaps


def disagreements(history: History) -> list[str]:
    """Steps that two attempts made from the same state on the same data by the same numerics, with other numbers; attempts
    that begin with a state that no earlier one left."""
    found: list[str] = []
    forked = any(attempt.accepted for attempt in history.attempts)
    for index, attempt in enumerate(history.attempts):
        earlier = history.attempts[:index]
        found += _begins(attempt, earlier)
        for step, line in attempt.steps.items():
            for other in earlier:
                if step in other.steps and _must_agree(attempt, other, step, forked):
                    found += _differing(step, other, other.steps[step], attempt, line)
        for key, loss in attempt.validations.items():
            for other in earlier:
                digests = [each.steps.get(key[0], {}).get("digest") for each in (attempt, other)]
                if digests[0] == digests[1] is not None and key in other.validations and loss != other.validations[key]:
                    found.append(
                        f"the validation loss of step {key[0]} is {shown(other.validations[key])} in attempt {other.number} and "
                        f"{shown(loss)} in attempt {attempt.number}"
                    )
    return found


def _begins(attempt: Attempt, earlier: Sequence[Attempt]) -> list[str]:
    step, digest = attempt.begin.get("begins_after"), attempt.begin.get("digest")
    left = {other.steps[step]["digest"] for other in earlier if step in other.steps and "digest" in other.steps[step]}
    if not left or digest in left or "data" in attempt.accepted:  # in other data the place is another
        return []
    return [
        f"attempt {attempt.number} begins after step {step} with digest {digest}; that step had {' or '.join(sorted(left))}"
    ]


def _must_agree(one: Attempt, other: Attempt, step: int, forked: bool) -> bool:
    if one.basis != other.basis:
        return False
    before = one.before(step), other.before(step)
    return before[0] == before[1] if None not in before else not forked


def _differing(step: int, one: Attempt, mine: Line, other: Attempt, theirs: Line) -> list[str]:
    for key in BITS:
        if mine.get(key) != theirs.get(key):
            return [
                f"step {step}: {key} is {shown(mine.get(key))} in attempt {one.number} and {shown(theirs.get(key))} in "
                f"attempt {other.number}"
            ]
    return []


def shown(value: Any) -> str:
    """A number in decimal and to the bit; text as it is."""
    return f"{value!r} ({value.hex()})" if isinstance(value, float) else str(value)
