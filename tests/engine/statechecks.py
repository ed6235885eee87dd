"""What checkpoints promise, as checks that run on the real modules and on mutants of them. Each raises AssertionError."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from statebench import (
    BROKEN,
    DISK_FULL,
    TABLE,
    Bench,
    FailAt,
    Killed,
    Modules,
    PowerCut,
    disk_error,
    prepare_resume,
    same,
    snapshot,
)

from ptxtrain.engine.checkpoint import Snapshot
from ptxtrain.engine.durable import Call
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.sealed import seal

Check = Callable[[Modules, Path], None]


def round_trip(modules: Modules, folder: Path) -> None:
    """What was saved comes back to the last bit, with everything beside the arrays."""
    bench = Bench(folder, modules)
    kept = {"best_val": 3.25, "elapsed": 12.5, "state": {"philox": [1, 2**63], "steps": 300}}
    assert bench.save(7, **kept) and bench.save(9) and bench.said == ["saved step 7", "saved step 9"]
    assert same(bench.load(step=7), snapshot(7, modules, **kept)) and bench.load(step=7).elapsed == 12.5
    assert same(bench.load(), snapshot(9, modules)) and bench.load().numerics_id == "cpu:test"
    assert same(bench.restart(), snapshot(9, modules)) and bench.warned == []


def write_order(modules: Modules, folder: Path) -> None:
    """The calls of one save, in the protocol's order; the announcement comes after the last of them."""
    bench = Bench(folder, modules)
    trace: list[str] = []

    def hook(call: Call) -> None:
        trace.append(f"{call.op} {call.path.name}" + (f" {call.target.name}" if call.target else ""))
        assert bench.said == []

    bench.io.hook = hook
    assert bench.save(5)
    temporary, files = ".tmp-00000005-1", ("model.safetensors", "optim.safetensors", "MANIFEST.json")
    steps = [f"{op} {name}" for name in files for op in ("create", "allocate", "write", "fsync")]
    once = list(dict.fromkeys(trace))  # header and data are written apart
    end = [f"fsync_dir {temporary}", f"rename {temporary} step-00000005", "fsync_dir ckpt"]
    assert once == [f"mkdir {temporary}", *steps, *end], trace


def power_cut(modules: Modules, folder: Path) -> int:
    """Whatever a power cut leaves after each call, the newest announced step (or a later whole one) is loaded right."""
    bench = Bench(folder / "live", modules, keep=2)
    (bench.path / "ckpt" / ".aside-step-00000001-1").mkdir()
    (bench.path / "ckpt" / ".aside-step-00000001-1" / "MANIFEST.json").write_bytes(b"{}")
    model = PowerCut(bench.path)
    counts = {"calls": 0, "states": 0}
    rng = random.Random(1)

    def look() -> None:
        counts["calls"] += 1
        newest = max(bench.announced(), default=-1)
        for keep in (0.0, 0.5, 0.9, 1.0):
            place = folder / f"cut-{counts['states']}"
            model.state(place, rng, keep)
            try:
                found = modules.checkpoint.load(place, TABLE, note=lambda line: None)
                assert found.step >= newest and same(found, snapshot(found.step, modules)), (found.step, newest)
            except PtxtrainError as error:
                if newest >= 0:
                    raise AssertionError(f"{error} after {bench.said}") from error
            finally:
                shutil.rmtree(place)
            counts["states"] += 1

    def hook(call: Call) -> None:
        model.feed(call)
        failed.extend(_failure(look))

    failed: list[BaseException] = []
    announce = bench.said.append

    def said(line: str) -> None:
        announce(line)
        failed.extend(_failure(look))

    bench.saver._announce = said
    bench.io.hook = hook
    for step in (1, 2, 3, 4):
        bench.save(step)
    if failed:
        raise failed[0]
    assert bench.announced() == [1, 2, 3, 4] and counts["calls"] > 60 and _asides(bench) == []
    return counts["states"]


def _failure(look: Callable[[], None]) -> list[BaseException]:
    """The saver takes any Exception for a failed save; a failed check must reach the test instead."""
    try:
        look()
    except AssertionError as error:
        return [error]
    return []


