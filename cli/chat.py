"""`ptxtrain sample --interactive`: a line of stdin, the model's continuation, and so on over one growing text."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ptxtrain.cli.main import say
from ptxtrain.cli.speaker import Answer, Speaker
from ptxtrain.engine.errors import PtxtrainError


class _Interrupted(Exception):
    """Ctrl+C. A termination still ends the command."""


@contextmanager
def _interrupts() -> Iterator[None]:
    """Ctrl+C raises _Interrupted instead of ending the command."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raised(_number: int, _frame: FrameType | None) -> None:
        raise _Interrupted

    before = signal.signal(signal.SIGINT, raised)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def chat(speaker: Speaker, opening: str | None) -> None:
    """Read prompts until the end of stdin. The text that the model goes on from is everything said so far, both sides.

    A broken-off answer stays in the text as far as it was printed. A prompt that cannot be used is one line on stderr.
    """
    asks = sys.stdin.isatty()
    if asks:
        say("a line continues the text, Ctrl+C stops an answer, Ctrl+D ends")
    reconfigure = getattr(sys.stdin, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    text = [speaker.end_of_text]
    with _interrupts():
        if opening is not None:
            text = _turn(speaker, text, opening)
        while (line := _line(asks)) is not None:
            if line.strip():
                text = _turn(speaker, text, line)


def _line(asks: bool) -> str | None:
    """The next prompt; None at the end of stdin."""
    while True:
        try:
            if asks:
                sys.stderr.write("> ")
                sys.stderr.flush()
            line = sys.stdin.readline()
        except _Interrupted:
            say("\nCtrl+D ends")
            continue
        return line.rstrip("\r\n") if line else None


def _turn(speaker: Speaker, text: list[int], prompt: str) -> list[int]:
    """Print what follows the prompt; the text with both."""
    try:
        start = speaker.kept([*text, *speaker.encode(prompt)])
    except PtxtrainError as error:
        say(f"error: {error}")
        return text
    answers = [Answer()]
    try:
        for _, part in speaker.speak(start, 1, answers=answers):
            speaker.echo(part)
    except _Interrupted:
        speaker.settle()
        answers[0].ended = "interrupt"
    speaker.echo("\n")
    said = [token for token in answers[0].tokens if token != speaker.end_of_text]
    return [*start, *said, *speaker.encode("\n")]
