"""What the command line's tests share: one dataset and one preset."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from runs import PRESET, make_dataset

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
