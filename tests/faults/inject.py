"""What can be made to go wrong inside a child of the fork server: each function is one fault, named in a request."""

from __future__ import annotations

import datetime
import errno
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def apply(faults: Sequence[tuple[str, dict[str, Any]]]) -> None:
    for name, values in faults:
        FAULTS[name](**values)


def _say(text: str) -> None:
    os.write(2, f"#{text}\n".encode())


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # a signal to oneself may take a moment to arrive; no line may run meanwhile


_hooks: list[Callable[[Any], int | None]] = []


def _on_each_call(hook: Callable[[Any], int | None]) -> None:
    """`hook` sees every call of the durable module, from whatever thread."""
    from ptxtrain.engine.durable import DISK

    def all_of_them(call: Any) -> int | None:
        most = None
        for each in _hooks:
            most = each(call) if most is None else most
        return most

    _hooks.append(hook)
    DISK.hook = all_of_them


# The disk


def kill_at(n: int, match: str = "") -> None:
    """SIGKILL just before the n-th durable call (from 0) whose `op name` has `match` in it."""
    seen = iter(range(1 << 60))

    def hook(call: Any) -> None:
        if match in f"{call.op} {call.path}" and next(seen) == n:
            _die()

    _on_each_call(hook)


def count_calls(out: str) -> None:
    """Write a line `op path` to `out` for each durable call."""
    fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _on_each_call(lambda call: os.write(fd, f"{call.op} {call.path}\n".encode()) and None)


def trace(out: str) -> None:
    """Pickle each durable call, with its data, and each announcement of a save, in the order in which they came."""
    from ptxtrain.engine import checkpoint

    file, turn = open(out, "wb"), threading.Lock()  # noqa: SIM115

    def hook(call: Any) -> None:
        data = None if call.data is None else bytes(call.data)
        with turn:
            pickle.dump((call.op, str(call.path), str(call.target or ""), data, call.size), file)
            file.flush()

    say = checkpoint.Saver._say

    def heard(self: Any, how: Any, line: str) -> None:
        if line.startswith("saved step "):
            with turn:
                pickle.dump(("announced", line.removeprefix("saved step "), "", None, None), file)
        say(self, how, line)

    checkpoint.Saver._say = heard  # type: ignore[method-assign]
    _on_each_call(hook)


def fail(op: str, error: str, match: str = "", times: int = 1 << 30) -> None:
    """Durable calls `op` on a path with `match` in it raise `error` (ENOSPC, …), the first `times` of them."""
    number, left = getattr(errno, error), [times]

    def hook(call: Any) -> None:
        if (not op or call.op == op) and match in f"{call.path} {call.target or ''}" and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(call.path))

    _on_each_call(hook)


def short_writes(most: int) -> None:
    """Every write stops after at most `most` bytes."""
    _on_each_call(lambda call: most if call.op == "write" else None)


def file_size_limit(size: int) -> None:
    """RLIMIT_FSIZE: writes past `size` bytes of any file are cut short, then fail with EFBIG."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


# Signals and places


def _place(where: str) -> tuple[Any, str]:
    """`module:Class.name` or `module:name`, as the holder and the name in it."""
    module, _, path = where.partition(":")
    holder: Any = __import__(module, fromlist=["_"])
    *parts, name = path.split(".")
    for part in parts:
        holder = getattr(holder, part)
    return holder, name


def hold(where: str, seconds: float, nth: int = 0, after: bool = False) -> None:
    """The n-th call of a function says `#at PLACE` and then takes `seconds` more, before or after its work."""
    holder, name = _place(where)
    made, seen = getattr(holder, name), iter(range(1 << 60))

    def held(*args: Any, **values: Any) -> Any:
        mine = next(seen) == nth
        if mine and not after:
            _linger(name, seconds)
        result = made(*args, **values)
        if mine and after:
            _linger(name, seconds)
        return result

    setattr(holder, name, held)


def _linger(name: str, seconds: float) -> None:
    _say(f"at {name}")
    end = time.monotonic() + seconds
    while time.monotonic() < end:  # a handler that returns makes `time.sleep` go on
        time.sleep(min(0.02, seconds))


def hold_disk(op: str, match: str, seconds: float) -> None:
    """The first durable call `op` on a path with `match` in it says `#at OP` and takes `seconds`."""
    seen = [False]

    def hook(call: Any) -> None:
        if call.op == op and match in str(call.path) and not seen[0]:
            seen[0] = True
            _linger(op, seconds)

    _on_each_call(hook)


def signal_at_step(step: int, number: int, seconds: float = 0.0) -> None:
    """The process gets a signal while the micro-batches of `step` are being queued; `seconds` go by before the next one."""
    from ptxtrain.engine.step import TrainStep

    begin, queue, now = TrainStep.begin, TrainStep.micro_batch, [0]

    def counting(self: Any, targets: int) -> None:
        now[0] += 1
        begin(self, targets)

    def signalling(self: Any, index: int, *arrays: Any) -> None:
        queue(self, index, *arrays)
        if index == 0 and now[0] == step:
            os.kill(os.getpid(), number)
            time.sleep(seconds)

    TrainStep.begin, TrainStep.micro_batch = counting, signalling  # type: ignore[method-assign]


# The device and the numbers


def poison(step: int, what: str = "gradient", value: float = float("nan"), at: int = 100) -> None:
    """One number of the gradient, the weights, m or v is `value` when the update of `step` begins."""
    import numpy as np

    from ptxtrain.engine.step import TrainStep

    finish = TrainStep.finish

    def poisoning(self: Any, number: int, lr: float) -> Any:
        if number == step:
            buffer = self._stack[0].flat.buffer if what == "gradient" else getattr(self, what)
            self.device.upload(buffer.view(4 * at, 4), np.full(1, value, np.float32))
        return finish(self, number, lr)

    TrainStep.finish = poisoning  # type: ignore[method-assign]


def poison_before(step: int, at: int = 100) -> None:
    """One weight is no number when `step` begins, as after a flipped bit of the device's memory."""
    import numpy as np

    from ptxtrain.engine.step import TrainStep

    begin, now = TrainStep.begin, [0]

    def poisoning(self: Any, targets: int) -> None:
        now[0] += 1
        if now[0] == step:
            self.device.upload(self.params.view(4 * at, 4), np.full(1, np.nan, np.float32))
        begin(self, targets)

    TrainStep.begin = poisoning  # type: ignore[method-assign]


