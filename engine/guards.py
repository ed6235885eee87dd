"""Judges each step's numbers: a loss or norm that is not finite, and a loss far above those before it.

What it remembers is in every checkpoint (`state`), so that a resumed run judges as one that never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ptxtrain.engine.config import TrainConfig

LEAST_SPREAD = 0.01  # nats: losses that hardly vary must not make a spike of a small one


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a step's numbers mean.

    `kind`: "fine"; "warn", go on and say `why`; "skip", the step had no update and the run goes on; "refuse", the same, but the
    run ends before this step; "stop", the step has its update and the run ends behind it.
    """

    kind: str
    why: str = ""


FINE = Verdict("fine")


class Guards:
    """The rules of a run's config, with what they remember."""

    def __init__(self, train: TrainConfig, state: Mapping[str, Any]) -> None:
        """`state` is what `state` gave when the checkpoint was made; empty for a new run."""
        self._train = train
        skipped, losses = state.get("skipped", 0), state.get("losses", [])
        self.skipped = skipped if isinstance(skipped, int) and skipped > 0 else 0
        usable = losses if isinstance(losses, list) else []
        self._losses = [float(x) for x in usable if isinstance(x, int | float) and math.isfinite(x)]

    def state(self) -> dict[str, Any]:
        """Plain data for the checkpoint."""
        return {"skipped": self.skipped, "losses": list(self._losses)}

    def look(self, loss: float, grad_norm: float) -> Verdict:
        """Judge a step, and remember it."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            numbers = f"the loss is {loss:g} and the gradient norm {grad_norm:g}"
            allowed = self._train.skip_nonfinite
            if self.skipped >= allowed:
                tried = f", and {allowed} such steps have been skipped already" if allowed else ""
                return Verdict("refuse", numbers + tried)
            self.skipped += 1
            return Verdict("skip", f"{numbers}; skipped without an update ({self.skipped} of {allowed} such steps)")
        verdict = self._spike(loss)
        self._losses.append(loss)
        del self._losses[: -self._train.spike_window]
        return verdict

    def _spike(self, loss: float) -> Verdict:
        """The mean and spread of the losses before, in exact sums, so that they depend on nothing but those losses."""
        train, losses = self._train, self._losses[-self._train.spike_window :]
        if train.spike == "off" or 2 * len(losses) < train.spike_window:
            return FINE
        mean = math.fsum(losses) / len(losses)
        spread = max(math.sqrt(math.fsum((x - mean) ** 2 for x in losses) / len(losses)), LEAST_SPREAD)
        if loss <= mean + train.spike_sigma * spread:
            return FINE
        return Verdict(
            train.spike,
            f"the loss {loss:.4f} is {(loss - mean) / spread:.1f} standard deviations above the mean {mean:.4f} of the "
            f"{len(losses)} steps before it (train.spike_sigma is {train.spike_sigma:g})",
        )
