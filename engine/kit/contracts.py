"""What the kit says when an argument breaks a function's contract: which one, what was expected, what came.

A function's sizes are letters (DESIGN.md); the first array that has a letter binds it, later ones are held against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from ptxtrain.engine.errors import PtxtrainError

FLOATS = ("f16", "bf16", "f32")
LARGEST = 2**31 - 1  # of a size: kernels count in 32 bits

# An axis: a letter, or a number that the axis must be.
Axes = tuple["str | int", ...]


class ContractError(PtxtrainError, ValueError):
    """An argument breaks the contract of a kit function. One line: function, argument, expected, got."""


def fail(op: str, name: str, expected: str, got: str) -> NoReturn:
    """Raise the one error of a broken contract."""
    raise ContractError(f"{op}: {name}: expected {expected}, got {got}")


def one_of(names: Sequence[str]) -> str:
    """`f16, bf16 or f32`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


@dataclass(slots=True)
class Sizes:
    """What a call's letters stand for. `lead` is what `...` stands for, None until an array has it."""

    letters: dict[str, int] = field(default_factory=dict)
    lead: tuple[int, ...] | None = None

    def __getitem__(self, letter: str) -> int:
        return self.letters[letter]

    @property
    def rows(self) -> int:
        """How many rows the leading axes count together."""
        return math.prod(self.lead or ())

    def written(self, axes: Axes) -> str:
        """Axes as a message has them: `(N, D) = (?, 8)` with the sizes that are known, or `(3, 8)` where all are numbers."""
        names = ", ".join(map(str, axes))
        lead = "..." if self.lead is None else ", ".join(map(str, self.lead))
        known = [lead if a == "..." else str(a if isinstance(a, int) else self.letters.get(a, "?")) for a in axes]
        values = ", ".join(part for part in known if part)
        comma, end = "," if len(axes) == 1 else "", "," if values and "," not in values else ""
        if all(part in ("?", "...") for part in known) or names == values:
            return f"({names}{comma})"
        return f"({names}{comma}) = ({values}{end})"


def bind(op: str, name: str, shape: tuple[int, ...], axes: Axes, sizes: Sizes) -> None:
    """Hold a shape against its axes; letters that are new take their size from it. `...` may stand first, for any axes."""
    has_lead = axes[:1] == ("...",)
    rest = axes[1:] if has_lead else axes
    lead = len(shape) - len(rest)
    new: dict[str, int] = {}
    ok = lead >= 0 if has_lead else lead == 0
    if ok and has_lead:
        ok = sizes.lead in (None, shape[:lead])
    for axis, size in zip(rest, shape[lead:] if has_lead else shape, strict=False):
        wanted = axis if isinstance(axis, int) else sizes.letters.get(axis, new.setdefault(axis, size))
        ok = ok and wanted == size
    if not ok:
        fail(op, name, f"shape {sizes.written(axes)}", f"{shape}")
    for axis, size in new.items():
        if size > LARGEST:
            fail(op, name, f"{axis} of at most {LARGEST:,}", f"{size:,}")
    if has_lead and sizes.lead is None:
        if math.prod(shape[:lead]) > LARGEST:
            fail(op, name, f"at most {LARGEST:,} rows", f"{math.prod(shape[:lead]):,}")
        sizes.lead = shape[:lead]
    sizes.letters.update(new)


def number(
    op: str, name: str, value: float, *, low: float = -math.inf, high: float = math.inf, open_low: bool = False
) -> float:
    """A finite number within [low, high], or (low, high] with `open_low`.

    Raises:
        ContractError: it is something else.
    """
    try:
        found = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        fail(op, name, "a number", f"{type(value).__name__}")
    inside = low < found <= high if open_low else low <= found <= high
    if not (math.isfinite(found) and inside):
        limits = []
        if low > -math.inf:
            limits.append(f"{'above' if open_low else 'of at least'} {low:g}")
        if high < math.inf:
            limits.append(f"{'at most' if limits else 'of at most'} {high:g}")
        fail(op, name, " ".join(["a finite number", " and ".join(limits)]).strip(), f"{found!r}")
    return found
