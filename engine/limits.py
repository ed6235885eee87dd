"""What each key of a configuration may hold: a range of numbers, a list of words, or free text."""

from __future__ import annotations

from typing import NamedTuple


class Range(NamedTuple):
    """The numbers a key may have: low to high, ends included unless marked open."""

    low: float
    high: float
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below

    def __str__(self) -> str:
        low = f"above {self.low:,}" if self.low_open else f"at least {self.low:,}"
        high = f"below {self.high:,}" if self.high_open else f"at most {self.high:,}"
        return f"{low} and {high}"


_STEPS = Range(0, 10**9)
# Each key's range, its list of words, or None for free text; a test keeps this table complete.
LIMITS: dict[str, Range | tuple[str, ...] | None] = {
    "model.vocab_size": Range(2, 65_536 * 16),
    "model.context": Range(1, 65_536),
    "model.layers": Range(1, 256),
    "model.width": Range(1, 65_536),
    "model.heads": Range(1, 1_024),
    "model.kv_heads": Range(1, 1_024),
    "model.head_dim": Range(2, 256),
    "model.mlp_width": Range(1, 65_536 * 4),
    "model.norm_eps": Range(0, 1, low_open=True),
    "model.rope_base": Range(1, 1e9, low_open=True),
    "batch.sequences": Range(1, 65_536),
    "batch.micro_batch": Range(1, 65_536),
    "batch.leaves": Range(1, 1_024),
    "optimizer.lr": Range(0, 10, low_open=True),
    "optimizer.schedule": ("cosine", "linear", "constant", "wsd"),
    "optimizer.warmup_steps": _STEPS,
    "optimizer.warmup_tokens": Range(0, 10**15),
    "optimizer.min_lr_ratio": Range(0, 1),
    "optimizer.decay_ratio": Range(0, 1),
    "optimizer.beta1": Range(0, 1, high_open=True),
    "optimizer.beta2": Range(0, 1, high_open=True),
    "optimizer.eps": Range(0, 1, low_open=True),
    "optimizer.weight_decay": Range(0, 10),
    "optimizer.clip": Range(0, 1e6),
    "train.steps": Range(1, 10**9),
    "train.seed": Range(0, 2**63 - 1),
    "train.way": None,  # checked by `ways.parse`
    "train.z_loss": Range(0, 1),
    "train.validate_every": _STEPS,
    "train.validate_sequences": Range(1, 65_536),
    "train.sample_every": _STEPS,
    "train.sample_tokens": Range(1, 65_536),
    "train.save_every": _STEPS,
    "train.save_minutes": Range(0, 1e6),
    "train.keep": Range(2, 10_000),
    "train.keep_every": _STEPS,
    "train.skip_nonfinite": _STEPS,
    "train.spike": ("off", "warn", "stop"),
    "train.spike_window": Range(8, 10_000),
    "train.spike_sigma": Range(0, 1e6, low_open=True),
    "train.watchdog_seconds": Range(0, 1e6),
    "data.path": None,
}
