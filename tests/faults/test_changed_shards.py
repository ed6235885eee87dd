"""Shards that are not what the run was made with: refused at a resume, and found before use in the midst of a run."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from figures import SHARDS, Figures, some
from inject import change_file
from lab import Lab, faults, saved, write_manifest

from ptxtrain.data import shards
from ptxtrain.data.shards import HEADER_BYTES, Dataset

SECOND = "train-000001.tok"
# How a shard is changed, and at which byte: in the header, in the tokens, in the table of digests.
EDITS = [
    ("flipped", 9),
    ("flipped", 30),
    ("flipped", HEADER_BYTES + 300),
    ("flipped", -1),
    ("truncated", HEADER_BYTES),
    ("truncated", -1),
    ("truncated", -33),
    ("emptied", 0),
    ("grown", 0),
    ("replaced", HEADER_BYTES + 300),
    ("removed", 0),
]
SOME = some(EDITS, 2)


@pytest.fixture
def data(lab: Lab) -> Path:
    """A dataset of the test's own."""
    lab.dataset = Path(shutil.copytree(lab.dataset, lab.folder / "data"))
    return lab.dataset


def restore(data: Path, good: Path) -> None:
    shutil.rmtree(data)
    shutil.copytree(good, data)


@pytest.mark.parametrize("edit", SOME, ids=str)
def test_changed_between_runs(lab: Lab, bench: Lab, data: Path, figures: Figures, edit: tuple[str, int]) -> None:
    """Resume stops before a token of it is trained on, names the file, and carries on once the data is back."""
    run = lab.fresh()
    stopped = lab.train(run, inject=faults(signal_at_step={"step": 4, "number": 15}))
    assert stopped.code == 2, stopped.err
    change_file(data / SECOND, *edit)
    done = lab.resume(run)
    assert done.code == 1 and SECOND in done.line, done.err
    # What header and table cannot show, the block's digest does, when its first token is about to be used.
    last = max(saved(stopped.err + done.err))
    assert lab.check_states(run)[-1] == last
    restore(data, bench.dataset)
    lab.survives(run, stopped.err + done.err)
    figures.add(SHARDS, 1)


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "not yet mapped"])
@pytest.mark.parametrize("edit", SOME, ids=str)
def test_changed_during_a_run(
    lab: Lab, bench: Lab, data: Path, figures: Figures, edit: tuple[str, int], mapped: bool
) -> None:
    """Between two reads: the run stops before it uses a changed token, names the file, and saves its last good step."""
    run, path = lab.fresh(), data / (SECOND if mapped else "train-000003.tok")
    how = {"nth": 5 if mapped else 2, "path": str(path), "edit": edit[0], "at": edit[1]}
    done = lab.train(run, inject=faults(edit_at_read=how))
    if mapped and edit[0] in ("replaced", "removed"):  # the map is of the file that was there
        assert (done.code, done.digest) == (0, lab.reference.digest), done.err
    else:
        assert done.code == 1 and str(path) in done.line, done.err
        assert "is the newest saved; go on with" in done.line
        assert lab.check_states(run)[-1] == max(saved(done.err))
    restore(data, bench.dataset)
    lab.survives(run, done.err)
    figures.add(SHARDS, 1)


@pytest.mark.parametrize("edit", some([("flipped", HEADER_BYTES + 3), ("truncated", -1), ("removed", 0)], 1), ids=str)
def test_a_changed_validation_shard(lab: Lab, bench: Lab, data: Path, figures: Figures, edit: tuple[str, int]) -> None:
    """Its loss would be that of another text."""
    run = lab.fresh()
    stopped = lab.train(run, inject=faults(signal_at_step={"step": 4, "number": 15}))
    change_file(data / "val-000000.tok", *edit)
    done = lab.resume(run)
    assert done.code == 1 and "val-000000.tok" in done.line, done.err
    restore(data, bench.dataset)
    lab.survives(run, stopped.err)
    figures.add(SHARDS, 1)


def reordered(data: Path) -> None:
    """Two shards change places, and the manifest says so: a sound dataset, but another."""
    first, second, spare = data / "train-000000.tok", data / SECOND, data / "spare"
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    write_manifest(data)


