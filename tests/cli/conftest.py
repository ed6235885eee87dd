"""What the command line's tests share: one dataset, one preset, one run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from runs import PRESET, Done, make_dataset, ptxtrain

from ptxtrain.engine.device import choice


@pytest.fixture(autouse=True, scope="session")
def on_the_cpu() -> Iterator[None]:
    """The commands are the same on every device, and the CPU is there everywhere. Commands in this process share one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PTXTRAIN_DEVICE", "cpu")
        patch.setattr(choice, "_cpu", cache(choice._cpu))
        yield


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("dataset"))


@pytest.fixture(scope="session")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("preset") / "small.toml"
    path.write_text(PRESET)
    return path


@pytest.fixture(scope="session")
def finished(preset: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A run that nothing disturbed."""
    run = tmp_path_factory.mktemp("finished") / "run"
    done = ptxtrain("train", "--preset", preset, "--data", dataset, "--run", run)
    assert done.code == 0, done.err
    return run, done


@pytest.fixture
def copy(finished: tuple[Path, Done], tmp_path: Path) -> Path:
    """The undisturbed run, to be damaged."""
    return Path(shutil.copytree(finished[0], tmp_path / "copy"))
