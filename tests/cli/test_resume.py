"""What `resume` takes, and what it refuses before it touches anything: another step, other data, kernels or device."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from pathlib import Path

import pytest
from runs import Done, metrics, ptxtrain

from ptxtrain.data.tokenizer import load_tokenizer
from ptxtrain.engine import numerics, preflight
from ptxtrain.engine.identity import join_numerics, split_numerics
from ptxtrain.engine.rundir import read_info
from ptxtrain.engine.step import TrainStep


@pytest.fixture(scope="module")
def other(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other text, by the same tokenizer."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "text.py").write_text("print('another text')\n" * 2000 + (Path(json.__file__)).read_text())
    done = ptxtrain("tokenize", folder / "text.py", "--out", folder / "o", "--tokenizer", dataset / "tokenizer.json")
    assert done.code == 0, done.err
    return folder / "o"


@pytest.fixture(scope="module")
def retokenised(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other text, by a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("retokenised")
    done = ptxtrain("tokenize", Path(json.__file__).parent, "--out", folder / "o", "--vocab-size", 300)
    assert done.code == 0, done.err
    return folder / "o"


def _tree(path: Path) -> dict[str, bytes | None]:
    """Everything in a run but the lock's text."""
    files = {p for p in path.rglob("*") if p.name != "run.lock"}
    return {str(p): p.read_bytes() if p.is_file() else None for p in files}


def test_a_step_is_picked_and_later_ones_are_set_aside(copy: Path, finished: tuple[Path, Done]) -> None:
    before = _tree(copy)
    assert "has no checkpoint of step 7; it has 5, 10, 12" in ptxtrain("resume", copy, "--step", 7).line
    assert _tree(copy) == before
    done = ptxtrain("resume", copy, "--step", 5)
    assert (done.code, done.digest) == (0, finished[1].digest), done.err
    assert "resuming" in done.err and "behind step 5" in done.err
    assert "set step-00000010 aside" in done.err and "set step-00000012 aside" in done.err
    lines = [line for line in metrics(copy) if line["attempt"] == 2]
    assert lines[0]["begins_after"] == 5 and lines[0]["accepted"] == []
    assert [line["step"] for line in lines if "loss" in line] == list(range(6, 13))
    first = {line["step"]: (line["loss"], line["digest"]) for line in metrics(finished[0]) if "loss" in line}
    assert all(first[line["step"]] == (line["loss"], line["digest"]) for line in lines if "loss" in line)


def test_step_0_needs_no_checkpoint(copy: Path, finished: tuple[Path, Done]) -> None:
    done = ptxtrain("resume", copy, "--step", 0)
    assert (done.code, done.digest) == (0, finished[1].digest), done.err
    assert f"{copy} starts again from step 0" in done.err and "set step-00000005 aside" in done.err
    assert ptxtrain("verify", copy).code == 0


def test_leftovers_are_cleared_of_a_finished_run_too(copy: Path) -> None:
    for name in (".gone-00000003-4", ".tmp-00000012-1", "mine"):
        (copy / "ckpt" / name).mkdir()
    assert "has finished its 12 steps" in ptxtrain("resume", copy).err
    assert sorted(path.name for path in (copy / "ckpt").iterdir() if not path.name.startswith("step-")) == ["mine"]


def _other(which: str, real: str) -> str:
    device, kernels = split_numerics(real)
    return join_numerics("cuda of another kind", kernels) if which == "device" else join_numerics(device, "0" * 16)


