"""Attempts read from metrics, and what must not differ between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxtrain.engine.history import disagreements, read_history
from ptxtrain.engine.sealed import Damaged


def begin(attempt: int, after: int, **more: Any) -> dict[str, Any]:
    base = {"digest": f"d{after}", "numerics": "cpu", "data": "A", "accepted": []}
    return {"attempt": attempt, "begins_after": after, **base, **more}


def step(attempt: int, number: int, **more: Any) -> dict[str, Any]:
    base = {"loss": 8.0 - number / 7, "grad_norm": 1.5, "lr": 1e-3, "digest": f"d{number}"}
    return {"attempt": attempt, "step": number, **base, **more}


def written(path: Path, *lines: dict[str, Any] | bytes) -> Path:
    file = path / "metrics.jsonl"
    file.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return file


TWO = (begin(1, 0), step(1, 1), step(1, 2), step(1, 3), begin(2, 1), step(2, 2), step(2, 3), step(2, 4))


def test_attempts_come_apart_and_agree(tmp_path: Path) -> None:
    history = read_history(written(tmp_path, *TWO))
    assert [(a.number, list(a.steps)) for a in history.attempts] == [(1, [1, 2, 3]), (2, [2, 3, 4])]
    assert history.faults == history.gaps == disagreements(history) == []
    assert history.steps() == {1, 2, 3, 4}
    first, second = history.attempts
    assert (first.before(1), first.before(2), second.before(2), second.before(9)) == ("d0", "d1", "d1", None)
    assert [a.number for a, _ in history.of_step(3)] == [1, 2] and history.expected(9) is None
    assert read_history(tmp_path / "none").attempts == []
    (tmp_path / "link").symlink_to("metrics.jsonl")
    with pytest.raises(Damaged):
        read_history(tmp_path / "link")


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ((*TWO[:6], step(2, 3, loss=7.0)), "step 3: loss is 7.571428571428571 (0x1.e492492492492p+2) in attempt 1 and 7.0"),
        ((*TWO[:6], step(2, 3, digest="x")), "step 3: digest is d3 in attempt 1 and x in attempt 2"),
        ((*TWO[:6], step(2, 3, grad_norm=None)), "step 3: grad_norm is 1.5 (0x1.8000000000000p+0) in attempt 1 and None"),
        ((*TWO[:4], begin(2, 2, digest="y")), "attempt 2 begins after step 2 with digest y; that step had d2"),
        (
            ({**TWO[2], "attempt": 1}, {"attempt": 1, "step": 2, "validation_loss": 3.0, "validation_tokens": 9}, step(2, 2),
             {"attempt": 2, "step": 2, "validation_loss": 3.5, "validation_tokens": 9}),
            "the validation loss of step 2 is 3.0",
        ),
    ],
)  # fmt: skip
def test_what_differs_between_attempts_is_named(tmp_path: Path, lines: tuple[Any, ...], says: str) -> None:
    found = disagreements(read_history(written(tmp_path, *lines)))
    assert len(found) == 1 and says in found[0], found


def test_only_the_same_state_data_and_numerics_must_agree(tmp_path: Path) -> None:
    """Accepted differences fork a run; a fork that goes back to the old numerics must agree with its own past again."""
    forked = (*TWO[:4], begin(2, 1, numerics="cuda", accepted=["device"]), step(2, 2, loss=1.0, digest="x2"))
    assert disagreements(read_history(written(tmp_path, *forked))) == []
    third = (*forked, begin(3, 2, digest="x2", numerics="cpu", accepted=["device"]), step(3, 3, loss=2.0, digest="x3"))
    assert disagreements(read_history(written(tmp_path, *third))) == [], "step 3 came from another step 2"
    fourth = (*third, begin(4, 1), step(4, 2, loss=2.5))
    found = disagreements(read_history(written(tmp_path, *fourth)))
    assert len(found) == 1 and "attempt 1 and 2.5" in found[0]
    moved = (*TWO[:4], begin(2, 2, digest="z", data="B", accepted=["data"]), step(2, 3, loss=0.5, digest="z3"))
    assert disagreements(read_history(written(tmp_path, *moved))) == []


def test_the_line_to_expect_is_that_of_the_same_state(tmp_path: Path) -> None:
    forked = (
        *TWO[:4],
        begin(2, 1, numerics="cuda", accepted=["device"]),
        step(2, 2, digest="x2"),
        step(2, 3, digest="x3"),
    )
    history = read_history(written(tmp_path, *forked))
    assert [history.expected(3, before)["digest"] for before in ("d2", "x2", "?", None)] == ["d3", "x3", "x3", "x3"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ((b"not json", *TWO), "line 1 is not a line of metrics"),
        ((b"[1]", *TWO), "line 1 is not a line of metrics"),
        ((b'{"step": 3}', *TWO), "line 1 is not a line of metrics"),
        ((b'{"attempt": 1, "step": -3}', *TWO), "line 1 is not a line of metrics"),
        ((b"[" * 9999, *TWO), "line 1 is not a line of metrics"),
        ((*TWO, step(1, 9)), "line 9 is of attempt 1, behind one of attempt 2"),
        ((*TWO, step(2, 4)), "line 9 is step 4 of attempt 2, behind step 4"),
        ((*TWO, step(2, 3)), "line 9 is step 3 of attempt 2, behind step 4"),
    ],
)
def test_lines_that_no_run_writes_are_faults(tmp_path: Path, lines: tuple[Any, ...], fault: str) -> None:
    assert read_history(written(tmp_path, *lines)).faults == [fault]


def test_lost_lines_are_told(tmp_path: Path) -> None:
    history = read_history(written(tmp_path, begin(1, 0), step(1, 1), step(1, 3), step(1, 7), step(2, 8)))
    assert history.faults == []
    assert history.gaps == [
        "attempt 1 has no line of step 2", "attempt 1 has no line of steps 4 to 6", "attempt 2 lacks its first line",
    ]  # fmt: skip
    torn = tmp_path / "metrics.jsonl"
    torn.write_bytes(torn.read_bytes()[:-20])
    assert "its last line is not whole" in read_history(torn).gaps[0]


VALUE = st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
KEYS = (
    "attempt",
    "step",
    "loss",
    "digest",
    "begins_after",
    "position",
    "numerics",
    "data",
    "accepted",
    "validation_loss",
)
LINES = st.lists(
    st.dictionaries(st.sampled_from(KEYS), VALUE | st.integers(0, 3)).map(lambda line: json.dumps(line).encode())
    | st.binary(max_size=20),
    max_size=8,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@settings(max_examples=100, deadline=None)
@given(LINES)
def test_no_line_breaks_the_reader(folder: Path, lines: list[bytes]) -> None:
    path = folder / "metrics.jsonl"
    path.write_bytes(b"\n".join(lines))
    history = read_history(path)
    disagreements(history)
    for step in history.steps():
        assert history.expected(step) is not None
    path.unlink()
