"""A small text that every run makes again, and a dataset made from it once."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from ptxtrain.data.build import build_dataset


def sentences(seed: int, count: int) -> str:
    """Lines of made-up words, enough of them different to learn a vocabulary of several hundred."""
    source = random.Random(seed)
    words = ["".join(source.choices("abcdefghijklmnoprstuvwz", k=source.randint(2, 9))) for _ in range(400)]
    return "".join(" ".join(source.choices(words, k=source.randint(3, 12))) + ".\n" for _ in range(count))


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty text files in three folders, 90 KB in all."""
    root = tmp_path_factory.mktemp("text")
    for index in range(40):
        folder = root / ("abc"[index % 3])
        folder.mkdir(exist_ok=True)
        (folder / f"{index:02d}.txt").write_text(f"Größe {index} — naïve 日本語 🙂\n" + sentences(index, 60))
    return root


@pytest.fixture(scope="session")
def _built(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> Path:
    out = tmp_path_factory.mktemp("built") / "set"
    build_dataset([str(text_folder)], out, vocab_size=600, shard_tokens=10_000, val_fraction=0.1)
    return out


@pytest.fixture
def dataset_path(tmp_path: Path, _built: Path) -> Path:
    """A copy of the dataset, for the test to do with as it likes: several training shards and one for validation."""
    return Path(shutil.copytree(_built, tmp_path / "set"))
