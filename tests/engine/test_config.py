from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxtrain.engine.config import (
    SECTIONS,
    Config,
    allowed_micro_batches,
    from_dict,
    load_preset,
    parse_override,
    to_dict,
    to_toml,
    validate,
)
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.limits import LIMITS, Range

TINY = """
[model]
vocab_size = 97
context = 9
layers = 2
width = 48
heads = 4
kv_heads = 2
head_dim = 12
mlp_width = 64
[batch]
sequences = 4
micro_batch = 1
leaves = 2
[optimizer]
lr = 1e-3
[train]
steps = 10
"""


def refusal(*args: object) -> str:
    with pytest.raises(PtxtrainError) as caught:
        load_preset(*args)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message and caught.value.exit_code == 1
    return message


@pytest.fixture
def preset_file(tmp_path):
    def write(text: str = TINY) -> str:
        (tmp_path / "mine.toml").write_text(text)
        return str(tmp_path / "mine.toml")

    return write


def test_file_gives_defaults_and_its_stem_as_name(preset_file) -> None:
    config = load_preset(preset_file())
    assert config.name == "mine" and config.model.head_dim == 12
    assert config.optimizer.beta2 == 0.95 and config.train.way == "fast" and config.data.path == ""


def test_round_trip_through_json() -> None:
    config = load_preset("tiny", ["lr=3e-4", "steps=7", "data.path=sets/books"])
    again = from_dict(json.loads(json.dumps(to_dict(config))))
    assert again == config and isinstance(again, Config)
    assert config.optimizer.lr == 3e-4 and config.train.steps == 7 and config.data.path == "sets/books"


def test_from_dict_is_as_strict_as_a_file() -> None:
    values = to_dict(load_preset("tiny"))
    values["train"]["stepz"] = 3
    with pytest.raises(PtxtrainError, match=r"run.json: unknown key train.stepz. Did you mean steps\?"):
        from_dict(values, "run.json")
    with pytest.raises(PtxtrainError, match="no name"):
        from_dict({"model": {}})


def test_older_files_without_newer_keys_get_defaults() -> None:
    values = to_dict(load_preset("tiny"))
    del values["train"]["keep_every"]
    assert from_dict(values).train.keep_every == 0


def test_every_key_has_its_limit_and_every_default_meets_it() -> None:
    keys = {f"{section}.{f.name}": f for section, cls in SECTIONS.items() for f in dataclasses.fields(cls)}
    assert set(keys) == set(LIMITS)
    for dotted, field in keys.items():
        limit = LIMITS[dotted]
        if isinstance(limit, Range) and field.default is not dataclasses.MISSING:
            assert limit.holds(field.default), dotted


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("layers=0", "model.layers = 0 is out of range: it must be at least 1 and at most 256"),
        ("layers=2.5", "model.layers must be a whole number, at least 1 and at most 256; got '2.5'"),
        ("lr=0", "optimizer.lr = 0.0 is out of range: it must be above 0 and at most 10"),
        ("lr=nan", "optimizer.lr must be a number"),
        ("beta1=1", "must be at least 0 and below 1"),
        ("heads=3", "model.heads = 3 is not a multiple of model.kv_heads = 2; kv_heads can be 1, 3"),
        ("head_dim=31", "unsupported head size: model.head_dim = 31 must be even, from 2 to 256"),
        ("head_dim=512", "model.head_dim = 512 is out of range"),
        ("leaves=3", "must be a power of two"),
        ("leaves=32", "impossible batch split: batch.sequences = 16 is not a multiple of batch.leaves = 32"),
        ("micro_batch=3", "does not divide the 8 sequences of a leaf (sequences 16 / leaves 2); it can be 1, 2, 4, 8"),
        ("vocab_size=1048577", "model.vocab_size = 1048577 is out of range"),
        ("way=bf61", "train.way: unknown way 'bf61': it must be one of f32, bf16, fast. Did you mean bf16?"),
        ("schedule=cosin", "Did you mean cosine?"),
        ("spike=halt", "train.spike = 'halt' must be one of off, warn, stop"),
        ("spike=stp", "Did you mean stop?"),
        ("spike_window=2", "train.spike_window = 2 is out of range: it must be at least 8 and at most 10,000"),
        ("warmup_tokens=81920", "warmup_steps = 20 and optimizer.warmup_tokens = 81920 both say how long to warm up"),
        ("trian.steps=3", "unknown key 'trian.steps'. Did you mean train.steps?"),
        ("hedas=3", "unknown key 'hedas'. Did you mean heads?"),
        ("model.hedas=3", "unknown key 'model.hedas'. Did you mean model.heads?"),
        ("optimizer.heads=3", "unknown key 'optimizer.heads'"),
        ("steps", "needs key=value"),
    ],
)
def test_bad_override_is_one_line(override: str, message: str) -> None:
    assert message in refusal("tiny", [override])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("layers = 2", "layers = 2.0", "model.layers must be a whole number, at least 1 and at most 256; got 2.0"),
        ("layers = 2", "layers = true", "model.layers must be a whole number"),
        ("layers = 2", 'layers = "2"', "model.layers must be a whole number"),
        ("layers = 2", "", "missing key model.layers"),
        ("layers = 2", "layres = 2", "unknown key model.layres. Did you mean layers?"),
        ("layers = 2", "layers = 2\nsteps = 3", "unknown key model.steps. Did you mean train.steps?"),
        ("lr = 1e-3", "lr = inf", "optimizer.lr must be a number"),
        ("lr = 1e-3", "lr = false", "optimizer.lr must be a number"),
        ("[batch]", "[bacth]", "unknown section [bacth]. Did you mean batch?"),
        ("[model]", "batch = 3\n[model]", "mine.toml"),
        ("[model]", "data = 3\n[model]", "[data] must be a section of keys"),
        ("[train]", "[train]\nway = 3", "train.way must be text in quotes; got 3"),
        ("[model]", "[model", "is not valid TOML"),
        ("steps = 10", "steps = 10\nsteps = 11", "is not valid TOML"),
        ("[model]", "x = " + "[" * 3000 + "\n[model]", "is not valid TOML"),
    ],
)
def test_bad_file_is_one_line_naming_it(preset_file, old: str, new: str, message: str) -> None:
    path = preset_file(TINY.replace(old, new, 1))
    line = refusal(path)
    assert message in line and path in line