def _three_steps(modules: Modules, folder: Path) -> Path:
    """A closed run with steps 1, 2 and 3, of which one more save removes the oldest two or one, and a step set aside, which it
    removes as well."""
    bench = Bench(folder / "template", modules)
    assert all(bench.save(step) for step in (1, 2, 3))
    shutil.copytree(bench.path / "ckpt" / "step-00000001", bench.path / "ckpt" / ".aside-step-00000001-1")
    bench.run.close()
    return bench.path


def disk_errors(modules: Modules, folder: Path) -> int:
    """ENOSPC and EIO at each call, EROFS from each call on: old steps stay, nothing false is announced, saving goes on."""
    tried, template = 0, _three_steps(modules, folder)
    for error, forever in ((DISK_FULL, False), (BROKEN, False), (disk_error(errno.EROFS), True)):
        n = 0
        while True:
            bench = Bench(folder / f"{tried}-{n}", modules, keep=2, template=template)
            bench.io.hook = fail = FailAt(n, error, forever)
            saved = bench.save(4)
            bench.io.hook = None
            if fail.hit is None:
                assert saved and bench.warned == []
                break
            tried += 1
            assert saved == (4 in bench.announced())
            assert bench.warned, fail.hit
            assert same(bench.load(), snapshot(bench.load().step, modules)) and bench.load().step >= (4 if saved else 3)
            assert forever or bench.leftovers() == [] or fail.hit.op in ("unlink", "rmdir", "rename", "fsync_dir"), (
                fail.hit
            )
            assert saved or bench.save(4), (fail.hit, bench.warned)  # the same step again, under a new name
            assert bench.save(5) and bench.load().step == 5
            assert ".aside-step-00000001-1" not in _asides(bench), (fail.hit, bench.warned)
            assert same(bench.restart(), snapshot(5, modules)) and bench.leftovers() == []
            n += 1
    return tried


def kills(modules: Modules, folder: Path) -> int:
    """The process ends at each call of a save and of its retention, and again at each call of the next start."""
    tried, n, template = 0, 0, _three_steps(modules, folder)
    while True:
        second = 0
        while True:
            bench = Bench(folder / f"{n}-{second}", modules, keep=2, template=template)
            bench.io.hook = fail = FailAt(n, Killed, forever=True)
            ended = False
            try:
                bench.save(4)
            except Killed:
                ended = True
            announced = max(bench.announced(), default=3)
            if ended:
                tried += 1
                bench.run.close()
                bench.run.io = bench.io
                again = FailAt(second, Killed, forever=True)
                twice = _restart_killed(bench, again)
                assert same(bench.restart(), snapshot(bench.load().step, modules)) and bench.load().step >= announced
                assert bench.leftovers() == []
                for step in (4, 5):
                    assert bench.save(step), bench.warned
                assert _asides(bench) == []
            if not ended or not twice:
                break
            second += 1
        if not ended:
            assert fail.hit is None
            return tried
        n += 1


def _restart_killed(bench: Bench, again: FailAt) -> bool:
    """One start that ends at a call; whether it came to that."""
    run = bench.modules.checkpoint.RunDirectory.open(bench.path, bench.modules.durable.Durable(again))
    try:
        prepare_resume(run, note=lambda line: None, modules=bench.modules)
        bench.modules.checkpoint.Saver(run, TABLE, announce=bench.said.append, warn=bench.warned.append)
    except Killed:
        return True
    finally:
        run.close()
    return False


def corrupted_while_written(modules: Modules, folder: Path) -> None:
    """A medium that changes a byte on its way: the save is not announced and does not stay."""
    bench = Bench(folder, modules)
    assert bench.save(1)

    def hook(call: Call) -> None:
        if call.op == "rename" and call.path.name.startswith(".tmp"):
            file = call.path / "optim.safetensors"
            data = bytearray(file.read_bytes())
            data[-3] ^= 4
            file.write_bytes(data)

    def another_state(call: Call) -> None:
        if call.op == "rename" and call.path.name.startswith(".tmp"):
            values = json.loads((call.path / "MANIFEST.json").read_bytes())
            del values["digest"]
            (call.path / "MANIFEST.json").write_bytes(seal({**values, "state_digest": "0" * 16}))

    for bad in (hook, another_state):
        bench.io.hook = bad
        assert not bench.save(2) and bench.announced() == [1]
    bench.io.hook = None
    assert modules.checkpoint.list_steps(bench.path) == [1] and bench.leftovers() == [] and bench.save(2)