def absurd_lr(step: int, lr: float) -> None:
    """The learning rate of one step is another."""
    from ptxtrain.engine import schedule

    made = schedule.learning_rate
    schedule.learning_rate = lambda number, config: lr if number == step else made(number, config)


def device_error(step: int) -> None:
    """The device fails in `step`; from there on any read of its memory is reported as `#read after failure`."""
    from ptxtrain.engine.device.cpu import CpuDevice
    from ptxtrain.engine.errors import DeviceError
    from ptxtrain.engine.step import TrainStep

    finish, download, failed = TrainStep.finish, CpuDevice.download, [False]

    def failing(self: Any, number: int, lr: float) -> Any:
        if number == step:
            failed[0] = True
            raise DeviceError("an illegal memory access was encountered")
        return finish(self, number, lr)

    def reading(self: Any, *args: Any) -> None:
        if failed[0]:
            _say("read after failure")
        download(self, *args)

    TrainStep.finish = failing  # type: ignore[method-assign]
    CpuDevice.download = reading  # type: ignore[method-assign]


# Data


def edit_at_read(nth: int, path: str, edit: str, at: int = 0) -> None:
    """Before the n-th read of training data (from 0) `path` is truncated, grown, flipped, emptied, replaced or removed."""
    from ptxtrain.data.loader import Loader

    read, seen = Loader.read, iter(range(1 << 60))

    def reading(self: Any, *args: Any) -> None:
        if next(seen) == nth:
            change_file(Path(path), edit, at)
        read(self, *args)

    Loader.read = reading  # type: ignore[method-assign]


def change_file(path: Path, edit: str, at: int = 0) -> None:
    """One way to hurt a file, in place but for `replaced` and `removed`. `at` is a byte, from the end where negative."""
    size = path.stat().st_size
    at = at % size if size else 0
    if edit == "truncated":
        os.truncate(path, at)
    elif edit == "emptied":
        os.truncate(path, 0)
    elif edit == "removed":
        path.unlink()
    elif edit == "flipped":
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x10]))
    elif edit == "grown":
        with open(path, "ab") as file:
            file.write(b"\0" * 7)
    elif edit == "replaced":
        data = bytearray(path.read_bytes())
        data[at] ^= 0x10
        other = path.with_name("other")
        other.write_bytes(data)
        os.replace(other, path)
    else:
        raise AssertionError(edit)


def small_corpus(path: str) -> None:
    """The sample corpus is a folder of a few files."""
    from ptxtrain.data import build

    build.STDLIB = path


# The rest of the world


def clock(jump: float) -> None:
    """The wall clock moves by `jump` seconds each time that it is looked at."""
    from ptxtrain.engine import rundir

    real, looks = time.time, iter(range(1 << 60))

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime.fromtimestamp(time.time(), tz)

    time.time = lambda: real() + jump * next(looks)
    rundir.datetime = Clock  # type: ignore[attr-defined]


FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "pickle.find_class",
)
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod")


def watch(allowed: list[str], hostile: str) -> None:
    """Report as `#did …` what a file could make Python do: run code, load a library, write outside of `allowed`."""
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

    def see(event: str, args: tuple[Any, ...]) -> None:
        if event in FORBIDDEN or (event in ("import", "ctypes.dlopen") and hostile in str(args)):
            _say(f"did {event} {args}")
        elif event == "open":
            path, mode, flags = args
            writing = (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & writes)
            if (
                writing
                and not isinstance(path, int)
                and not os.path.realpath(os.fsdecode(path)).startswith(tuple(allowed))
            ):
                _say(f"did open {path} {mode} {flags}")
        elif event in CHANGES and not os.path.realpath(os.fsdecode(args[0])).startswith(tuple(allowed)):
            _say(f"did {event} {args}")

    sys.addaudithook(see)


FAULTS: dict[str, Callable[..., None]] = {
    made.__name__: made
    for made in (
        kill_at,
        count_calls,
        trace,
        fail,
        short_writes,
        file_size_limit,
        hold,
        hold_disk,
        signal_at_step,
        poison,
        poison_before,
        device_error,
        absurd_lr,
        edit_at_read,
        small_corpus,
        clock,
        watch,
    )
}