def one_token(data: Path) -> None:
    """Another token somewhere, with digests that agree."""
    shard = shards.TokShard(data / "train-000003.tok")
    tokens = shard.read(0, shard.count).copy()
    tokens[200] ^= 1
    rewrite(data / "train-000003.tok", shard, tokens)
    write_manifest(data)


def rewrite(path: Path, like: shards.TokShard, tokens: np.ndarray, vocab_size: int | None = None) -> None:
    kind = {"end_of_text": like.end_of_text, "tokenizer_digest": bytes.fromhex(like.tokenizer_digest)}
    like.close()
    path.unlink()
    shards.write_shard(path, tokens, vocab_size=vocab_size or like.vocab_size, **kind)


def fewer(data: Path) -> None:
    """The last shard is gone, and the manifest says so."""
    (data / "train-000003.tok").unlink()
    write_manifest(data)


@pytest.mark.parametrize("change", some([reordered, one_token, fewer], 1))
def test_another_sound_dataset_is_refused(
    lab: Lab, bench: Lab, data: Path, figures: Figures, change: Callable[[Path], None]
) -> None:
    """The digests agree with the manifest, but not with what the run was made with: refused unless told to accept it."""
    run = lab.fresh()
    stopped = lab.train(run, inject=faults(signal_at_step={"step": 4, "number": 15}))
    change(data)
    done = lab.resume(run)
    assert done.code == 1 and "--accept-data" in done.line, done.err
    copy = Path(shutil.copytree(run, lab.fresh()))
    accepted = lab.resume(copy, "--accept-data")
    assert accepted.code == 0 and "accepted: " in accepted.err, accepted.err
    restore(data, bench.dataset)
    lab.survives(run, stopped.err)
    figures.add(SHARDS, 1)


def test_a_bad_token_is_named_before_it_is_used(lab: Lab, data: Path, figures: Figures) -> None:
    """An id that is not below the vocabulary, with digests that agree: file and token are named, the step before is saved."""
    path = data / "train-000003.tok"
    shard = shards.TokShard(path)
    tokens = shard.read(0, shard.count).copy()
    tokens[100] = shard.vocab_size
    rewrite(path, shard, tokens, vocab_size=shard.vocab_size + 1)
    patched = bytearray(path.read_bytes())
    patched[16:20] = (shard.vocab_size).to_bytes(
        4, "little"
    )  # a header that says what the writer would not have written
    reseal(patched)
    path.write_bytes(patched)
    write_manifest(data)
    run = lab.fresh()
    done = lab.train(run)
    assert done.code == 1 and f"{path}: token 100 (byte {HEADER_BYTES + 200}) is id 300" in done.line, done.err
    assert "is the newest saved" in done.line and lab.check_states(run)[-1] == max(saved(done.err))
    figures.add(SHARDS, 1)


def reseal(data: bytearray) -> None:
    """Make a shard's header digest agree with its fields and table."""
    table = bytes(data[-32:])
    data[96:128] = hashlib.sha256(bytes(data[:96]) + table).digest()


@pytest.mark.parametrize("size", some([0, 1, 127, 128, HEADER_BYTES + 7], 2))
def test_a_file_that_is_no_shard(lab: Lab, data: Path, figures: Figures, size: int) -> None:
    """Empty, shorter than a header, of an odd length: one line before a run is made."""
    path = data / "train-000000.tok"
    os.truncate(path, size)
    run = lab.fresh()
    done = lab.train(run)
    assert done.code == 1 and str(path) in done.line and not run.exists(), done.err
    figures.add(SHARDS, 1)


def test_a_shard_that_was_only_touched_is_the_same(lab: Lab, data: Path, figures: Figures) -> None:
    """Time stamps say nothing: of the past, of the future, moved during the run."""
    run = lab.fresh()
    stopped = lab.train(run, inject=faults(signal_at_step={"step": 4, "number": 15}))
    for number, path in enumerate(sorted(data.iterdir())):
        os.utime(path, (number * 1e9, number * 1e9))
    lab.survives(run, stopped.err)
    assert Dataset(data).train
    figures.add(SHARDS, 1)
