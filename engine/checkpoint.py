"""Checkpoints of a run: saved by one writer thread, found and loaded again, removed when old.

The save, whose order is what makes an announced step survive any crash:
    make .tmp-STEP-ATTEMPT · reserve, write, hash and fsync each file · MANIFEST.json last, fsync · fsync the directory ·
    one rename to step-STEP · fsync the parent · read everything back and compare · only then announce `saved step N`
After any error the temporary directory is thrown away, everything else is kept, and the next save starts under a new
name. A failed fsync is never tried again. Truth is the highest step whose manifest and digests verify.

Steps that `resume` set aside (`.aside-step-…`: damaged, or later than the step that was asked for) are never read again.
Retention removes each when it would have removed that step itself: once `keep` sound checkpoints of later steps stand.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ptxtrain.engine.checkpointfiles import (
    Snapshot,
    check_device,
    check_finite,
    checkpoint_bytes,
    read_manifest,
    read_snapshot,
    verify_files,
    write_files,
)
from ptxtrain.engine.durable import Durable, is_real_directory
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.rundir import RunDirectory, read_info, resume_command, run_and_step
from ptxtrain.engine.sealed import Damaged
from ptxtrain.engine.stepdirs import aside_step, is_leftover, list_steps, set_aside, step_name
from ptxtrain.engine.tensorfile import Place, TensorPlace

__all__ = [
    "NoCheckpoint",
    "Place",
    "SaveOutcome",
    "Saver",
    "Snapshot",
    "TensorPlace",
    "checkpoint_bytes",
    "clear_leftovers",
    "list_steps",
    "load",
    "load_and_refused",
    "make_ready",
    "step_name",
]


class NoCheckpoint(PtxtrainError):
    """The run has no checkpoint at all: it ended before its first save, and starts from step 0."""


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """How one save ended. Not saved: `error` says why in one clause, and earlier checkpoints are as they were."""

    step: int
    saved: bool
    error: str | None
    seconds: float


class Saver:
    """Writes snapshots of a held run in a thread, one at a time, and applies retention after each announcement.

    `announce` gets `saved step N`, `warn` gets whole lines; both are called from the writer thread, and an OSError that they
    raise (a closed pipe) is ignored.
    """

    def __init__(
        self,
        run: RunDirectory,
        table: Sequence[TensorPlace],
        *,
        keep: int = 3,  # newest checkpoints kept, never fewer than two
        keep_every: int = 0,  # multiples of this step are kept for good; 0: none
        numerics_id: str | None = None,  # of the device in use; the run's own when None
        data_id: str | None = None,  # of the data in use; likewise
        announce: Callable[[str], None] = print,
        warn: Callable[[str], None] = print,
    ) -> None:
        """Removes what an interrupted save left. Raises PtxtrainError where `ckpt` is no directory of the run's own."""
        self.run, self.table = run, tuple(table)
        self.keep, self.keep_every = max(2, keep), keep_every
        self.last_saved: int | None = None  # newest step announced by this object
        self._numerics_id = run.info.numerics_id if numerics_id is None else numerics_id
        self._data_id = run.info.data_id if data_id is None else data_id
        self._announce, self._warn = announce, warn
        self._io: Durable = run.io
        self._directory = run.info.checkpoints
        self._attempt = 0
        self._verified: set[int] = set()
        self._suspect: set[int] = set()  # renamed into place, but never known to be durable
        self._thread: threading.Thread | None = None
        self._outcome: SaveOutcome | None = None
        self._crash: BaseException | None = None
        self._losses: dict[int, float] = {}
        self._guard = threading.Lock()
        _check_folder(run)
        clear_leftovers(run, lambda line: self._say(warn, line))
        for step in reversed(list_steps(run.path)):
            with contextlib.suppress(Damaged):
                best = read_manifest(self._directory / step_name(step), run.info.run_id, step).best_saved
                if best is not None:
                    self._losses[best[0]] = best[1]
                break

    def submit(self, snapshot: Snapshot) -> None:
        """Starts saving; waits first for a save still being written. The snapshot's arrays must not change any more."""
        self._join()
        self._thread = threading.Thread(target=self._work, args=(snapshot,), name="ptxtrain-save")
        self._thread.start()

    def wait(self) -> SaveOutcome | None:
        """Waits for the save being written and returns how the newest one ended; None where there was none yet."""
        self._join()
        return self._outcome

    @property
    def busy(self) -> bool:
        """Whether a save is being written now."""
        return self._thread is not None and self._thread.is_alive()

    def validated(self, step: int, loss: float) -> None:
        """Notes the validation loss of `step`, so that the saved step with the lowest one is kept."""
        with self._guard:
            self._losses[step] = loss

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._crash is not None:
            crash, self._crash = self._crash, None
            raise crash

    def _work(self, snapshot: Snapshot) -> None:
        start = time.monotonic()
        error: str | None = None
        try:
            try:
                self._save(snapshot)
            except Exception as caught:
                error = _reason(caught)
            if error is None:
                self.last_saved = snapshot.step
                self._say(self._announce, f"saved step {snapshot.step}")
            else:
                self._say(
                    self._warn, f"step {snapshot.step} was not saved: {error}. Earlier checkpoints are untouched."
                )
            self._outcome = SaveOutcome(snapshot.step, error is None, error, time.monotonic() - start)
            if error is None:
                try:
                    self._retain()
                except Exception as caught:
                    self._say(self._warn, f"could not remove old checkpoints: {_reason(caught)}.")
        except BaseException as crash:  # handed to the thread that waits
            self._crash = crash

    def _save(self, snapshot: Snapshot) -> None:
        """Returns once step N is durable and verified; raises after throwing the attempt away."""
        snapshot.numerics_id, snapshot.data_id = self._numerics_id, self._data_id
        check_finite(snapshot, self.table)
        check_device(snapshot)
        io, step, run_id = self._io, snapshot.step, self.run.info.run_id
        target = self._directory / step_name(step)
        if os.path.lexists(target) and self._already_saved(target, snapshot):
            return
        self._attempt += 1
        temporary = self._directory / f".tmp-{step:08d}-{self._attempt}"
        renamed = False
        try:
            io.mkdir(temporary)
            write_files(io, temporary, snapshot, self.table, run_id, self._best())
            io.rename(temporary, target)
            renamed = True
            io.fsync_dir(self._directory)
            verify_files(target, self.table, run_id, step)
        except Exception:
            self._throw_away(temporary, target if renamed else None, step)
            raise
        self._verified.add(step)

    def _already_saved(self, target: Path, snapshot: Snapshot) -> bool:
        """Whether `target` is this very state, durable. One that is damaged or doubtful is set aside; another is an error."""
        try:
            manifest = verify_files(target, self.table, self.run.info.run_id, snapshot.step)
        except Damaged:
            set_aside(self._io, target)
            return False
        if snapshot.step in self._suspect:
            set_aside(self._io, target)
            self._suspect.discard(snapshot.step)
            return False
        if manifest.state_digest != snapshot.digest():
            raise Damaged(
                f"{target.name} exists already with digest {manifest.state_digest}, this state has {snapshot.digest()}"
            )
        self._io.fsync_dir(self._directory)
        self._verified.add(snapshot.step)
        return True

    def _throw_away(self, temporary: Path, renamed_to: Path | None, step: int) -> None:
        try:
            if renamed_to is not None:
                self._suspect.add(step)
                self._io.rename(renamed_to, temporary)
                self._suspect.discard(step)
            if os.path.lexists(temporary):
                self._io.remove_tree(temporary)
        except OSError as error:
            self._say(self._warn, f"could not remove {temporary}: {_reason(error)}. The next start will.")

    def _best(self) -> tuple[int, float] | None:
        """The saved step with the lowest known validation loss; of equal ones the earliest."""
        saved = set(list_steps(self.run.path))
        with self._guard:
            found = [(loss, step) for step, loss in self._losses.items() if step in saved and loss == loss]
        return (min(found)[1], min(found)[0]) if found else None

    def _retain(self) -> None:
        """Removes steps older than the `keep` newest that verify, save the best and the multiples of `keep_every`."""
        good = 0
        while (best := self._best()) and not self._sound(best[0]):
            with self._guard:
                del self._losses[best[0]]
        for step in reversed(list_steps(self.run.path)):
            directory = self._directory / step_name(step)
            if good >= self.keep:
                if (best and step == best[0]) or (self.keep_every and step % self.keep_every == 0):
                    continue
                self._remove(directory, step)
                continue
            good += self._sound(step)
            if good == self.keep:
                self._remove_asides(step)

    def _remove_asides(self, before: int) -> None:
        """What was set aside of steps earlier than `before`; a link among them is removed, never followed."""
        for name in sorted(os.listdir(self._directory)):
            if (step := aside_step(name)) is not None and step < before:
                if is_real_directory(self._directory / name):
                    self._io.remove_tree(self._directory / name)
                else:
                    self._io.unlink(self._directory / name)

    def _sound(self, step: int) -> bool:
        """Whether a step in place verifies; each is read once."""
        if step not in self._verified and step not in self._suspect:
            with contextlib.suppress(Damaged):
                verify_files(self._directory / step_name(step), self.table, self.run.info.run_id, step)
                self._verified.add(step)
        return step in self._verified

    def _remove(self, directory: Path, step: int) -> None:
        """Takes the name away first, so that a reader never meets half a checkpoint."""
        if not is_real_directory(directory):
            return
        self._attempt += 1
        gone = self._directory / f".gone-{step:08d}-{self._attempt}"
        self._io.rename(directory, gone)
        self._io.fsync_dir(self._directory)
        self._io.remove_tree(gone)

    def _say(self, how: Callable[[str], None], line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed pipe, a closed file
            how(line)


def load(
    path: Path,  # a RUN, or a CKPT in one
    table: Sequence[TensorPlace],
    *,
    step: int | None = None,
    note: Callable[[str], None] = print,
) -> Snapshot:
    """The newest state that verifies, or exactly `step` (a CKPT path names its own). Takes no lock, changes nothing.

    Falls back to the next older good step, with one line to `note` that names both. Raises NoCheckpoint where the run has
    none, PtxtrainError where the step asked for, or every step, is refused.
    """
    run, own = run_and_step(path)
    if own is not None and step is not None and own != step:
        raise PtxtrainError(f"{path} is step {own}, and step {step} was asked for: leave one of them out.")
    return load_and_refused(run, table, step=own if step is None else step, note=note)[0]


def make_ready(
    run: RunDirectory,
    snapshot: Snapshot,  # of this run: what is trained on from here
    refused: Collection[int],  # steps that cannot be used
    *,
    note: Callable[[str], None] = print,
) -> None:
    """Makes the run ready to be saved into behind `snapshot`.

    Leftovers of interrupted saves are removed; steps that were refused and steps later than the snapshot's are renamed to
    `.aside-step-…`, each with one line, for a rename onto them would fail at every later save. Raises PtxtrainError where the
    directory cannot be changed.
    """
    _check_folder(run)
    clear_leftovers(run, note)
    try:
        for other in list_steps(run.path):
            if other > snapshot.step or other in refused:
                aside = set_aside(run.io, run.info.checkpoints / step_name(other))
                note(f"set {step_name(other)} aside as {aside.name}.")
        run.io.fsync_dir(run.info.checkpoints)
    except OSError as error:
        raise PtxtrainError(f"cannot set checkpoints aside in {run.info.checkpoints}: {_reason(error)}.") from error


def load_and_refused(
    run: Path,
    table: Sequence[TensorPlace],
    *,
    step: int | None = None,
    note: Callable[[str], None] = print,
) -> tuple[Snapshot, set[int]]:
    """`load`, and the steps that were refused on the way to the one returned."""
    info = read_info(run)
    refused: dict[int, str] = {}
    while True:
        steps = [s for s in reversed(list_steps(run)) if s not in refused]
        if step is not None:
            if step not in steps and step not in refused:
                have = ", ".join(map(str, list_steps(run))) or "none"
                raise PtxtrainError(f"{run} has no checkpoint of step {step}; it has {have}.")
            steps = [s for s in steps if s == step]
        if not steps:
            break
        try:
            snapshot = read_snapshot(run / "ckpt" / step_name(steps[0]), table, info.run_id, steps[0])
        except Damaged as error:
            refused[steps[0]] = str(error)
            continue
        # Steps that retention took away while they were read are no damage.
        gone = {s for s in refused if not os.path.lexists(run / "ckpt" / step_name(s))}
        for bad in sorted(refused.keys() - gone, reverse=True):
            note(f"{step_name(bad)} cannot be used: {refused[bad]}; using {step_name(snapshot.step)} instead.")
        return snapshot, set(refused) - gone
    if not refused:
        raise NoCheckpoint(f"{run} has no checkpoint: it ended before its first save.")
    newest = max(refused)
    others = "" if len(refused) == 1 or step is not None else f" (and none of {len(refused) - 1} older ones)"
    again = f"Begin again by `{resume_command(run)} --step 0`, or start another run."
    remedy = "Leave the step out to use the newest good one." if step is not None else again
    raise PtxtrainError(f"{run}/ckpt/{step_name(newest)} cannot be used{others}: {refused[newest]}. {remedy}")


def _check_folder(run: RunDirectory) -> None:
    if not is_real_directory(run.info.checkpoints):
        raise PtxtrainError(
            f"{run.info.checkpoints} must be a directory of the run's own; it is missing or a link. Put it back, or "
            "make an empty one to begin again at step 0."
        )


def clear_leftovers(run: RunDirectory, note: Callable[[str], None]) -> None:
    """Removes what interrupted saves and removals left in a held run; only names of our making."""
    for name in sorted(os.listdir(run.info.checkpoints)):
        if is_leftover(name) and is_real_directory(run.info.checkpoints / name):
            try:
                run.io.remove_tree(run.info.checkpoints / name)
            except OSError as error:
                note(f"could not remove {run.info.checkpoints / name}: {_reason(error)}.")


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}"
    return str(error) or type(error).__name__
