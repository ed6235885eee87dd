"""A small run, a server that forks children to train it, and what must hold after whatever went wrong in one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import runs
from runs import PRESET, Done

from ptxtrain.data.manifest import ShardEntry, manifest_bytes, read_manifest, shard_name
from ptxtrain.data.shards import Dataset, read_header, write_shard
from ptxtrain.engine.checkpoint import list_steps, load, step_name
from ptxtrain.engine.checkpointfiles import verify_files
from ptxtrain.engine.config import from_dict, load_preset
from ptxtrain.engine.metrics import read_metrics
from ptxtrain.engine.parameters import parameter_count, parameter_table
from ptxtrain.engine.rundir import read_info
from ptxtrain.engine.sealed import Damaged
from ptxtrain.engine.session import untrained
from ptxtrain.engine.verify import FAIL, verify

Fault = tuple[str, dict[str, Any]]
Line = tuple[str, str, str]  # a mutant: module, text, other text
HERE = Path(__file__).parent
STEPS = 12
# As the command line's tests have it, so that the kernels are the same; saved often and kept little, so that retention acts.
SETTINGS = {"save_every": 3, "validate_every": 3, "sample_every": 6, "keep": 2, "steps": STEPS}


def preset_text() -> str:
    text = PRESET
    for key, value in SETTINGS.items():
        text = re.sub(rf"^{key} = .*\n", "", text, flags=re.MULTILINE)
        text += f"{key} = {value}\n"
    return text


class Server:
    """The fork server of one test process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._address = str(folder / "fork.sock")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._address)
        listener.listen(64)
        os.set_inheritable(listener.fileno(), True)
        argv = [
            sys.executable,
            "-X",
            "faulthandler",
            HERE / "forkserver.py",
            listener.fileno(),
            folder / "kernels",
            os.getpid(),
        ]
        self._process = subprocess.Popen([str(arg) for arg in argv], close_fds=False, stdin=subprocess.DEVNULL)
        listener.close()

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.connect(self._address)
        return client

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Child:
    """One command running in a child of the server; `until`, `send` and `wait` as in `runs.Process`."""

    def __init__(
        self,
        server: Server,
        argv: Sequence[object] = (),
        *,
        inject: Sequence[Fault] = (),
        mutate: Sequence[Line] = (),
        tests: Sequence[str] = (),
        cwd: Path | None = None,
        environment: dict[str, str] | None = None,
        streams: tuple[int, int] | None = None,  # descriptors in place of the pipes for stdout and stderr
    ) -> None:
        self._reply = server.connect()
        pipes = [] if streams else [os.pipe(), os.pipe()]
        request = {
            "argv": [str(arg) for arg in argv],
            "inject": list(inject),
            "mutate": list(mutate),
            "pytest": list(tests),
            "cwd": str(cwd or os.getcwd()),
            "environment": {"PTXTRAIN_DEVICE": "cpu", "PTXTRAIN_THREADS": "1", **(environment or {})},
        }
        socket.send_fds(self._reply, [json.dumps(request).encode() + b"\n"], streams or [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        self._replies = self._reply.makefile("r")
        line = self._replies.readline()
        assert line, "the fork server is gone"
        self.pid = int(line)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._parts: list[list[str]] = [[], []]
        self._threads = [
            threading.Thread(target=self._read, args=(number, read), daemon=True)
            for number, (read, _) in enumerate(pipes)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, number: int, fd: int) -> None:
        with open(fd, encoding="utf-8", errors="replace") as stream:
            for line in stream:
                self._parts[number].append(line)
                if number == 1:
                    self._lines.put(line)
        if number == 1:
            self._lines.put(None)

    def until(self, text: str, seconds: float = 60) -> str:
        """Wait for a line on stderr with `text` in it."""
        end = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(end - time.monotonic(), 0.01))
            except queue.Empty:
                raise AssertionError(f"no {text!r} in {seconds} s: {''.join(self._parts[1])}") from None
            assert line is not None, f"it ended without {text!r}: {''.join(self._parts[1])}"
            if text in line:
                return line

    def send(self, number: int = signal.SIGINT) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, seconds: float = 60) -> Done:
        """How it ended; code -9 where it was killed. One that does not end is a failed check."""
        self._reply.settimeout(seconds)
        try:
            line = self._replies.readline()
        except TimeoutError:
            self.send(signal.SIGKILL)
            raise AssertionError(f"still running after {seconds} s: {''.join(self._parts[1])[-2000:]}") from None
        finally:
            self._reply.close()
        for thread in self._threads:
            thread.join(10)
        code, self.cpu_seconds, self.peak_kib = int(line.split()[0]), *map(float, line.split()[1:])
        return Done(code, "".join(self._parts[0]), "".join(self._parts[1]))


