"""The command's edge: every error one line and its exit code, help everywhere, nothing heavy imported for it."""

from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest

from ptxtrain.cli import main as edge
from ptxtrain.data.errors import DataError
from ptxtrain.engine.errors import DeviceError, PtxtrainError, RunInUse, StoppedSaved, StoppedUnsaved

HEAVY = ("numpy", "cupy", "llvmlite", "tokenizers", "jinja2", "rich", "safetensors")


def _fails_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    @click.command("info")
    def broken() -> None:
        raise error

    monkeypatch.setattr(edge.LazyGroup, "get_command", lambda self, ctx, name: broken)
    return edge.main(["info"])


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (PtxtrainError("the file is bad"), 1, "error: the file is bad"),
        (DataError("the shard is bad"), 1, "error: the shard is bad"),
        (StoppedSaved("stopped; step 3 is saved"), 2, "stopped; step 3 is saved"),
        (StoppedUnsaved("step 3 could not be saved"), 3, "error: step 3 could not be saved"),
        (DeviceError("no NVIDIA driver"), 4, "error: no NVIDIA driver"),
        (RunInUse("runs/x is in use"), 5, "error: runs/x is in use"),
        (FileNotFoundError(2, "No such file or directory", "x.txt"), 1, "error: x.txt: No such file or directory"),
        (KeyboardInterrupt(), 1, "stopped"),
        (click.Abort(), 1, "stopped"),
        (click.ClickException("no"), 1, "error: no"),
        (BrokenPipeError(), 1, ""),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _fails_with(error, monkeypatch) == code
    out, err = capsys.readouterr()
    assert out == "" and err.lstrip("\n") == (f"{line}\n" if line else "")  # click ends the line of a ^C


def test_out_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _fails_with(MemoryError(), monkeypatch) == 1
    assert "batch.micro_batch" in capsys.readouterr().err


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        _fails_with(ZeroDivisionError(), monkeypatch)


@pytest.mark.parametrize(
    "argv",
    [
        *("nope", "train", "train --nope", "train --preset tiny --steps 0", "resume a b"),
        *("train --preset tiny --save-every 5x", "train --preset tiny --json"),
    ],
)
def test_usage_errors_exit_1_with_one_line(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert edge.main(argv.split()) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert "--help`" in err


def test_an_option_without_its_value_names_the_commands_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert edge.main(["resume", "a", "--data"]) == 1
    assert capsys.readouterr().err == "error: Option '--data' requires an argument; see `ptxtrain resume --help`\n"


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert edge.main([]) == 1
    assert "Commands:" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--version"], *([name, "--version"] for name in edge.COMMANDS)], ids=" ".join)
def test_version_everywhere(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert edge.main(argv) == 0
    assert capsys.readouterr().out == f"ptxtrain {version('ptxtrain')}\n"


@pytest.mark.parametrize("name", edge.COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert edge.main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Example" in out
    assert f"  ptxtrain {name}" in out.partition("Example")[2]
    assert "--help" in out and "--version" in out
    command = edge.cli.get_command(click.Context(edge.cli), name)
    assert command is not None and command.help
    assert all(option.help for option in command.params if isinstance(option, click.Option)), "an option without help"


def _modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint('MODULES', *sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.partition("MODULES ")[2].split())


@pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in edge.COMMANDS)], ids=" ".join)
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    """--help answers in under 0.2 s; what is imported decides that, and does not depend on the machine's mood."""
    modules = _modules_after(f"from ptxtrain.cli.main import main\nassert main({argv!r}) == 0")
    assert "ptxtrain.cli.main" in modules
    assert not modules & set(HEAVY)
    modules_of = {name: f"ptxtrain.cli.{name.replace('-', '_')}" for name in edge.COMMANDS}
    other = {module for name, module in modules_of.items() if name != argv[0]}
    assert not modules & other, "only the command that runs is imported"


def test_python_m_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ptxtrain.cli", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "ptxtrain")


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    code = "from ptxtrain.cli.main import main; import click, sys; import ptxtrain.cli.info as i\n"
    code += "i.command.callback = lambda **k: [click.echo('x' * 1000) for _ in range(10000)]\nsys.exit(main(['info']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_stdout_is_named(unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ptxtrain.cli", "kernels", "show", "adamw_update"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (1, "error: cannot write to stdout: No space left on device\n")
