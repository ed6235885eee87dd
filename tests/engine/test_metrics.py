from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from ptxtrain.engine.durable import Call, Durable
from ptxtrain.engine.metrics import Metrics, read_metrics


def refuse(line: str) -> None:
    raise AssertionError(line)


def test_lines_are_json_marked_with_the_attempt(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, refuse) as metrics:
        metrics.log(step=1, loss=8.3)
        metrics.log(step=2, loss=float("nan"), note="é\n")
    with Metrics(path, refuse) as metrics:
        assert metrics.attempt == 2
        metrics.log(step=2, loss=7.9)
    assert read_metrics(path) == [
        {"attempt": 1, "step": 1, "loss": 8.3},
        {"attempt": 1, "step": 2, "loss": None, "note": "é\n"},
        {"attempt": 2, "step": 2, "loss": 7.9},
    ]
    assert path.read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("torn", [b'{"attempt": 1, "st', b"x", b"y" * 10_000])
def test_a_torn_last_line_is_cut_off_at_open(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = b"".join(json.dumps({"attempt": 3, "step": n}).encode() + b"\n" for n in range(500))
    for before in (b"", whole):
        path.write_bytes(before + torn)
        Metrics(path, refuse).close()
        assert path.read_bytes() == before


def test_attempt_survives_lines_that_are_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"attempt": 4}\n[1]\nnot json\n{"attempt": "x"}\n' + b"[" * 5000 + b"\n")
    with Metrics(path, refuse) as metrics:
        assert metrics.attempt == 5


def test_full_disk_warns_once_leaves_whole_lines_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    path, warned, full = tmp_path / "metrics.jsonl", [], False
    wrote = 0

    def hook(call: Call) -> int | None:
        nonlocal wrote
        if call.op == "write" and full:
            wrote += 1
            if wrote % 2:
                return 9  # the first bytes still fit
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return None

    with Metrics(path, warned.append, Durable(hook)) as metrics:
        metrics.log(step=1)
        full = True
        metrics.log(step=2)
        metrics.log(step=3)
        full = False
        metrics.log(step=4)
    assert [line["step"] for line in read_metrics(path)] == [1, 4]
    assert len(warned) == 1 and "No space left" in warned[0] and "Training goes on" in warned[0]
    assert path.read_bytes() == b'{"attempt": 1, "step": 1}\n{"attempt": 1, "step": 4}\n'


def test_a_file_that_cannot_be_used_warns_and_takes_no_lines(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/full")
    (tmp_path / "folder").mkdir()
    for name in ("link", "folder", "none/metrics.jsonl"):
        warned: list[str] = []
        metrics = Metrics(tmp_path / name, warned.append)
        metrics.log(step=1)
        metrics.close()
        assert len(warned) == 1 and "cannot write" in warned[0]
