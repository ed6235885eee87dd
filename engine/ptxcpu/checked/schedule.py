"""The order in which blocks, and warps of a block, take their turns: any is legal, so results must not depend on it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import gcd

from ptxtrain.engine.errors import PtxtrainError

VARIABLE = "PTXTRAIN_CHECKED"
LARGEST = 1 << 31  # blocks whose order can be changed


@dataclass(frozen=True, slots=True)
class Schedule:
    """`kind` is "forward", "reverse" or "random" (the same for the same seed)."""

    kind: str = "forward"
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """`forward`, `reverse`, `random` or `random:SEED`."""
        kind, _, seed = text.partition(":")
        if kind not in ("forward", "reverse", "random") or (seed and (kind != "random" or not seed.isdigit())):
            raise PtxtrainError(f"unknown schedule {text!r}; choose forward, reverse, random or random:SEED")
        return cls(kind, int(seed or 0))

    def order(self, count: int, salt: int) -> tuple[int, int]:
        """factor and offset: what is number i goes as the (i * factor + offset) % count th."""
        if self.kind == "forward" or count == 1 or count >= LARGEST:
            return 1, 0
        if self.kind == "reverse":
            return count - 1, count - 1
        mixed = _mix(self.seed * 0x9E3779B97F4A7C15 + salt)
        factor = mixed % count or 1
        while gcd(factor, count) != 1:
            factor = factor % (count - 1) + 1
        return factor, _mix(mixed) % count

    def __str__(self) -> str:
        return f"{self.kind}:{self.seed}" if self.kind == "random" else self.kind


def _mix(value: int) -> int:
    """SplitMix64's finaliser."""
    value &= (1 << 64) - 1
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    value = (value ^ value >> 27) * 0x94D049BB133111EB % (1 << 64)
    return value ^ value >> 31


def wanted(checked: bool | None, schedule: str | None = None) -> Schedule | None:
    """The schedule to check with; None: unchecked.

    `checked` None leaves it to `$PTXTRAIN_CHECKED`: 1 (or `forward`), `reverse`, `random`, `random:SEED`; 0 or nothing for
    unchecked.
    """
    text = os.environ.get(VARIABLE, "")
    if checked is None:
        checked = schedule is not None or text not in ("", "0")
    if not checked:
        return None
    try:
        return Schedule.parse(schedule or ("forward" if text in ("", "0", "1") else text))
    except PtxtrainError as error:
        if schedule:
            raise
        raise PtxtrainError(f"${VARIABLE} is {text!r}; it takes 0, 1, reverse, random or random:SEED") from error
