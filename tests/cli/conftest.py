"""What the command line's tests share: one dataset and one preset."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import PRESET, make_dataset


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands are the same on every device; the CPU is there everywhere."""
    monkeypatch.setenv("PTXTRAIN_DEVICE", "cpu")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("dataset"))


@pytest.fixture(scope="session")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("preset") / "small.toml"
    path.write_text(PRESET)
    return path
