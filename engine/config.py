"""The configuration of a run: frozen data, typed, read from a preset's TOML and saved with the run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model's shape, in DESIGN's letters: V, T, L, D, H, G, C, F."""

    vocab_size: int
    context: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    norm_eps: float = 1e-5
    rope_base: float = 10_000.0


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """How a step's sequences are split. `leaves` is part of the result's definition, `micro_batch` is not."""

    sequences: int  # S, in a step
    micro_batch: int  # B, any divisor of sequences / leaves
    leaves: int  # a power of two


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW with linear warm-up, then a schedule down to `min_lr_ratio` of `lr`."""

    lr: float
    schedule: str = "cosine"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0  # global gradient norm; 0 leaves it alone


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """The length of a run and what happens along it. Intervals are in steps; 0 turns a thing off."""

    steps: int
    seed: int = 1
    way: str = "bf16"  # "f32" or "bf16"
    validate_every: int = 100
    validate_sequences: int = 32
    sample_every: int = 100
    sample_tokens: int = 64
    save_every: int = 500
    keep: int = 3


@dataclass(frozen=True, slots=True)
class DataConfig:
    """`path` is the preset's own dataset directory; empty: the sample corpus `@stdlib`."""

    path: str = ""


@dataclass(frozen=True, slots=True)
class Config:
    """A whole run."""

    name: str
    model: ModelConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    data: DataConfig
