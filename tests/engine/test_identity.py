"""Differences between a state and the process that would go on with it, and where accepted data go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from statebench import snapshot

from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.identity import changes, join_numerics, refuse, split_numerics, start_position
from ptxtrain.engine.rundir import data_id


def _identity(*digests: str, tokenizer: str = "t") -> dict[str, Any]:
    shards = [{"name": f"train-{i:06d}.tok", "tokens": 9, "bytes": 1, "digest": d} for i, d in enumerate(digests)]
    return {"vocab_size": 5, "tokenizer_sha256": tokenizer, "shards": [*shards, {"name": "val-000000.tok"}]}


def _dataset(identity: dict[str, Any]) -> Any:
    return SimpleNamespace(
        identity=lambda: identity,
        difference=lambda recorded: None if recorded == identity else "a shard differs",
        directory="here",
        tokenizer_digest=identity["tokenizer_sha256"],
    )


def _info(identity: dict[str, Any]) -> Any:
    return SimpleNamespace(data=identity, data_id=data_id(identity), tokenizer_sha256="t", numerics_id="cpu; kernels 1")


def test_what_is_the_same_is_no_change_and_each_difference_has_its_name() -> None:
    info = _info(_identity("a", "b"))
    assert changes(snapshot(1), info, _dataset(_identity("a", "b")), "cpu; kernels 1") == []
    found = changes(snapshot(1), info, _dataset(_identity("a", "c", tokenizer="u")), "cuda; kernels 2")
    assert [change.what for change in found] == ["data", "tokenizer", "kernels", "device"]
    assert "a shard differs" in found[0].text
    with pytest.raises(PtxtrainError, match=r"--accept-tokenizer --accept-device$"):
        refuse("run", found, {"data", "kernels"})
    assert refuse("run", found, {"data", "kernels", "tokenizer", "device"}) == found


def test_a_checkpoint_speaks_for_itself() -> None:
    """What it was made with counts, not what the run began with."""
    info = _info(_identity("a"))
    start = snapshot(1, numerics_id="cuda; kernels 2", data_id=data_id(_identity("z")))
    assert changes(start, info, _dataset(_identity("z")), "cuda; kernels 2") == []
    assert [c.what for c in changes(start, info, _dataset(_identity("a")), "cpu; kernels 1")] == [
        "data",
        "kernels",
        "device",
    ]


def test_accepted_data_go_on_in_place_where_they_begin_alike() -> None:
    info = _info(_identity("a", "b", "c"))
    start = snapshot(8)  # in the second shard
    assert start.position == (1, 24)
    for now, where in (
        (("a", "b", "c", "d"), (1, 24)),
        (("a", "b"), (1, 24)),
        (("a", "x"), (0, 0)),
        (("x", "b"), (0, 0)),
        (("a",), (0, 0)),
    ):
        assert start_position(start, info, _dataset(_identity(*now))) == where, now
    elsewhere = snapshot(8, data_id="another")
    assert start_position(elsewhere, info, _dataset(_identity("a", "b", "c"))) == (0, 0)


def test_numerics_come_apart_again() -> None:
    assert split_numerics(join_numerics("cpu; x", "12")) == ("cpu; x", "12") and split_numerics("cpu") == ("cpu", "")
