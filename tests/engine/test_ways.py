"""Ways: how they are written, what they become for a model, and what is said where a fast kernel does not fit."""

from __future__ import annotations

from dataclasses import replace

import modelbench as bench
import pytest

from ptxtrain.engine import ways
from ptxtrain.engine.config import load_preset, preset_names
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.step import TrainStep


@pytest.mark.parametrize(
    ("text", "base", "apart"),
    [
        ("fast", "fast", {}),
        ("f32", "f32", {}),
        ("fast,matmul=bf16", "fast", {"matmul": "bf16"}),
        ("matmul=bf16, attention=fast", "fast", {"matmul": "bf16", "attention": "fast"}),
        ("bf16,cross_entropy=fast", "bf16", {"cross_entropy": "fast"}),
    ],
)
def test_parse(text: str, base: str, apart: dict[str, str]) -> None:
    assert ways.parse(text) == (base, apart)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fats", "unknown way 'fats': it must be one of f32, bf16, fast"),
        ("", "unknown way ''|must be one of"),
        ("fast,bf16", "names two ways for all operations: fast and bf16"),
        ("fast,rope=bf16", "unknown operation 'rope'; it must be one of matmul, attention, cross_entropy"),
        ("fast,matmul=f32", "mixes f32 with others"),
        ("f32,matmul=bf16", "mixes f32 with others"),
        ("fast,matmul=", "unknown way ''"),
    ],
)
def test_what_is_refused(text: str, says: str) -> None:
    if not text:
        assert ways.parse(text) == ("fast", {})
        return
    with pytest.raises(PtxtrainError, match=says):
        ways.parse(text)


@pytest.mark.parametrize(
    ("text", "change", "result"),
    [
        ("fast", "matmul=bf16", "fast,matmul=bf16"),
        ("fast,matmul=bf16", "attention=bf16", "fast,matmul=bf16,attention=bf16"),
        ("fast,matmul=bf16", "matmul=fast", "fast"),
        ("fast,matmul=bf16", "bf16", "bf16"),
        ("f32", "fast,attention=bf16", "fast,attention=bf16"),
    ],
)
def test_changed(text: str, change: str, result: str) -> None:
    assert ways.changed(text, change) == result


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_fast_in_every_operation(name: str) -> None:
    config = load_preset(name)
    found = ways.resolve(config.model, config.train.way)
    assert config.train.way == "fast" and not found.notes
    assert (found.matmul, found.attention, found.cross_entropy) == ("fast", "fast", "fast")


def test_shapes_that_do_not_fit_take_the_twin_and_say_why() -> None:
    found = ways.resolve(bench.LONG, "fast")  # heads of 10, a vocabulary of 67
    assert (found.matmul, found.attention, found.cross_entropy) == ("bf16", "bf16", "bf16")
    assert found.notes == (
        "matmul: the naive kernel instead of the fast one: rows of vocabulary = 67 numbers are no multiple of 8, which 16-byte "
        "copies need",
        "attention: the naive kernel instead of the fast one: head_dim is 10, the flash kernels have 32, 64, 128",
        "cross_entropy: the naive kernel instead of the fast one: rows of 67 logits are no multiple of 8, which 16-byte accesses "
        "need",
    )
    assert found.dtype == "bf16" and ways.resolve(bench.LONG, "f32").dtype == "f32"
    with pytest.raises(PtxtrainError, match="the fast attention does not take this model: head_dim is 10"):
        ways.resolve(bench.LONG, "fast,attention=fast")
    large = replace(bench.FAST, vocab_size=65536)
    assert ways.resolve(large, "fast").notes == (
        "cross_entropy: logits are read twice: a row of 65536 logits takes 128 KiB, more than the 99 KiB of shared memory",
    )


def test_operations_are_launched_as_chosen(device: Device) -> None:
    """The kernels of each operation, by name, in the plan of a micro-batch."""
    cfg = bench.config(bench.FAST, 2, 1, 1)
    fast = {"matmul": {"matmul"}, "attention": {"attention_forward", "attention_dq", "attention_dkv"}}
    fast["cross_entropy"] = {"cross_entropy"}
    naive = {"matmul": {"matmul_nn_bf16", "matmul_nt_bf16", "matmul_tn_bf16"}, "attention": {"attention_softmax"}}
    naive["cross_entropy"] = {"cross_entropy_forward", "cross_entropy_backward"}
    for apart in (None, *ways.OPERATIONS):
        step = TrainStep(cfg, device, way="fast" if apart is None else f"fast,{apart}=bf16")
        names = {launch.kernel.name for launch in step._micro_plans[0].launches}
        for operation in ways.OPERATIONS:
            expected, other = fast[operation], naive[operation]
            if operation == apart:
                expected, other = other, expected
            assert expected <= names and not other & names, (apart, operation)
