"""`inspect-batch` prints what a step read: the text of the data, where the step before it ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import Done, make_dataset, ptxtrain

from ptxtrain.cli.inspect_batch import printable
from ptxtrain.data.shards import Dataset
from ptxtrain.data.tokenizer import load_tokenizer


def test_the_sequences_of_each_step_lie_behind_each_other(finished: tuple[Path, Done], dataset: Path) -> None:
    data = Dataset(dataset)
    text = load_tokenizer(data.tokenizer_path).decode(data.train[0].read(0, 13 * 8 * 16))
    read = ""
    for step in range(1, 14):  # 13 is not trained yet
        done = ptxtrain("inspect-batch", finished[0], "--step", step, "--json")
        report = json.loads(done.out)
        assert done.code == 0 and [one["index"] for one in report["sequences"]] == list(range(8))
        assert [one["leaf"] for one in report["sequences"]] == [0] * 4 + [1] * 4
        assert [one["token"] for one in report["sequences"]] == [(step - 1) * 128 + 16 * i for i in range(8)]
        read += "".join(one["text"] for one in report["sequences"])
    assert read == text


def test_people_get_shard_token_and_text(finished: tuple[Path, Done]) -> None:
    done = ptxtrain("inspect-batch", finished[0], "--step", 3)
    assert done.code == 0 and done.out.startswith(f"step 3 of {finished[0]}: 8 sequences of 16 tokens of ")
    assert (
        "--- 0, leaf 0: train-000000.tok, token 256\n" in done.out
        and "--- 7, leaf 1: train-000000.tok, token 368" in done.out
    )


def test_other_data_and_bad_steps_are_one_line(finished: tuple[Path, Done], tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    other = make_dataset(tmp_path / "a", 310)
    refused = ptxtrain("inspect-batch", finished[0], "--step", 3, "--data", other)
    assert refused.code == 1 and "is not what step 3 of" in refused.line
    assert "--step" in ptxtrain("inspect-batch", finished[0], "--step", 0).line
    assert "no run.json" in ptxtrain("inspect-batch", tmp_path, "--step", 1).line


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\tb\n", "a\tb\n"), ("\x1b[2J\r", "\\x1b[2J\\r"), ("é\u200e", "é\\u200e"), ("\x9b0m", "\\x9b0m")],
)
def test_text_cannot_drive_a_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown
