"""The configuration of a run: frozen data, typed, read from a preset's TOML and saved with the run.

Everything is validated where it enters (a preset, `--set`, a run's own file); past this module a `Config` is sound.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ptxtrain.engine import ways
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.limits import LIMITS, Range


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
    schedule: str = "cosine"  # "cosine", "linear", "constant" or "wsd" (warm-up, stable, decay)
    warmup_steps: int = 0
    warmup_tokens: int = 0  # the same in tokens, rounded up to whole steps; one of the two is 0
    min_lr_ratio: float = 0.1
    decay_ratio: float = 0.2  # "wsd" alone: the share of all steps over which it decays at the end
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
    way: str = "fast"  # "f32", "bf16" or "fast"; "fast,matmul=bf16" sets an operation apart
    z_loss: float = 0.0  # what lse^2 of each row adds to the loss; 0: nothing
    validate_every: int = 100
    validate_sequences: int = 32
    sample_every: int = 100
    sample_tokens: int = 64
    save_every: int = 500
    save_minutes: float = 0.0  # saves also when this long has passed since the last one; 0: never
    keep: int = 3  # checkpoints, besides the best by validation
    keep_every: int = 0  # checkpoints at multiples of this step are never removed; 0: none
    skip_nonfinite: int = 0  # steps whose loss or gradient norm is not finite that may go without an update; then: stop
    spike: str = "off"  # what a loss far above those before it does: "off", "warn" or "stop"
    spike_window: int = 64  # the losses that it is compared with
    spike_sigma: float = 8.0  # how far above their mean, in standard deviations
    watchdog_seconds: float = 60.0  # a step that takes this long, and ten times the median, is reported; 0: never


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


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "batch": BatchConfig,
    "optimizer": OptimizerConfig,
    "train": TrainConfig,
    "data": DataConfig,
}


def preset_names() -> list[str]:
    """The presets that come with the tool, sorted."""
    folder = resources.files("ptxtrain.presets")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_preset(name_or_path: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a preset (`tiny`) or of a TOML file (`runs/mine.toml`, anything with a slash or `.toml`).

    `overrides` are `section.key=value` or `key=value`, applied in order. The configuration's name is the preset's or
    the file's stem. Raises PtxtrainError on an unknown preset, section or key, on a value of a wrong type or out of its
    range, and on a batch or a head that cannot be split.
    """
    if name_or_path.endswith(".toml") or "/" in name_or_path or "\\" in name_or_path:
        path = Path(name_or_path)
        name, where = path.stem, str(path)
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise PtxtrainError(f"cannot read preset file {path}: {error.strerror}.") from error
    else:
        names = preset_names()
        if name_or_path not in names:
            raise PtxtrainError(
                f"unknown preset {name_or_path!r}; there are {', '.join(names)}.{_suggest(name_or_path, names)} "
                "A file of your own needs its .toml ending."
            )
        name, where = name_or_path, f"preset {name_or_path}"
        raw = resources.files("ptxtrain.presets").joinpath(f"{name_or_path}.toml").read_bytes()
    try:
        values = tomllib.loads(raw.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PtxtrainError(f"{where} is not valid TOML: {error}.") from error
    for override in overrides:
        section, key, value = parse_override(override)
        table = values.setdefault(section, {})
        if isinstance(table, dict):
            table[key] = value
    return _build(name, values, where)


def parse_override(text: str) -> tuple[str, str, int | float | str]:
    """`section.key=value`, or `key=value` where one section alone has that key, as (section, key, typed value)."""
    left, equals, right = text.partition("=")
    left, right = left.strip(), right.strip()
    if not equals:
        raise PtxtrainError(f"--set {text}: needs key=value, such as --set optimizer.lr=3e-4.")
    section, dot, key = left.partition(".")
    if not dot:
        found = [dotted for dotted in LIMITS if dotted.partition(".")[2] == left]
        if len(found) != 1:
            raise PtxtrainError(f"--set {text}: unknown key {left!r}.{_suggest(left, _bare_keys())}")
        section, _, key = found[0].partition(".")
    dotted = f"{section}.{key}"
    if dotted not in LIMITS:
        raise PtxtrainError(f"--set {text}: unknown key {dotted!r}.{_suggest(dotted, LIMITS)}")
    kind = _kinds(SECTIONS[section])[key]
    if kind is str:
        return section, key, right
    try:
        return section, key, kind(right)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise PtxtrainError(f"--set {text}: {dotted} must be {what}, {LIMITS[dotted]}; got {right!r}.") from None


def to_dict(config: Config) -> dict[str, Any]:
    """Plain data for JSON or TOML; `from_dict` gives the same configuration back."""
    return dataclasses.asdict(config)


def to_toml(config: Config) -> str:
    """The configuration as a preset file, its name in a comment; `load_preset` of it gives the same one back."""
    values = to_dict(config)
    lines = [f"# preset {json.dumps(values.pop('name'))[1:-1]}"]
    for section, keys in values.items():
        lines += ["", f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def from_dict(values: Mapping[str, Any], where: str = "the saved configuration") -> Config:
    """The configuration that `to_dict` wrote, validated like a preset; `where` opens its errors."""
    rest = dict(values)
    name = rest.pop("name", None)
    if not isinstance(name, str):
        raise PtxtrainError(f"{where} has no name.")
    return _build(name, rest, where)


def validate(config: Config, where: str = "the configuration") -> None:
    """Raises PtxtrainError on a value out of its range and on values that do not fit each other."""
    for section, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            dotted = f"{section}.{field.name}"
            _check(dotted, _kinds(cls)[field.name], getattr(getattr(config, section), field.name), where)
    try:
        ways.parse(config.train.way)
    except PtxtrainError as error:
        words = _suggest(config.train.way, ways.WAYS)
        raise PtxtrainError(f"{where}: train.way: {error}.{words}") from None
    model, batch, optimizer = config.model, config.batch, config.optimizer
    if optimizer.warmup_steps and optimizer.warmup_tokens:
        raise PtxtrainError(
            f"{where}: optimizer.warmup_steps = {optimizer.warmup_steps} and optimizer.warmup_tokens = "
            f"{optimizer.warmup_tokens} both say how long to warm up; set one of them to 0."
        )
    if model.heads % model.kv_heads:
        raise PtxtrainError(
            f"{where}: model.heads = {model.heads} is not a multiple of model.kv_heads = {model.kv_heads}; "
            f"kv_heads can be {_listed(_divisors(model.heads))}."
        )
    if model.head_dim % 2:
        raise PtxtrainError(
            f"{where}: unsupported head size: model.head_dim = {model.head_dim} must be even, from 2 to 256 "
            "(rotary embedding turns pairs)."
        )
    if batch.leaves & (batch.leaves - 1):
        raise PtxtrainError(f"{where}: batch.leaves = {batch.leaves} must be a power of two (1, 2, 4, 8, …).")
    if batch.sequences % batch.leaves:
        raise PtxtrainError(
            f"{where}: impossible batch split: batch.sequences = {batch.sequences} is not a multiple of "
            f"batch.leaves = {batch.leaves}."
        )
    if batch.micro_batch not in (allowed := allowed_micro_batches(batch)):
        raise PtxtrainError(
            f"{where}: impossible batch split: batch.micro_batch = {batch.micro_batch} does not divide the "
            f"{batch.sequences // batch.leaves} sequences of a leaf (sequences {batch.sequences} / leaves "
            f"{batch.leaves}); it can be {_listed(allowed)}."
        )


def allowed_micro_batches(batch: BatchConfig) -> list[int]:
    """Every B that divides a leaf's sequences, ascending; all of them give the same bits."""
    return _divisors(batch.sequences // batch.leaves)


def parameter_count(model: ModelConfig) -> int:
    """Trained numbers: tied embedding, no biases, fused QKV `[D, (H+2G)C]`, fused gate/up `[D, 2F]`."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = model.width * (queries + 2 * keys) + queries * model.width
    mlp = model.width * 2 * model.mlp_width + model.mlp_width * model.width
    layer = attention + mlp + 2 * model.width
    return model.vocab_size * model.width + model.layers * layer + model.width


def flops_per_token(model: ModelConfig) -> int:
    """Floating-point operations that training on one token takes: 6 x parameters + 6·L·H·C·T (causal half)."""
    attention = 6 * model.layers * model.heads * model.head_dim * model.context
    return 6 * parameter_count(model) + attention


def tokens_per_step(config: Config) -> int:
    """Tokens that one step trains on, S x T."""
    return config.batch.sequences * config.model.context


def _build(name: str, values: Mapping[str, Any], where: str) -> Config:
    for section in values:
        if section not in SECTIONS:
            raise PtxtrainError(f"{where}: unknown section [{section}].{_suggest(section, SECTIONS)}")
    parts: dict[str, Any] = {}
    for section, cls in SECTIONS.items():
        table = values.get(section, {})
        if not isinstance(table, Mapping):
            raise PtxtrainError(f"{where}: [{section}] must be a section of keys, not {table!r}.")
        kinds = _kinds(cls)
        for key in table:
            if key not in kinds:
                other = [dotted for dotted in LIMITS if dotted.partition(".")[2] == key]
                hint = f" Did you mean {other[0]}?" if other else _suggest(key, kinds)
                raise PtxtrainError(f"{where}: unknown key {section}.{key}.{hint}")
        needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING and f.name not in table]
        if needed:
            raise PtxtrainError(f"{where}: missing key {', '.join(f'{section}.{key}' for key in needed)}.")
        typed = {key: _check(f"{section}.{key}", kinds[key], value, where) for key, value in table.items()}
        parts[section] = cls(**typed)
    config = Config(name=name, **parts)
    validate(config, where)
    return config


def _check(dotted: str, kind: type, value: Any, where: str) -> Any:
    """The value as `kind`, or a PtxtrainError; a whole number passes for a float, a bool for nothing."""
    limit = LIMITS[dotted]
    if kind is str:
        if not isinstance(value, str):
            raise PtxtrainError(f"{where}: {dotted} must be text in quotes; got {value!r}.")
        if limit is not None and not isinstance(limit, Range) and value not in limit:
            words = ", ".join(limit)
            raise PtxtrainError(f"{where}: {dotted} = {value!r} must be one of {words}.{_suggest(value, limit)}")
        return value
    wanted = (int,) if kind is int else (int, float)
    what = "a whole number" if kind is int else "a number"
    if not isinstance(value, wanted) or isinstance(value, bool) or not math.isfinite(value):
        raise PtxtrainError(f"{where}: {dotted} must be {what}, {limit}; got {value!r}.")
    assert isinstance(limit, Range)
    if not limit.holds(value):
        raise PtxtrainError(f"{where}: {dotted} = {value!r} is out of range: it must be {limit}.")
    return kind(value)


@functools.cache
def _kinds(cls: type) -> dict[str, type]:
    return typing.get_type_hints(cls)


def _toml(value: int | float | str) -> str:
    """A TOML value. JSON's strings are TOML's but for DEL and for characters past U+FFFF, which stay as they are."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)


def _bare_keys() -> list[str]:
    return [dotted.partition(".")[2] for dotted in LIMITS]


def _suggest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]}?" if close else ""


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