def damage(modules: Modules, folder: Path) -> None:
    """Each file: truncated, grown, a bit flipped, taken from another step or run, gone, a link, a fifo; and a file too many."""
    bench = Bench(folder, modules)
    other = Bench(folder / "other", modules)
    for step in (1, 2):
        assert bench.save(step) and other.save(step)
    good, older = bench.path / "ckpt" / "step-00000002", bench.path / "ckpt" / "step-00000001"
    pristine = {file.name: file.read_bytes() for file in good.iterdir()}
    rng = random.Random(2)

    def refused(what: str) -> None:
        bench.warned.clear()
        assert same(bench.load(), snapshot(1, modules)), what
        assert len(bench.warned) == 1, bench.warned
        assert "step-00000002 cannot be used: " in bench.warned[0] and "using step-00000001 instead" in bench.warned[0]
        try:
            bench.load(step=2)
        except PtxtrainError:
            return
        raise AssertionError(f"{what}: loaded when asked for by its step")

    for name, data in pristine.items():
        for cut in sorted({0, 1, 7, 8, 9, len(data) - 1, *rng.sample(range(len(data)), 8)}):
            (good / name).write_bytes(data[:cut])
            refused(f"{name} cut to {cut}")
        (good / name).write_bytes(data + b"\0")
        refused(f"{name} grown")
        for bit in rng.sample(range(8 * len(data)), 40):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            (good / name).write_bytes(flipped)
            refused(f"{name} bit {bit}")
        for source in (older, other.path / "ckpt" / "step-00000002"):
            replaced = (source / name).read_bytes()
            if replaced != data:
                (good / name).write_bytes(replaced)
                refused(f"{name} of {source}")
        (good / name).unlink()
        refused(f"no {name}")
        (good / name).symlink_to(folder / "elsewhere")
        (folder / "elsewhere").write_bytes(data)
        refused(f"{name} a link")
        (good / name).unlink()
        os.mkfifo(good / name)
        refused(f"{name} a fifo")
        (good / name).unlink()
        (good / name).mkdir()
        refused(f"{name} a directory")
        (good / name).rmdir()
        (good / name).write_bytes(data)
        assert bench.load().step == 2
    (good / "extra.bin").write_bytes(b"")
    refused("a file too many")
    shutil.rmtree(good)
    shutil.copytree(other.path / "ckpt" / "step-00000002", good)
    refused("another run's directory")
    shutil.rmtree(good)
    shutil.copytree(older, good)
    refused("another step's directory")
    shutil.rmtree(good)
    (folder / "kept").mkdir()
    for name, data in pristine.items():
        (folder / "kept" / name).write_bytes(data)
    good.symlink_to(folder / "kept")
    refused("a link to a directory")


def resume_sets_aside(modules: Modules, folder: Path) -> None:
    """A damaged newest step, resume, then a save at that very step; and a resume from an older step."""
    bench = Bench(folder, modules)
    for step in (1, 2, 3):
        assert bench.save(step)
    newest = bench.path / "ckpt" / "step-00000003" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert bench.restart().step == 2
    assert modules.checkpoint.list_steps(bench.path) == [1, 2]
    assert bench.warned[-1] == "set step-00000003 aside as .aside-step-00000003-1."
    assert bench.save(3), bench.warned
    resumed = prepare_resume(bench.run, step=1, note=bench.warned.append, modules=modules)
    assert resumed.step == 1 and modules.checkpoint.list_steps(bench.path) == [1]
    assert bench.save(2) and bench.save(3) and bench.restart().step == 3
    aside = [name for name in os.listdir(bench.path / "ckpt") if name.startswith(".aside")]
    assert sorted(aside) == [".aside-step-00000002-1", ".aside-step-00000003-1", ".aside-step-00000003-2"]
    assert bench.save(4) and sorted(aside) == sorted(_asides(bench)), "only two later steps than 2 stand"
    assert bench.save(5) and _asides(bench) == [".aside-step-00000003-1", ".aside-step-00000003-2"]
    assert bench.save(6) and _asides(bench) == []


def _asides(bench: Bench) -> list[str]:
    return sorted(name for name in os.listdir(bench.path / "ckpt") if name.startswith(".aside"))


