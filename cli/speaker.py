"""A model that speaks: checkpoint, tokenizer, device and decoder behind one object, for `sample` and its interactive form."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from ptxtrain.cli.main import say
from ptxtrain.data.tokenizer import load_tokenizer
from ptxtrain.engine.checkpoint import load
from ptxtrain.engine.decode import MOST_ROWS
from ptxtrain.engine.device.choice import open_device
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.generate import check_prompt, generate, kept_tokens, load_decoder
from ptxtrain.engine.parameters import parameter_table
from ptxtrain.engine.rundir import read_info, run_and_step
from ptxtrain.engine.sampler import Sampling
from ptxtrain.engine.textstream import TextStream


@dataclass(slots=True)
class Answer:
    """A text behind its prompt. `ended`: "end" of the document, "stop" string, or "length"."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    ended: str = "length"


class Speaker:
    """Continues prompts. Opens the device and loads the checkpoint when it is made, and says which on stderr.

    Raises:
        PtxtrainError, DataError: there is no such run or checkpoint, or it cannot be used.
    """

    def __init__(
        self,
        ckpt: Path,
        *,
        sequences: int,
        tokens: int,
        sampling: Sampling,
        stops: Sequence[str],
        wanted: str | None,
        threads: int | None,
    ) -> None:
        info = read_info(run_and_step(ckpt)[0])
        model = info.config.model
        snapshot = load(ckpt, parameter_table(model), note=say)
        self._tokenizer = load_tokenizer(info.tokenizer, info.tokenizer_sha256)
        device, choice = open_device(wanted, threads)
        self.step = snapshot.step
        say(f"step {snapshot.step} of {info.path} on {device.name} ({choice})")
        rows = min(sequences, MOST_ROWS)
        self._decoder = load_decoder(model, device, snapshot.params, info.config.train.way, sequences=rows)
        self._device, self._tokens, self._sampling, self._stops = device, tokens, sampling, stops
        self._overflowed, self._in_line = False, False
        self._count, self._timed, self._seconds = 0, 0, 0.0
        reconfigure = getattr(sys.stdout, "reconfigure", None)
        if reconfigure is not None:  # a terminal that cannot show a character gets its number, not a traceback
            reconfigure(errors="backslashreplace")

    @property
    def end_of_text(self) -> int:
        """The token that ends a document."""
        return self._tokenizer.end_of_text

    def encode(self, text: str) -> list[int]:
        """Tokens, all of which the model knows."""
        tokens = self._tokenizer.encode(text)
        if tokens and max(tokens) >= self._decoder.cfg.vocab_size:
            raise PtxtrainError(
                f"the tokenizer has ids up to {max(tokens):,}, and the model knows those below "
                f"{self._decoder.cfg.vocab_size:,}: they do not belong together"
            )
        return tokens

    def echo(self, text: str) -> None:
        """On stdout, at once."""
        if text:
            click.echo(text, nl=False)
            self._in_line = not text.endswith("\n")

    def kept(self, tokens: list[int]) -> list[int]:
        """A text as it goes on: all of it, or if it is too long its last half window, said once."""
        if len(tokens) < self._decoder.cfg.context:
            return tokens
        self._overflow()
        return tokens[-kept_tokens(self._decoder.cfg.context) :]

    def _overflow(self) -> None:
        if not self._overflowed:
            context = self._decoder.cfg.context
            kept = kept_tokens(context)
            broken = "\n" if self._in_line and sys.stdout.isatty() else ""
            say(
                f"{broken}the text fills the model's context of {context:,} tokens: going on from its last {kept:,}, "
                "here and later"
            )
        self._overflowed = True

    def start(self, prompt: str | None) -> list[int]:
        """A prompt's tokens; without one the start of a document. Raises PtxtrainError where it is too long."""
        tokens = [self.end_of_text] if prompt is None else self.encode(prompt)
        check_prompt(tokens, self._decoder.cfg.context)
        return tokens

    def speak(
        self, start: Sequence[int], count: int, first: int = 0, answers: list[Answer] | None = None
    ) -> Iterator[tuple[int, str]]:
        """(text's number, what is certain of it now) of `count` texts, at most four, as they come.

        `answers` are filled along the way.
        """
        streams = [TextStream(self._tokenizer.stream(), self._stops) for _ in range(count)]
        answers = [Answer() for _ in range(count)] if answers is None else answers
        since: float | None = None  # the first token: before it the prompt is read, and kernels are loaded
        try:
            for picked in generate(
                self._decoder,
                start,
                tokens=self._tokens,
                sampling=self._sampling,
                end=self.end_of_text,
                first=first,
                count=count,
                vocab=self._tokenizer.vocab_size,
                stopped=lambda n: streams[n - first].stopped,
                overflow=self._overflow,
            ):
                n = picked.text - first
                if since is None:
                    since = time.perf_counter()
                else:
                    self._timed += 1
                self._count += 1
                answers[n].tokens.append(picked.token)
                if picked.token == self.end_of_text:
                    answers[n].ended = "end"
                    continue
                text = streams[n].push(picked.token)
                if streams[n].stopped:
                    answers[n].ended = "stop"
                answers[n].text += text
                yield picked.text, text
        finally:
            self._seconds += 0.0 if since is None else time.perf_counter() - since
        for n, stream in enumerate(streams):
            text = stream.flush()
            answers[n].text += text
            yield first + n, text

    def answers(self, prompt: str | None, samples: int) -> Iterator[Answer]:
        """Whole texts from the same prompt, in order; text n does not depend on how many there are."""
        start = self.start(prompt)
        for first in range(0, samples, MOST_ROWS):
            count = min(MOST_ROWS, samples - first)
            found = [Answer() for _ in range(count)]
            for _ in self.speak(start, count, first, found):
                pass
            yield from found

    def settle(self) -> None:
        """Wait for what is queued, after an answer was broken off."""
        self._device.synchronize()

    def rate(self) -> float:
        """Tokens a second, from each first one on; 0 if there was but one."""
        return self._timed / self._seconds if self._timed else 0.0

    def speed(self) -> str:
        """The rate in words."""
        rate = f", {self.rate():,.1f} tokens/s from the first on" if self._timed else ""
        return f"{self._count:,} token{'s' if self._count > 1 else ''}{rate}"