@pytest.mark.parametrize("which", ["kernels", "device"])
def test_other_numerics_are_named_and_refused_unless_accepted(
    which: str, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal comes before anything is set aside; what was accepted once is not asked for again."""
    real = read_info(copy).numerics_id
    os.truncate(copy / "ckpt/step-00000012/optim.safetensors", 100)
    before = _tree(copy)
    monkeypatch.setattr(numerics, "numerics_id", lambda device: _other(which, real))
    refused = ptxtrain("resume", copy, "--steps", 13)
    assert refused.code == 1 and f"its {which} w" in refused.line and f"--accept-{which}" in refused.line
    assert refused.line.count("--accept") == 1
    wrong = {"kernels": "--accept-device", "device": "--accept-kernels"}[which]
    assert ptxtrain("resume", copy, "--steps", 13, wrong).code == 1
    assert _tree(copy) == before, "a refusal changes nothing"
    assert ptxtrain("resume", copy, "--steps", 13, f"--accept-{which}").code == 0
    assert [line["accepted"] for line in metrics(copy) if "accepted" in line] == [[], [which]]
    assert ptxtrain("resume", copy, "--steps", 14).code == 0, "the checkpoint knows what it was made with"
    monkeypatch.undo()
    assert ptxtrain("resume", copy, "--steps", 15).code == 1, "and what it was not made with"


def test_other_data_are_named_and_refused_unless_accepted(copy: Path, other: Path, dataset: Path) -> None:
    refused = ptxtrain("resume", copy, "--steps", 14, "--data", other)
    assert refused.code == 1 and f"{other} is not the data that it was trained on (train-000000.tok" in refused.line
    assert "--accept-data" in refused.line and "--accept-tokenizer" not in refused.line
    done = ptxtrain("resume", copy, "--steps", 14, "--data", other, "--accept-data")
    assert done.code == 0, done.err
    assert f"going on at {other}/train-000000.tok, token 0" in done.err, "its first shard is another: from the start"
    assert ptxtrain("resume", copy, "--steps", 15, "--data", other).code == 0
    back = ptxtrain("resume", copy, "--steps", 16, "--data", dataset)
    assert back.code == 1 and "--accept-data" in back.line, "the place counts in the other data now"


def test_another_tokenizer_is_named_beside_the_data(copy: Path, retokenised: Path) -> None:
    refused = ptxtrain("resume", copy, "--steps", 14, "--data", retokenised)
    assert refused.code == 1 and "its tokenizer is not that of" in refused.line
    assert "--accept-data --accept-tokenizer" in refused.line
    assert ptxtrain("resume", copy, "--steps", 14, "--data", retokenised, "--accept-data").code == 1
    accepted = ["--accept-data", "--accept-tokenizer"]
    assert ptxtrain("resume", copy, "--steps", 14, "--data", retokenised, *accepted).code == 0
    assert ptxtrain("resume", copy, "--steps", 15, "--data", retokenised).code == 0, (
        "the checkpoint says what it was made with"
    )
    shown = ptxtrain("inspect-batch", copy, "--step", 15, "--data", retokenised, "--json")
    sequence = json.loads(shown.out)["sequences"][0]
    tokenizer = load_tokenizer(retokenised / "tokenizer.json")
    assert sequence["text"] == tokenizer.decode(sequence["tokens"]), (
        "the text of the data is read by their own tokenizer"
    )


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_a_damaged_tokenizer_of_the_run_is_taken_from_its_data_again(
    copy: Path, retokenised: Path, damage: str
) -> None:
    """Only the very one that the run was made with; and nothing is touched before."""
    place = copy / "tokenizer.json"
    before = place.read_bytes()
    place.write_bytes(before + b" ") if damage == "changed" else place.unlink()
    tree = _tree(copy)
    accepted = ["--accept-data", "--accept-tokenizer"]
    refused = ptxtrain("resume", copy, "--steps", 14, "--data", retokenised, *accepted, "--step", 5)
    assert refused.code == 1 and "Copy tokenizer.json from the run's dataset" in refused.line
    assert _tree(copy) == tree
    done = ptxtrain("resume", copy, "--steps", 14)
    assert done.code == 0 and "tokenizer.json was missing or damaged; copied again from" in done.err
    assert place.read_bytes() == before


def test_the_command_to_go_on_is_one_that_a_shell_takes(
    preset: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on to the same step with the same data, from a path with a space and a quote in it."""
    moved, path = tmp_path / "da ta", tmp_path / "it's a run"
    first = ptxtrain(
        "train", "--preset", preset, "--data", shutil.copytree(dataset, moved), "--run", path, "--steps", 2
    )
    assert first.code == 0, first.err
    moved.rename(moved := tmp_path / "elsewhere to")
    finish = TrainStep.finish

    def at_step_4(self: TrainStep, step: int, lr: float) -> object:
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return finish(self, step, lr)

    monkeypatch.setattr(TrainStep, "finish", at_step_4)
    stopped = ptxtrain("resume", path, "--steps", 6, "--data", moved)
    monkeypatch.undo()
    assert stopped.code == 2, stopped.err
    words = shlex.split(stopped.err.rpartition("Go on with: ")[2])
    assert words == ["ptxtrain", "resume", str(path), "--steps", "6", "--data", str(moved)]
    done = ptxtrain(*words[1:])
    assert done.code == 0 and "step 6 of 6" in done.out


def test_a_resume_that_cannot_begin_leaves_a_run_without_checkpoints_as_it_was(
    copy: Path, finished: tuple[Path, Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`train` takes a run away again that it could not begin. One that was killed before its first save has a history."""
    for step in (copy / "ckpt").iterdir():
        shutil.rmtree(step)
    lines = metrics(copy)
    with monkeypatch.context() as patch:
        patch.setattr(preflight, "missing", lambda config, device: "there is none")
        assert "not enough memory" in ptxtrain("resume", copy).line
    assert metrics(copy)[: len(lines)] == lines
    done = ptxtrain("resume", copy)
    assert "starts again from step 0" in done.err and done.digest == finished[1].digest


def test_how_many_checkpoints_stay_is_an_option(preset: Path, dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = ["--preset", preset, "--data", dataset, "--run", run, "--save-every", "1", "--set", "train.validate_every=0"]
    assert ptxtrain("train", *argv, "--keep", 2, "--keep-every", 4).code == 0
    steps = sorted(int(path.name[5:]) for path in (run / "ckpt").iterdir())
    assert steps[-4:] == [4, 8, 11, 12] and len(steps) == 4
    assert ptxtrain("resume", run, "--steps", 14, "--keep", 4, "--keep-every", 0).code == 0
    assert sorted(int(path.name[5:]) for path in (run / "ckpt").iterdir()) == [11, 12, 13, 14]
    assert "keep" in ptxtrain("train", *argv, "--keep", 1).line