def retention(modules: Modules, folder: Path) -> None:
    """The newest three, the best by validation, nothing that is not ours, never fewer than two that verify."""
    bench = Bench(folder, modules)
    for name in ("step-7", "step-0000000x", "mine", ".tmp-mine"):
        (bench.path / "ckpt" / name).mkdir()
    losses = {10: float("nan"), 20: 3.0, 30: 5.0, 40: 4.0, 50: 3.0, 60: 6.0}
    for step, loss in losses.items():
        assert bench.save(step)
        bench.saver.validated(step, loss)
    bench.saver.validated(55, 0.1)  # never saved
    steps = modules.checkpoint.list_steps
    assert steps(bench.path) == [20, 40, 50, 60]
    bench.restart()  # which step is best is remembered
    assert bench.save(70) and bench.save(80) and steps(bench.path) == [20, 60, 70, 80]
    bench.saver.validated(80, 1.0)
    assert bench.save(90) and steps(bench.path) == [70, 80, 90]
    bench.restart()
    for step in (80, 90):  # damaged ones do not count, and older good ones stay for them
        (bench.path / "ckpt" / f"step-000000{step}" / "MANIFEST.json").write_bytes(b"{}")
    assert bench.save(100) and bench.save(110) and steps(bench.path) == [70, 80, 90, 100, 110]
    assert bench.restart().step == 110
    _vouch_for_poison(bench.path / "ckpt" / "step-00000100")  # nor do those that are not finite, whoever wrote them
    assert bench.save(115) and steps(bench.path) == [70, 80, 90, 100, 110, 115]
    bench.saver.keep_every = 50
    assert all(bench.save(step) for step in (120, 130, 140, 150)) and steps(bench.path) == [100, 130, 140, 150]
    names = set(os.listdir(bench.path / "ckpt"))
    assert {"step-7", "step-0000000x", "mine", ".tmp-mine"} <= names and bench.leftovers() == [".tmp-mine"]


def _vouch_for_poison(step: Path) -> None:
    """A NaN in the weights, with a manifest that says so in all its digests."""
    data = bytearray((step / "model.safetensors").read_bytes())
    data[-4:] = b"\0\0\xc0\x7f"
    (step / "model.safetensors").write_bytes(data)
    values = json.loads((step / "MANIFEST.json").read_bytes())
    del values["digest"]
    values["files"]["model.safetensors"]["sha256"] = hashlib.sha256(data).hexdigest()
    state = snapshot(values["step"])
    state.params[-1] = math.nan
    values["state_digest"] = Snapshot(values["step"], state.params, state.m, state.v, state.position).digest()
    (step / "MANIFEST.json").write_bytes(seal(values))


def poisoned(modules: Modules, folder: Path) -> None:
    """A state with a NaN or an infinity is never saved, nor one that is not what the device held."""
    bench = Bench(folder, modules)
    assert bench.save(1)
    for array, value in (("params", float("nan")), ("m", float("inf")), ("v", float("-inf"))):
        bad = snapshot(2, modules)
        getattr(bad, array)[21] = value
        bench.saver.submit(bad)
        outcome = bench.saver.wait()
        assert not outcome.saved and "layers.0.qkv[1] of step 2 is" in outcome.error, outcome
    assert (
        modules.checkpoint.list_steps(bench.path) == [1] and bench.said == ["saved step 1"] and len(bench.warned) == 3
    )
    assert not bench.save(2, device_sum=snapshot(2).sum() ^ 1) and "on the device they had" in bench.warned[3]
    assert bench.save(2, device_sum=snapshot(2).sum())


def same_step_twice(modules: Modules, folder: Path) -> None:
    """The step that is there already is announced again; another state under its name is refused and harms nothing."""
    bench = Bench(folder, modules)
    assert bench.save(1) and bench.save(1) and bench.said == ["saved step 1", "saved step 1"]
    bench.restart()
    assert bench.save(1)
    other = snapshot(1, modules)
    other.params[0] += 1
    bench.saver.submit(other)
    assert not bench.saver.wait().saved and same(bench.load(), snapshot(1, modules))


CHECKS: tuple[Check, ...] = (
    round_trip,
    write_order,
    resume_sets_aside,
    retention,
    poisoned,
    corrupted_while_written,
    same_step_twice,
    damage,
    power_cut,  # type: ignore[arg-type]
    disk_errors,  # type: ignore[arg-type]
    kills,  # type: ignore[arg-type]
)