def test_whole_number_passes_for_a_float(preset_file) -> None:
    clip = load_preset(preset_file(TINY.replace("lr = 1e-3", "lr = 1e-3\nclip = 2"))).optimizer.clip
    assert clip == 2.0 and isinstance(clip, float)


def test_file_that_cannot_be_read(tmp_path) -> None:
    assert "No such file" in refusal(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    assert "not valid TOML" in refusal(str(tmp_path / "bad.toml"))


def test_later_override_wins_and_bare_key_finds_its_section() -> None:
    assert load_preset("tiny", ["lr=1", "optimizer.lr=2e-4"]).optimizer.lr == 2e-4
    assert parse_override("micro_batch = 4") == ("batch", "micro_batch", 4)


def test_validate_catches_a_configuration_built_by_hand() -> None:
    config = load_preset("tiny")
    bad = dataclasses.replace(config, batch=dataclasses.replace(config.batch, micro_batch=5))
    with pytest.raises(PtxtrainError, match="impossible batch split"):
        validate(bad)


def _values(limit: object, kind: str) -> st.SearchStrategy[object]:
    """Whatever a key may hold by its limit alone."""
    if isinstance(limit, tuple) and not isinstance(limit, Range):
        return st.sampled_from(limit)
    if not isinstance(limit, Range):
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    if kind == "int":
        return st.integers(int(limit.low), int(limit.high))
    return st.floats(
        limit.low, limit.high, exclude_min=limit.low_open, exclude_max=limit.high_open, allow_nan=False
    )  # fmt: skip


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Any sound configuration: every key drawn by its limit, and those that must fit each other made to."""
    values: dict[str, dict[str, object]] = {
        section: {f.name: draw(_values(LIMITS[f"{section}.{f.name}"], str(f.type))) for f in dataclasses.fields(cls)}
        for section, cls in SECTIONS.items()
    }
    model, batch = values["model"], values["batch"]
    model["kv_heads"] = kv = draw(st.integers(1, 32))
    model["heads"] = kv * draw(st.integers(1, 32))
    model["head_dim"] = 2 * draw(st.integers(1, 128))
    batch["leaves"] = leaves = 2 ** draw(st.integers(0, 6))
    batch["micro_batch"] = micro = draw(st.integers(1, 16))
    batch["sequences"] = leaves * micro * draw(st.integers(1, 64))
    values["train"]["way"] = draw(st.sampled_from(["f32", "bf16", "fast", "fast,matmul=bf16"]))
    values["optimizer"][draw(st.sampled_from(["warmup_steps", "warmup_tokens"]))] = 0
    return from_dict({"name": draw(st.text(max_size=8)), **values})


@settings(max_examples=150, deadline=None)
@given(configs())
def test_any_config_comes_back_the_same_from_json_and_from_toml(tmp_path_factory, config: Config) -> None:
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    path = tmp_path_factory.getbasetemp() / "round.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert dataclasses.replace(load_preset(str(path)), name=config.name) == config


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(LIMITS)), st.one_of(st.integers(), st.floats(), st.text(max_size=6), st.booleans()))
def test_any_value_of_any_key_is_taken_as_it_is_or_refused_by_name(dotted: str, value: object) -> None:
    values = to_dict(load_preset("tiny"))
    section, _, key = dotted.partition(".")
    values[section][key] = value
    try:
        taken, refused = getattr(getattr(from_dict(values), section), key), ""
    except PtxtrainError as error:
        taken, refused = None, str(error)
    if refused:
        assert key in refused and "\n" not in refused
    else:
        assert taken == value and type(taken).__name__ == SECTIONS[section].__dataclass_fields__[key].type


def test_allowed_micro_batches() -> None:
    config = load_preset("dev")
    assert allowed_micro_batches(config.batch) == [1, 2, 4, 8, 16, 32]