def faults(**named: dict[str, Any]) -> list[Fault]:
    """`faults(kill_at={"n": 3})` as a request has it."""
    return list(named.items())


@dataclass
class Reference:
    """A run that nothing disturbed: its digest, and of each step the state's digest, loss and gradient norm."""

    digest: str
    states: dict[int, str]
    numbers: dict[int, tuple[float, float]]
    calls: list[str]  # `op path` of every durable call that it made


@dataclass
class Lab:
    """Commands on one preset and dataset, each in a child; `mutate` changes lines of the tool in all of them."""

    server: Server
    folder: Path
    preset: Path
    dataset: Path
    reference: Reference
    mutate: tuple[Line, ...] = ()
    resumed: int = 0  # how many runs were taken to their end after a fault
    _names: Iterator[int] = field(default_factory=lambda: iter(range(1 << 60)))

    @functools.cached_property
    def parameters(self) -> int:
        """Numbers in the model."""
        return parameter_count(parameter_table(load_preset(str(self.preset)).model))

    def fresh(self) -> Path:
        """A place for a run."""
        return self.folder / f"run-{next(self._names)}"

    def start(self, *argv: object, inject: Sequence[Fault] = (), **more: Any) -> Child:
        return Child(self.server, argv, inject=inject, mutate=self.mutate, **more)

    def run(self, *argv: object, inject: Sequence[Fault] = (), seconds: float = 60, **more: Any) -> Done:
        return self.start(*argv, inject=inject, **more).wait(seconds)

    def train_argv(self, run: Path, *extra: object) -> list[object]:
        return ["train", "--preset", self.preset, "--data", self.dataset, "--run", run, *extra]

    def train(self, run: Path, *extra: object, inject: Sequence[Fault] = (), **more: Any) -> Done:
        return self.run(*self.train_argv(run, *extra), inject=inject, **more)

    def resume(self, run: Path, *extra: object, inject: Sequence[Fault] = (), **more: Any) -> Done:
        return self.run("resume", run, *extra, inject=inject, **more)

    # What must hold

    def check_states(self, run: Path) -> list[int]:
        """Steps in place that verify, ascending. Each must be the undisturbed run's state to the last bit."""
        info = read_info(run)
        table, good = parameter_table(info.config.model), []
        for step in list_steps(run):
            with contextlib.suppress(Damaged):
                manifest = verify_files(info.checkpoints / step_name(step), table, info.run_id, step)
                assert manifest.state_digest == self.reference.states[step], f"step {step} is another state"
                good.append(step)
        return good

    def check_numbers(self, run: Path) -> None:
        """Every step that any attempt logged has the undisturbed run's loss, gradient norm and digest."""
        for line in read_metrics(run / "metrics.jsonl"):
            if "loss" in line:
                step = int(line["step"])
                assert (line["loss"], line["grad_norm"]) == self.reference.numbers[step], f"step {step} of {line}"
                assert line["digest"] == self.reference.states[step], f"another state, or another place: {line}"

    def survives(self, run: Path, said: str, *extra: object, inject: Sequence[Fault] = ()) -> Done:
        """After a fault: what was announced in `said` is there, `resume` ends with the undisturbed run's bits, and the run
        verifies.

        A run that had not been begun yet is trained again in the same place.
        """
        announced = max(saved(said), default=-1)
        if (run / "run.json").exists():
            assert max(self.check_states(run), default=-1) >= announced, f"step {announced} was announced and is lost"
            done = self.resume(run, *extra, inject=inject)
        else:
            assert announced < 0
            done = self.train(run, *extra, inject=inject)
        if inject:
            return done
        assert done.code == 0, done.err
        assert done.digest == self.reference.digest, done.err
        self.check_numbers(run)
        names = os.listdir(run / "ckpt")
        assert not [name for name in names if name.startswith((".tmp", ".gone"))], names
        assert STEPS in self.check_states(run)
        failed = [f"{found.what}: {found.text}" for found in verify(run) if found.state == FAIL]
        assert not failed, failed
        self.resumed += 1
        return done


