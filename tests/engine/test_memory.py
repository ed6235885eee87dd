"""How much memory there is to take, from the files in which Linux says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ptxtrain.engine import memory
from ptxtrain.engine.errors import PtxtrainError

MEMINFO = "MemTotal:       16000000 kB\nMemFree:  100 kB\nMemAvailable:    2000 kB\n"


def _files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("share", "free"),
    [
        ({}, 2000 << 10),
        ({"memory.max": "max\n", "memory.current": "5\n", "memory.stat": ""}, 2000 << 10),
        (
            {"memory.max": "1000000", "memory.current": "600000", "memory.stat": "anon 3\ninactive_file 50000\n"},
            450_000,
        ),
        ({"memory.max": "1000000", "memory.current": "1200000", "memory.stat": ""}, 0),
        (
            {
                "memory/memory.limit_in_bytes": "900000",
                "memory/memory.usage_in_bytes": "100000",
                "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 1000\n",
            },
            801_000,
        ),
    ],
)
def test_the_lesser_of_the_machines_memory_and_the_containers_share_counts(
    share: dict[str, str], free: int, tmp_path: Path
) -> None:
    proc = _files(tmp_path / "proc", {"meminfo": MEMINFO})
    assert memory.host_free(proc, _files(tmp_path / "cgroup", share)) == free


def test_where_nothing_tells_it_is_unknown(tmp_path: Path) -> None:
    assert memory.host_free(tmp_path, tmp_path) is None


@pytest.mark.parametrize(
    ("text", "size"), [("", None), ("512M", 512 << 20), ("6g", 6 << 30), ("1.5 GiB", 3 << 29), ("7", 7), ("2kB", 2048)]
)
def test_the_users_cap_takes_units(text: str, size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTXTRAIN_MEMORY_LIMIT", text)
    assert memory.limit() == size


@pytest.mark.parametrize("text", ["lots", "-1", "5 apples", "nan"])
def test_a_cap_that_is_no_size_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTXTRAIN_MEMORY_LIMIT", text)
    with pytest.raises(PtxtrainError, match="PTXTRAIN_MEMORY_LIMIT"):
        memory.limit()
