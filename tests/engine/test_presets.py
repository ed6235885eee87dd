from __future__ import annotations

import pytest

from ptxtrain.engine.config import flops_per_token, load_preset, parameter_count, preset_names, tokens_per_step
from ptxtrain.engine.errors import PtxtrainError


def test_tiny() -> None:
    config = load_preset("tiny")
    m, b = config.model, config.batch
    assert (m.vocab_size, m.context, m.layers, m.width) == (4096, 256, 4, 128)
    assert (m.heads, m.kv_heads, m.head_dim, m.mlp_width) == (4, 2, 32, 384)
    assert (b.sequences, b.micro_batch, b.leaves) == (16, 8, 2)
    assert parameter_count(m) == 1_311_872


def test_dev_is_the_billion_token_run() -> None:
    config = load_preset("dev")
    m, b = config.model, config.batch
    assert (m.vocab_size, m.context, m.layers, m.width) == (32_768, 512, 6, 384)
    assert (m.heads, m.kv_heads, m.head_dim, m.mlp_width) == (6, 2, 64, 1024)
    assert (b.sequences, b.micro_batch, b.leaves, config.train.steps) == (256, 32, 8, 7630)
    assert parameter_count(m) == 22_025_088
    assert tokens_per_step(config) == 131_072
    assert b.micro_batch * m.context == 16_384 and b.sequences // b.micro_batch == 8
    assert round(tokens_per_step(config) * config.train.steps / 1e9, 2) == 1.0
    assert round(flops_per_token(m) / 1e6) == 139


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_the_numbers_that_all_models_share(name: str) -> None:
    config = load_preset(name)
    o = config.optimizer
    assert (config.model.norm_eps, config.model.rope_base) == (1e-5, 10_000.0)
    assert (o.beta1, o.beta2, o.eps, o.weight_decay, o.clip) == (0.9, 0.95, 1e-8, 0.1, 1.0)
    assert (o.schedule, o.min_lr_ratio) == ("cosine", 0.1)
    assert 0 < o.warmup_steps < config.train.steps // 2 and config.name == name


def test_unknown_preset_lists_those_there_are() -> None:
    with pytest.raises(PtxtrainError, match=r"unknown preset 'tinny'; there are dev, tiny\. Did you mean tiny\?"):
        load_preset("tinny")


def test_parameter_count_is_that_of_the_models_own_table() -> None:
    from ptxtrain.engine.parameters import parameter_table
    from ptxtrain.engine.tensorfile import count_numbers

    for name in preset_names():
        model = load_preset(name).model
        assert count_numbers(parameter_table(model)) == parameter_count(model)
