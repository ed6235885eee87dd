"""Building a dataset: all the text, in the right split, the same every time, whole or not at all."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxtrain.data import build, corpora, files
from ptxtrain.data.build import build_dataset, ensure_sample_dataset, sample_dataset_path
from ptxtrain.data.errors import DataError
from ptxtrain.data.shards import Dataset
from ptxtrain.data.tokenizer import load_tokenizer


def documents(dataset: Dataset, split: str) -> list[str]:
    """The split's documents, decoded again."""
    tokenizer = load_tokenizer(dataset.tokenizer_path, dataset.tokenizer_digest)
    ids = np.concatenate([shard.tokens for shard in (dataset.train if split == "train" else dataset.val)])
    assert ids[-1] == dataset.end_of_text
    ends = np.flatnonzero(ids == dataset.end_of_text)
    return [tokenizer.decode(part[part != dataset.end_of_text]) for part in np.split(ids, ends[:-1] + 1)]


def leftovers(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_every_document_is_in_one_split_and_reads_as_it_was(text_folder: Path, dataset_path: Path) -> None:
    dataset = Dataset(dataset_path)
    dataset.verify()
    train, val = documents(dataset, "train"), documents(dataset, "val")
    texts = [path.read_text() for path in text_folder.rglob("*.txt")]
    whole = "".join(sorted(texts))
    # Documents are longer than a fiftieth of the text, hence cut: compare all lines instead of documents.
    assert sorted("".join(train + val).splitlines()) == sorted(whole.splitlines())
    assert 0.02 < dataset.val_tokens / (dataset.train_tokens + dataset.val_tokens) < 0.25
    assert dataset.manifest.documents == 40
    assert dataset.manifest.text_bytes == sum(len(text.encode()) for text in texts)


def test_whole_documents_and_copies_of_them_stay_on_one_side(tmp_path: Path) -> None:
    path = tmp_path / "stories.txt"
    stories = [f"story {index} of {index * 7919 % 1000} words" for index in range(300)]
    path.write_text("\n<|endoftext|>\n".join(stories + stories))
    dataset = build_dataset([str(path)], tmp_path / "out", vocab_size=300, val_fraction=0.1)
    train, val = documents(dataset, "train"), documents(dataset, "val")
    assert sorted(text.strip() for text in train + val) == sorted(stories + stories)
    assert not set(map(str.strip, train)) & set(map(str.strip, val))
    assert 15 < len(val) / 2 < 50
    # Spread over the file, not its head or tail.
    places = sorted(stories.index(text.strip()) for text in val)
    assert places[0] < 75 and places[-1] > 225


@pytest.mark.parametrize("fraction", [0.0001, 0.5])
@pytest.mark.parametrize("text", ["ab cd\n" * 12, "same\n" * 400, "".join(f"{n} " for n in range(200))])
def test_neither_split_is_ever_empty(tmp_path: Path, text: str, fraction: float) -> None:
    path = tmp_path / "a.txt"
    path.write_text(text)
    dataset = build_dataset([str(path)], tmp_path / "out", vocab_size=257, val_fraction=fraction)
    assert dataset.train_tokens > 1 and dataset.val_tokens > 1
    ends = sum(int((shard.tokens == 0).sum()) for shard in dataset.train + dataset.val)
    assert dataset.train_tokens + dataset.val_tokens == len(text) + ends


def test_the_threshold_leaves_one_on_each_side() -> None:
    for fraction, least, greatest in [(0.5, 1, 5), (0.001, 2**63, 2**63 + 1), (0.5, 2**63 - 1, 2**64 - 1)]:
        split = build._Split(fraction, least=least, greatest=greatest)
        assert [split.choose(0, least), split.choose(1, greatest)] == ["val", "train"]


def test_the_same_text_gives_the_same_bytes_wherever_it_lies(
    tmp_path: Path, text_folder: Path, dataset_path: Path
) -> None:
    moved = Path(shutil.copytree(text_folder, tmp_path / "elsewhere"))
    again = build_dataset([str(moved)], tmp_path / "again", vocab_size=600, shard_tokens=10_000, val_fraction=0.1)
    assert again.identity() == Dataset(dataset_path).identity()
    for shard in again.train + again.val:
        assert shard.path.read_bytes() == (dataset_path / shard.path.name).read_bytes()


def test_batches_do_not_show(
    tmp_path: Path, text_folder: Path, dataset_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "BATCH_CHARACTERS", 1)
    again = build_dataset([str(text_folder)], tmp_path / "b", vocab_size=600, shard_tokens=10_000, val_fraction=0.1)
    assert again.identity() == Dataset(dataset_path).identity()


def test_files_are_mixed(tmp_path: Path) -> None:
    """The loader reads in order: what lies together in folders must not come together."""
    for index in range(40):
        (tmp_path / "in" / "ab"[index // 20]).mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / "ab"[index // 20] / f"{index:02d}").write_text(f"{index} {'ab'[index // 20]}" * 9)
    dataset = build_dataset([str(tmp_path / "in")], tmp_path / "out", vocab_size=257)
    order = "".join("b" if "b" in text else "a" for text in documents(dataset, "train"))
    assert order.count("ab") + order.count("ba") > 5


def test_a_given_tokenizer_is_used(tmp_path: Path, text_folder: Path, dataset_path: Path) -> None:
    given = dataset_path / "tokenizer.json"
    dataset = build_dataset([str(text_folder)], tmp_path / "out", tokenizer=given)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == given.read_bytes()
    assert dataset.vocab_size == 600


def test_the_vocabulary_is_learned_on_a_sample_of_a_large_text(
    tmp_path: Path, text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = 0
    learn = build.train_tokenizer

    def counted(texts: Any, size: int) -> Any:
        def count() -> Any:
            nonlocal seen
            for text in texts:
                seen += len(text)
                yield text

        return learn(count(), size)

    monkeypatch.setattr(build, "train_tokenizer", counted)
    monkeypatch.setattr(build, "SAMPLE_BYTES", 40_000)
    dataset = build_dataset([str(text_folder)], tmp_path / "out", vocab_size=300)
    assert 15_000 < seen < 65_000
    assert dataset.manifest.text_bytes > 80_000


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"vocab_size": 5}, "a vocabulary of 5 is not possible"),
        ({"vocab_size": 100_000}, "vocabulary of only"),
        ({"vocab_size": 300, "tokenizer": "x"}, "exclude each other"),
        ({"tokenizer": "absent.json"}, r"cannot read absent\.json: No such file"),
        ({"val_fraction": 0.0}, "validation fraction 0 "),
        ({"val_fraction": 0.51}, "validation fraction 0.51 "),
        ({"val_fraction": float("nan")}, "validation fraction nan "),
        ({"shard_tokens": 0}, "0 tokens a shard"),
        ({"shard_tokens": 1 << 40}, "tokens a shard"),
    ],
)
def test_bad_arguments_are_one_line_and_leave_nothing(
    tmp_path: Path, text_folder: Path, arguments: dict[str, Any], what: str
) -> None:
    with pytest.raises(DataError, match=what) as error:
        build_dataset([str(text_folder)], tmp_path / "deep" / "er" / "out", **arguments)
    assert "\n" not in str(error.value)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("text", ["x", "a few", "<|endoftext|>"])