def saved(said: str) -> list[int]:
    """The steps that were announced, in the order in which they were."""
    return [int(step) for step in re.findall(r"^saved step (\d+)$", said, re.MULTILINE)]


PARTS = (397, 401, 11, 530)  # tokens in each training shard; no sequence fits into the third


def make_dataset(folder: Path) -> Path:
    """Four small training shards, fewer tokens in all than a run reads: shards and epochs end within it."""
    out = runs.make_dataset(folder)
    (whole,) = Dataset(out).train
    tokens, at = whole.read(0, sum(PARTS)).copy(), 0
    kind = {"vocab_size": whole.vocab_size, "end_of_text": whole.end_of_text}
    digest = bytes.fromhex(whole.tokenizer_digest)
    whole.close()
    whole.path.unlink()
    for number, count in enumerate(PARTS):
        write_shard(out / shard_name("train", number), tokens[at : at + count], **kind, tokenizer_digest=digest)
        at += count
    write_manifest(out)
    Dataset(out).verify()
    assert sum(PARTS) < STEPS * 8 * 16
    return out


def write_manifest(data: Path) -> None:
    """Make a dataset's manifest list the shards that are there, as they are."""
    entries = []
    for path in sorted(data.glob("*.tok"), key=lambda path: (path.name.startswith("val"), path.name)):
        with open(path, "rb", buffering=0) as file:
            header = read_header(file, path)
        entries.append(ShardEntry(path.name, path.name.partition("-")[0], header.count, header.size, header.digest))
    manifest = dataclasses.replace(read_manifest(data), shards=tuple(entries))
    (data / "manifest.json").write_bytes(manifest_bytes(manifest))


def make_reference(lab: Lab, *extra: object) -> Reference:
    """Trains without any fault, once with every step kept and once as all other runs are."""
    every, plain = lab.fresh(), lab.fresh()
    done = lab.train(every, *extra, "--set", "train.save_every=1", "--set", "train.keep=99")
    assert done.code == 0, done.err
    calls = lab.folder / f"{plain.name}.calls"
    again = lab.train(plain, *extra, inject=faults(count_calls={"out": str(calls)}))
    assert (again.code, again.digest) == (0, done.digest), again.err
    info = read_info(every)
    table = parameter_table(from_dict(json.loads((every / "run.json").read_text())["config"], "run.json").model)
    states = {step: load(every, table, step=step).digest() for step in list_steps(every)}
    assert sorted(states) == list(range(1, STEPS + 1))
    states[0] = untrained(info.config, info.seed).digest()
    assert info.config.train.steps == STEPS
    numbers = {
        int(line["step"]): (line["loss"], line["grad_norm"])
        for line in read_metrics(every / "metrics.jsonl")
        if "loss" in line
    }
    return Reference(done.digest, states, numbers, calls.read_text().splitlines())
