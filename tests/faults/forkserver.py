"""A warm process that forks a child for each command, so that a whole `ptxtrain train` takes a fraction of a second.

Python, NumPy, LLVM and the tool's own modules are imported once, before there is any thread; a child runs the command's `main`
on real kernels and ends as any process does. What is to go wrong in it (`inject`), which line of which module is another
(`mutate`), or which tests to run in the command's place (`pytest`) comes with the request. Run as a script with a listening
socket's descriptor, a file that names kernels to parse ahead, and the parent's process id.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.abc
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import threading
import types
from pathlib import Path
from typing import Any

PARSED: dict[tuple[str, str], Any] = {}  # kernels by text and path; children inherit what was parsed before the fork
# A mutant's children import everything that may depend on the changed line anew. What these hold does not, unless it is they
# that are changed; they are what takes long.
STAYS = (
    *("ptxtrain.engine.ptxcpu", "ptxtrain.engine.errors", "ptxtrain.engine.cache", "ptxtrain.engine.device.nvrtc"),
    *("ptxtrain.ptx", "ptxtrain.data.errors"),
)


def warm() -> None:
    """Import what children need, and nothing that starts a thread."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    import hypothesis
    import jinja2
    import llvmlite.binding
    import numpy
    import pytest
    import rich.console
    import tokenizers

    from ptxtrain.cli import main, resume, session, tokenize, train
    from ptxtrain.data import build, tokenizer
    from ptxtrain.engine import session as engine_session
    from ptxtrain.engine.device import cpu
    from ptxtrain.engine.device.nvrtc import toolchain
    from ptxtrain.engine.errors import PtxtrainError

    with contextlib.suppress(PtxtrainError):  # where it is missing, what needs it says so
        toolchain()
    del (
        hypothesis,
        jinja2,
        llvmlite,
        numpy,
        pytest,
        rich,
        tokenizers,
        main,
        resume,
        session,
        tokenize,
        train,
        build,
        tokenizer,
    )
    del engine_session, cpu


def keep_parsed() -> None:
    """Parse each kernel once: nearly all of a small run's time would go there."""
    from ptxtrain.engine.ptxcpu import module

    parse = module.parse

    def parse_once(text: str, path: Path) -> Any:
        key = (text, str(path))
        if key not in PARSED:
            PARSED[key] = parse(text, path)
        return PARSED[key]

    module.parse = parse_once


def parse_ahead(wanted: Path) -> None:
    """Parse what children before had to parse, and read the templates that it was made from."""
    from ptxtrain.engine.ptxcpu import module
    from ptxtrain.ptx import render

    known = {path for _, path in PARSED}
    for path in map(Path, wanted.read_text().splitlines() if wanted.exists() else ()):
        if str(path) not in known and path.exists():
            module.parse(path.read_text(encoding="utf-8"), path)
            if template := render.SOURCES.get(path.stem.rpartition("-")[0]):
                render.environment().get_template(template.name)


class Mutator(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with a text in its source replaced. The text must be there exactly once."""

    def __init__(self, name: str, old: str, new: str) -> None:
        self.name = name
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        self.origin = spec.origin
        source = Path(spec.origin).read_text(encoding="utf-8")
        if source.count(old) != 1:
            sys.exit(f"mutant: {old!r} occurs {source.count(old)} times in {name}")
        self.source = source.replace(old, new)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.origin, loader=self)

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        exec(compile(self.source, self.origin, "exec"), module.__dict__)

    def install(self) -> None:
        """Forget all modules that may hold the old text."""
        stays = () if self.name.startswith(STAYS) else STAYS
        for name in list(sys.modules):
            if name.startswith("ptxtrain.") and not name.startswith(stays or ("-",)):
                parent, _, last = name.rpartition(".")
                if hasattr(sys.modules.get(parent), last):
                    delattr(sys.modules[parent], last)
                del sys.modules[name]
        sys.meta_path.insert(0, self)


def child(request: dict[str, Any], wanted: Path) -> int:
    """What one child does: changes what it was asked to change, then runs the command."""
    before = set(PARSED)
    for name, old, new in request["mutate"]:
        Mutator(name, old, new).install()
    if tests := request["pytest"]:
        import pytest

        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly", *tests]))
    import inject

    inject.apply(request["inject"])
    from ptxtrain.cli.main import main

    try:
        return main(request["argv"])
    finally:
        if new := {path for _, path in PARSED.keys() - before if os.path.exists(path)}:
            with open(wanted, "a") as file:
                file.write("".join(f"{path}\n" for path in sorted(new)))


def handle(client: socket.socket, wanted: Path) -> None:
    """In a process of its own: start the child, say its id, wait for it, say how it ended. Does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, fds, _, _ = socket.recv_fds(client, 1 << 20, 2)
    while not data.endswith(b"\n"):
        data += client.recv(1 << 20)
    request = json.loads(data)
    pid = os.fork()
    if pid:
        client.sendall(f"{pid}\n".encode())
        os.close(fds[0])
        os.close(fds[1])
        _, status, used = os.wait4(pid, 0)
        client.sendall(
            f"{os.waitstatus_to_exitcode(status)} {used.ru_utime + used.ru_stime} {used.ru_maxrss}\n".encode()
        )
        os._exit(0)
    client.close()
    os.dup2(fds[0], 1)
    os.dup2(fds[1], 2)
    os.close(fds[0])
    os.close(fds[1])
    os.chdir(request["cwd"])
    os.environ.update(request["environment"])
    code = child(request, wanted)
    # As the interpreter ends, but without taking apart, page by page, what was copied from the server.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)


def serve(listener: socket.socket, wanted: Path, parent: int) -> None:
    """Until the parent is gone."""
    warm()
    keep_parsed()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while os.getppid() == parent:
        if not select.select([listener], [], [], 5)[0]:
            continue
        client, _ = listener.accept()
        parse_ahead(wanted)
        gc.freeze()  # what children have in common is not looked at, and so not copied, by their collectors
        if os.fork() == 0:
            listener.close()
            handle(client, wanted)
        client.close()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]))
