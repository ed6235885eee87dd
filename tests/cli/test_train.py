"""`train`, `resume` and `sample` on the real kernels: the same bits however a run is cut up, and what bad input says."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from runs import VOCAB, Done, make_dataset, metrics, process, ptxtrain

from ptxtrain.engine.durable import DISK, Call

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals are sent with kill")


@pytest.fixture(scope="session")
def longer(preset: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[object], Path, Done]:
    """A run long enough to be hit by a signal: its arguments but --run, and how it went undisturbed."""
    argv: list[object] = ["train", "--preset", preset, "--data", dataset, "--steps", 120, "--save-every", "50"]
    run = tmp_path_factory.mktemp("longer") / "run"
    return argv, run, ptxtrain(*argv, "--run", run)


def _losses(run: Path) -> dict[float, float]:
    return {line["step"]: line["loss"] for line in metrics(run) if "loss" in line}


def test_a_run_learns_saves_validates_and_samples(finished: tuple[Path, Done]) -> None:
    run, done = finished
    losses = _losses(run)
    assert list(losses) == list(range(1, 13))
    assert losses[12] < losses[1]
    assert [line["step"] for line in metrics(run) if "validation_loss" in line] == [6, 12]
    assert {path.name for path in (run / "ckpt").iterdir()} == {f"step-{k:08d}" for k in (5, 10, 12)}
    for part in (
        "saved step 12",
        "step 6  sample:",
        "validation loss",
        "step 12/12",
        "tokens/s",
        "TFLOP/s",
        "device: ",
    ):
        assert part in done.err, part
    assert "step 12 of 12" in done.out and "sample:" in done.out
    assert done.digest


def test_half_the_micro_batch_and_one_thread_give_the_same_bits(
    finished: tuple[Path, Done], preset: Path, dataset: Path, tmp_path: Path
) -> None:
    for i, extra in enumerate((["--set", "batch.micro_batch=1"], ["--threads", "1"], ["--set", "batch.micro_batch=4"])):
        done = ptxtrain("train", "--preset", preset, "--data", dataset, "--run", tmp_path / str(i), *extra)
        assert (done.code, done.digest) == (0, finished[1].digest), extra
        assert _losses(tmp_path / str(i)) == _losses(finished[0])


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_stopped_by_signal_and_resumed_gives_the_same_bits(
    number: signal.Signals, longer: tuple[list[object], Path, Done], tmp_path: Path
) -> None:
    argv, undisturbed, whole = longer
    run = tmp_path / "run"
    with process(*argv, "--run", run) as child:
        child.until("step 1/120")
        child.send(number)
        stopped = child.wait()
    assert stopped.code == 2, stopped.err
    assert stopped.err.rstrip().endswith(f"Go on with: ptxtrain resume {run}")
    assert stopped.err.count("error") == 0
    assert stopped.digest != whole.digest
    resumed = ptxtrain("resume", run, "--set", "batch.micro_batch=4", "--threads", "1")
    assert (resumed.code, resumed.digest) == (0, whole.digest), resumed.err
    assert _losses(run) == _losses(undisturbed)
    assert {line["attempt"] for line in metrics(run)} == {1, 2}


@posix
def test_a_stop_while_kernels_are_made_ready_saves_step_0(
    preset: Path, dataset: Path, finished: tuple[Path, Done], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    cache = {"PTXTRAIN_CACHE": str(tmp_path / "cache")}  # empty: everything is compiled anew
    with process("train", "--preset", preset, "--data", dataset, "--run", run, **cache) as child:
        child.until("making the kernels ready")
        child.send()
        stopped = child.wait()
    assert stopped.code == 2, stopped.err
    assert "step 0 of 12" in stopped.out
    resumed = ptxtrain("resume", run)
    assert (resumed.code, resumed.digest) == (0, finished[1].digest)


@posix
def test_a_second_run_on_the_directory_exits_5_and_names_the_holder(
    preset: Path, dataset: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with process("train", "--preset", preset, "--data", dataset, "--run", run, "--steps", 100_000) as child:
        child.until("step 1/100000")
        second = ptxtrain("resume", run)
        child.send()
        assert child.wait().code == 2
    assert second.code == 5
    assert "is in use by process" in second.line


def test_a_finished_run_says_so_and_goes_further(copy: Path, finished: tuple[Path, Done]) -> None:
    again = ptxtrain("resume", copy)
    assert (again.code, again.digest) == (0, finished[1].digest)
    assert "has finished its 12 steps" in again.err
    further = ptxtrain("resume", copy, "--steps", 15)
    assert further.code == 0, further.err
    assert list(_losses(copy)) == list(range(1, 16))
    assert ptxtrain("resume", copy, "--steps", 14).code == 1


def test_a_killed_run_resumes_from_its_last_save(copy: Path, finished: tuple[Path, Done]) -> None:
    """As if killed at step 12 before its save was done: the newest checkpoint is step 10, something lies half-written."""
    shutil.move(copy / "ckpt/step-00000012", copy / "ckpt/.tmp-00000012-3")
    done = ptxtrain("resume", copy)
    assert (done.code, done.digest) == (0, finished[1].digest)
    assert not (copy / "ckpt/.tmp-00000012-3").exists()


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_used(copy: Path, finished: tuple[Path, Done]) -> None:
    model = copy / "ckpt/step-00000012/model.safetensors"
    data = bytearray(model.read_bytes())
    data[-5] ^= 1
    model.write_bytes(data)
    done = ptxtrain("resume", copy)
    assert (done.code, done.digest) == (0, finished[1].digest)
    assert "step-00000012 cannot be used" in done.err and "step-00000010" in done.err


def test_resume_takes_the_newest_run(
    copy: Path, finished: tuple[Path, Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no run under runs" in ptxtrain("resume").line
    (tmp_path / "runs").mkdir()
    copy.rename(tmp_path / "runs/mine")
    assert ptxtrain("resume").digest == finished[1].digest


def test_steps_go_on_while_a_save_is_being_written(
    preset: Path, dataset: Path, finished: tuple[Path, Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that answers the save of step 5 only once step 9 has been logged: if steps waited for it, that never came."""
    run, came = tmp_path / "run", []

    def hold(call: Call) -> None:
        if call.op == "write" and ".tmp-00000005" in str(call.path) and not came:
            end = time.monotonic() + 20
            while time.monotonic() < end and 9 not in _losses(run):
                time.sleep(0.01)
            came.append(9 in _losses(run))

    monkeypatch.setattr(DISK, "hook", hold)
    done = ptxtrain("train", "--preset", preset, "--data", dataset, "--run", run, "--set", "validate_every=0",
                    "--set", "sample_every=0", "--set", "keep=10")  # fmt: skip
    assert (done.code, done.digest) == (0, finished[1].digest)
    assert came == [True]
    assert {path.name for path in (run / "ckpt").iterdir()} == {f"step-{k:08d}" for k in (5, 10, 12)}