def test_too_little_text_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(DataError, match="too little text"):
        build_dataset([str(tmp_path / "a.txt")], tmp_path / "out", vocab_size=257)
    assert leftovers(tmp_path) == ["a.txt"]


def test_what_is_there_is_never_touched(tmp_path: Path, text_folder: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match="exists and is not empty; choose another name or remove it"):
        build_dataset([str(text_folder)], tmp_path / "out", vocab_size=300)
    with pytest.raises(DataError, match="is not a folder"):
        build_dataset([str(text_folder)], tmp_path / "file", vocab_size=300)
    with pytest.raises(DataError, match="is not a folder"):
        build_dataset([str(text_folder)], tmp_path / "link", vocab_size=300)
    assert leftovers(tmp_path) == ["file", "link", "out"] and leftovers(tmp_path / "out") == ["mine.txt"]


def test_an_empty_folder_and_a_link_to_one_become_the_dataset(tmp_path: Path, text_folder: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    dataset = build_dataset([str(text_folder)], tmp_path / "link", vocab_size=300)
    dataset.verify()
    assert (tmp_path / "link").is_symlink() and leftovers(tmp_path) == ["link", "real"]


class Interrupted(BaseException):
    """As a signal handler would raise."""


def test_an_interruption_at_any_step_leaves_nothing(
    tmp_path: Path, text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(at: int) -> int:
        """Raise at the call number `at` of the functions below; how many calls there were."""
        calls = 0

        def counting(inner: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*arguments: Any, **named: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == at:
                    raise Interrupted
                return inner(*arguments, **named)

            return wrapper

        with monkeypatch.context() as patch:
            patch.setattr(build, "write_file", counting(build.write_file))
            patch.setattr(build.ShardWriter, "append", counting(build.ShardWriter.append))
            patch.setattr(build.ShardWriter, "finish", counting(build.ShardWriter.finish))
            patch.setattr(corpora, "_kind", counting(corpora._kind))
            patch.setattr(files, "sync_directory", counting(files.sync_directory))
            build_dataset(
                [str(text_folder / "a")], tmp_path / "new" / "out", vocab_size=300, progress=counting(lambda *_: None)
            )
        return calls

    total = run(-1)
    shutil.rmtree(tmp_path / "new")
    # The last two syncs are the directory's, before the rename, and its parent's, after it.
    for at in [*range(1, total, 7), total - 4, total - 3, total - 2, total - 1]:
        with pytest.raises(Interrupted):
            run(at)
        assert leftovers(tmp_path) == [], at
    with pytest.raises(Interrupted):
        run(total)
    Dataset(tmp_path / "new" / "out").verify()


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(
    tmp_path: Path, text_folder: Path
) -> None:
    (tmp_path / ".out.tmp-00000000").mkdir()
    (tmp_path / ".out.tmp-00000000" / "train-000000.tok").touch()
    (tmp_path / ".other.tmp-00000000").mkdir()
    (tmp_path / ".out.tmp-file").touch()
    with files.new_directory(tmp_path / "out", "the dataset") as living:
        (living / "x").touch()
        with contextlib.suppress(Interrupted), files.new_directory(tmp_path / "out", "the dataset") as second:
            assert living.exists() and second != living
            raise Interrupted
        assert (living / "x").exists()
    assert leftovers(tmp_path) == [".other.tmp-00000000", ".out.tmp-file", "out"]


def test_text_that_changes_between_the_passes_is_refused(
    tmp_path: Path, text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(shutil.copytree(text_folder, tmp_path / "in"))
    learn = build.train_tokenizer

    def learn_and_change(texts: Any, size: int) -> Any:
        made = learn(texts, size)
        path = source / "a" / "00.txt"
        path.write_bytes(b"x" * path.stat().st_size)  # the same size, and text
        return made

    monkeypatch.setattr(build, "train_tokenizer", learn_and_change)
    with pytest.raises(DataError, match=r"the text changed while it was being tokenized; run again"):
        build_dataset([str(source)], tmp_path / "out", vocab_size=300)
    assert leftovers(tmp_path) == ["in"]


def _ensure(root: Path, path: Path, barrier: Any, results: Any) -> None:
    corpora._stdlib_root = lambda: root
    barrier.wait()
    results.put(ensure_sample_dataset(300, path).identity())


@pytest.fixture
def small_stdlib(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> Path:
    root = tmp_path_factory.mktemp("stdlib")
    for path in text_folder.rglob("*.txt"):
        shutil.copy(path, root / f"{path.stem}.py")
    return root


def test_two_processes_make_one_sample_dataset(tmp_path: Path, small_stdlib: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    arguments = (small_stdlib, tmp_path / "s", barrier, results)
    workers = [context.Process(target=_ensure, args=arguments) for _ in range(2)]
    for worker in workers:
        worker.start()
    first, second = results.get(timeout=100), results.get(timeout=100)
    for worker in workers:
        worker.join(100)
        assert worker.exitcode == 0
    assert first == second == Dataset(tmp_path / "s").identity()
    assert leftovers(tmp_path) == ["s"]


def test_the_sample_dataset_is_made_once_and_checked(
    tmp_path: Path, small_stdlib: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpora, "_stdlib_root", lambda: small_stdlib)
    made = ensure_sample_dataset(300)
    assert made.directory == sample_dataset_path(300) == Path("datasets/stdlib-v300")
    monkeypatch.setattr(build, "build_dataset", None)  # not called again
    assert ensure_sample_dataset(300).identity() == made.identity()
    with pytest.raises(DataError, match="has a vocabulary of 300, not 301; remove it"):
        ensure_sample_dataset(301, made.directory)
    os.truncate(made.directory / "manifest.json", 50)
    with pytest.raises(DataError, match="manifest"):
        ensure_sample_dataset(300)
