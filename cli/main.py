"""The `ptxtrain` command: lazily imported subcommands, and the edge where an error becomes one line and an exit code.

Exit codes: 0 done; 1 bad usage, input or config, or a failed check; 2 stopped by request and saved; 3 stopped, newest
state not saved; 4 the device failed; 5 run directory in use. Only the module of the command that runs is imported, and
each of those imports NumPy, CuPy, llvmlite, tokenizers and rich inside its function, so that `--help` stays instant.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

import click

from ptxtrain.data.errors import DataError
from ptxtrain.engine.errors import PtxtrainError, StoppedSaved

# Name -> the line that `ptxtrain --help` shows. The module `ptxtrain.cli.NAME` has the click command as `command`; a hyphen in a
# name is an underscore there.
COMMANDS = {
    "tokenize": "Make a dataset of .tok shards and a tokenizer from text.",
    "train": "Train a model from a preset.",
    "resume": "Carry on a stopped run, with the same bits.",
    "verify": "Check a run, a checkpoint or a dataset.",
    "diff": "Name the first step, tensor and index where two runs differ.",
    "replay": "Train a part of a run again and compare every bit.",
    "inspect-batch": "Print the sequences that a step was trained on.",
    "sample": "Continue a prompt with a trained model.",
    "gradcheck": "Prove every gradient against finite differences.",
    "kernels": "List, print and check the shipped kernels.",
    "bench": "Measure kernels beside their peers.",
    "info": "Show devices, versions and each choice with its reason.",
}


def _show_version(context: click.Context, _param: click.Parameter, value: bool) -> None:
    if not value or context.resilient_parsing:
        return
    from importlib.metadata import version

    click.echo(f"ptxtrain {version('ptxtrain')}")
    context.exit()


def _version_option() -> click.Option:
    return click.Option(
        ["--version"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_show_version,
        help="Show the version and exit.",
    )


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"ptxtrain.cli.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        if not any(param.name == "version" for param in command.params):
            command.params.append(_version_option())
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    params=[_version_option()],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with: ptxtrain train --preset tiny",
)
def cli() -> None:
    """Train Llama-style language models with kernels written by hand in PTX, on an NVIDIA GPU or on any CPU.

    Results go to stdout, progress and notes to stderr.
    """


def say(text: str) -> None:
    """One line on stderr; a terminal that has gone away is no reason to fail."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Every error that a user can cause is one line on stderr."""
    _open_streams()
    try:
        with _terminate_as_interrupt():
            outcome: Any = cli.main(
                args=None if argv is None else list(argv), prog_name="ptxtrain", standalone_mode=False
            )
            sys.stdout.flush()
        return outcome if isinstance(outcome, int) else 0
    except click.UsageError as error:
        return _usage_error(error, sys.argv[1:] if argv is None else argv)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        say(f"error: {error.format_message()}")
    except (click.Abort, KeyboardInterrupt):
        say("stopped")
    except (PtxtrainError, DataError) as error:
        # `ptxtrain train --help | head` may have closed stdout; what was decided stands all the same.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        say(str(error) if isinstance(error, StoppedSaved) else f"error: {error}")
        return error.exit_code
    except BrokenPipeError:
        # The reader has gone. Not 0: whether a check passed has not been said to the end.
        silence_stdout()
    except MemoryError:
        say("error: out of memory; use a smaller --set batch.micro_batch=…, which does not change the result")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else "cannot write to stdout: " if _by_echo(error) else ""
        say(f"error: {where}{error.strerror or error}")
    return 1


def _usage_error(error: click.UsageError, argv: Sequence[str]) -> int:
    command = f" {argv[0]}" if argv and argv[0] in COMMANDS else ""
    path = error.ctx.command_path if error.ctx is not None else f"ptxtrain{command}"
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
    else:
        say(f"error: {error.format_message().rstrip('.')}; see `{path} --help`".replace("\n", " "))
    return 1  # not click's 2, which here means "stopped and saved: resume"


def _by_echo(error: OSError) -> bool:
    """Whether it is stdout that failed (a full disk behind it); what is left for it is dropped then."""
    if not any(frame.f_code is click.echo.__code__ for frame, _ in traceback.walk_tb(error.__traceback__)):
        return False
    silence_stdout()
    return True


def silence_stdout() -> None:
    """Python flushes stdout once more as it exits, and would print a traceback of its own."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_streams() -> None:
    """Standard streams that were closed by whoever started us lead nowhere: else a file of ours would get their number, and
    be written to as if it were one of them."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


@contextlib.contextmanager
def _terminate_as_interrupt() -> Any:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, so that half-made files are cleared away; `train` sets its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            before[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