def test_a_run_without_a_name_gets_one(
    preset: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    done = ptxtrain("train", "--preset", preset, "--data", dataset, "--steps", 1)
    assert done.code == 0, done.err
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("small-")
    assert f"run runs/{run.name}" in done.out


def test_samples_are_repeatable_and_follow_the_prompt(finished: tuple[Path, Done]) -> None:
    run = finished[0]
    first = ptxtrain("sample", "--ckpt", run, "--prompt", "def ", "--tokens", 40, "--seed", 7)
    assert first.code == 0, first.err
    assert first.out.startswith("def ") and len(first.out) > 10
    assert first.out == ptxtrain("sample", "--ckpt", run, "--prompt", "def ", "--tokens", 40, "--seed", 7).out
    assert first.out != ptxtrain("sample", "--ckpt", run, "--prompt", "def ", "--tokens", 40, "--seed", 8).out
    other = ptxtrain("sample", "--ckpt", run / "ckpt/step-00000005", "--temperature", 0, "--tokens", 5)
    assert other.code == 0 and "step 5 of" in other.err


def test_without_data_the_sample_corpus_is_made_and_said(
    preset: Path, monkeypatch: pytest.MonkeyPatch, dataset: Path, tmp_path: Path
) -> None:
    """The corpus itself is tokenised in the data tests; here what is asked for and said."""
    from ptxtrain.data import build
    from ptxtrain.data.shards import Dataset

    asked: list[int] = []

    def ensure(vocab_size: int, **_: object) -> Dataset:
        asked.append(vocab_size)
        return Dataset(dataset)

    monkeypatch.setattr(build, "ensure_sample_dataset", ensure)
    gone = ["--set", f"data.path={tmp_path / 'gone'}"]
    for i, extra in enumerate(([], gone)):
        done = ptxtrain("train", "--preset", preset, "--run", tmp_path / str(i), "--steps", 1, *extra)
        assert done.code == 0, done.err
        assert sum("SAMPLE CORPUS @stdlib" in line for line in done.err.splitlines()) == 1
    assert asked == [VOCAB, VOCAB]
    own = ptxtrain(
        "train", "--preset", preset, "--run", tmp_path / "own", "--steps", 1, "--set", f"data.path={dataset}"
    )
    assert own.code == 0 and asked == [VOCAB, VOCAB] and "the preset's own dataset" in own.err
    config = json.loads((tmp_path / "own/run.json").read_text())["config"]
    assert config["data"]["path"] == str(dataset.resolve())


def test_a_moved_dataset_is_found_by_data(preset: Path, tmp_path: Path, finished: tuple[Path, Done]) -> None:
    made = make_dataset(tmp_path)
    run = tmp_path / "run"
    assert ptxtrain("train", "--preset", preset, "--data", made, "--run", run, "--steps", 2).code == 0
    made.rename(tmp_path / "moved")
    assert "say where it is now with --data" in ptxtrain("resume", run, "--steps", 3).line
    assert ptxtrain("resume", run, "--steps", 3, "--data", tmp_path / "moved").code == 0


BAD_TRAIN = {
    "unknown preset": (["--preset", "tniy"], "unknown preset 'tniy'"),
    "unknown key": (["--set", "optimizer.lrr=1"], "unknown key"),
    "value out of range": (["--set", "optimizer.lr=-1"], "optimizer.lr"),
    "unsupported head size": (["--set", "model.head_dim=7"], "unsupported head size"),
    "impossible batch split": (["--set", "batch.micro_batch=3"], "impossible batch split"),
    "missing data": (["--data", "nowhere"], "nowhere"),
    "wrong vocabulary": (["--set", "model.vocab_size=512"], "wrong vocabulary"),
    "context longer than the data": (["--set", "model.context=65536"], "holds a sequence"),
    "unknown device": (["--device", "tpu"], "tpu"),
}


@pytest.mark.parametrize("name", BAD_TRAIN)
def test_bad_input_to_train_is_one_line(name: str, preset: Path, dataset: Path, tmp_path: Path) -> None:
    extra, says = BAD_TRAIN[name]
    argv = ["--preset", preset, "--data", dataset, "--run", tmp_path / "run", *extra]
    done = ptxtrain("train", *argv)
    assert done.code == 1
    assert says in done.line, done.line
    assert done.out == ""
    assert not (tmp_path / "run").exists(), "nothing is left of a run that could not begin"


def test_bad_input_to_resume_and_sample_is_one_line(copy: Path, finished: tuple[Path, Done], tmp_path: Path) -> None:
    assert "result" in ptxtrain("resume", copy, "--steps", 20, "--set", "optimizer.lr=1").line
    assert "unknown key" in ptxtrain("resume", copy, "--set", "nope=1").line
    assert "does not exist" in ptxtrain("sample", "--ckpt", tmp_path / "nowhere").line
    assert "no run.json" in ptxtrain("resume", tmp_path).line
    assert "top-p" in ptxtrain("sample", "--ckpt", copy, "--top-p", 0).line
    assert ptxtrain("train", "--preset", "tiny", "--run", copy).line.startswith(f"error: {copy} already holds a run")


def test_an_unreadable_checkpoint_is_one_line(copy: Path) -> None:
    for step in (copy / "ckpt").iterdir():
        (step / "model.safetensors").write_bytes(b"\0" * 100)
    for argv in (["sample", "--ckpt", copy], ["sample", "--ckpt", copy / "ckpt/step-00000012"], ["resume", copy]):
        done = ptxtrain(*argv)
        assert done.code == 1 and "cannot be used" in done.line


def test_dry_run_refuses_what_the_run_would(preset: Path, dataset: Path, copy: Path, tmp_path: Path) -> None:
    dry = ("train", "--preset", preset, "--dry-run", "--no-measure")
    assert "already holds a run" in ptxtrain(*dry, "--run", copy).line
    assert "is not a dataset" in ptxtrain(*dry, "--data", tmp_path / "none").line
    assert "wrong vocabulary" in ptxtrain(*dry, "--data", dataset, "--set", "model.vocab_size=301").line
    done = ptxtrain(*dry, "--data", dataset, "--run", tmp_path / "new", "--json")
    assert done.code == 0 and json.loads(done.out)["config"]["data"]["path"] == str(dataset.resolve())
    assert not (tmp_path / "new").exists()


def test_dry_run_prints_what_a_run_needs(preset: Path, tmp_path: Path) -> None:
    dev = ptxtrain("train", "--preset", "dev", "--dry-run", "--no-measure")
    assert dev.code == 0
    kinds = [f"memory, {kind}" for kind in ("weights", "optimizer", "activations", "logits", "leaves", "total")]
    for part in ("22,025,088", "131,072 tokens", "7,630 steps", "139M FLOP", "1.2 GiB for 5", "lr = 0.001", *kinds):
        assert part in dev.out, part
    assert "a step's time" not in dev.out
    (tmp_path / "again.toml").write_text(dev.out.partition("\n\nparameters ")[0])
    again = ptxtrain("train", "--preset", tmp_path / "again.toml", "--dry-run", "--no-measure")
    assert again.out.splitlines()[1:] == dev.out.splitlines()[1:], "what is printed is a preset"
    timed = ptxtrain("train", "--preset", preset, "--dry-run", "--json", "--steps", 40)
    assert "measuring a few steps on " in timed.err
    needs = json.loads(timed.out)
    assert needs["config"]["train"]["steps"] == 40
    assert needs["memory"]["total"] == sum(size for kind, size in needs["memory"].items() if kind != "total")
    assert needs["memory"]["optimizer"] == 8 * needs["parameters"]
    assert needs["tokens"] == 40 * 8 * 16
    estimate = needs["estimate"]
    assert estimate["seconds"] == pytest.approx(40 * estimate["step_seconds"]) and estimate["sequences"] == 2
    assert not list(tmp_path.glob("runs*")), "nothing is left of it"
    assert ptxtrain("train", "--preset", preset, "--no-measure").line.startswith("error: --no-measure needs --dry-run")


@pytest.mark.parametrize(
    ("value", "steps", "minutes"), [("500", 500, 0), ("10m", 0, 10), ("90s", 0, 1.5), ("2h", 0, 120), ("0", 0, 0)]
)
def test_save_every_takes_steps_or_time(value: str, steps: int, minutes: float, preset: Path) -> None:
    done = ptxtrain("train", "--preset", preset, "--dry-run", "--no-measure", "--json", "--save-every", value)
    train = json.loads(done.out)["config"]["train"]
    assert (train["save_every"], train["save_minutes"]) == (steps, minutes)


def test_info_tells_devices_and_reasons() -> None:
    text = ptxtrain("info")
    assert text.code == 0 and "presets" in text.out and "llvmlite" in text.out
    facts = json.loads(ptxtrain("info", "--json").out)
    assert facts["device"].startswith("cpu: ") and "tiny" in facts["presets"]
