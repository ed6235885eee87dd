"""`ptxtrain sample`: text from a trained model, printed as it comes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ptxtrain.cli.options import device_options

if TYPE_CHECKING:
    from ptxtrain.cli.speaker import Speaker
    from ptxtrain.engine.sampler import Sampling

EPILOG = """\b
Examples:
  ptxtrain sample --ckpt runs/tiny-20260131-174501
  ptxtrain sample --ckpt runs/mine/ckpt/step-00001514 --prompt "The best way to learn" --tokens 200
  ptxtrain sample --ckpt runs/mine --prompt "def " --temperature 0 --stop "\\n\\n"
  ptxtrain sample --ckpt runs/mine --prompt "Once" --samples 4 --min-p 0.05 --json
  ptxtrain sample --ckpt runs/mine --interactive
"""


def sampling_options(function: Any) -> Any:
    """How tokens are picked."""
    for option in reversed(
        [
            click.option(
                "--temperature", default=0.8, show_default=True, help="0 takes the likeliest token each time."
            ),
            click.option("--top-k", default=40, show_default=True, help="Pick among the k likeliest tokens; 0: all."),
            click.option(
                "--top-p",
                default=1.0,
                show_default=True,
                help="Pick among the likeliest that reach this probability; 1: all.",
            ),
            click.option(
                "--min-p",
                default=0.0,
                show_default=True,
                help="Leave out what has less than this share of the likeliest token's probability; 0: nothing.",
            ),
            click.option(
                "--repetition-penalty",
                default=1.0,
                show_default=True,
                help="Above 1: tokens that are in the text already become less likely; 1.1 is mild.",
            ),
            click.option(
                "--seed",
                default=1,
                show_default=True,
                type=click.IntRange(0),
                help="The same seed gives the same text.",
            ),
        ]
    ):
        function = option(function)
    return function


@click.command("sample", epilog=EPILOG)
@click.option(
    "--ckpt", required=True, type=click.Path(path_type=Path), metavar="RUN|CKPT", help="A run, or ckpt/step-… in one."
)
@click.option("--prompt", help="Text to go on from. [default: the start of a document]")
@click.option(
    "--tokens",
    default=128,
    show_default=True,
    type=click.IntRange(1, 1_000_000),
    help="Tokens to print at most, of each sample or answer.",
)
@sampling_options
@click.option(
    "--stop",
    "stops",
    multiple=True,
    metavar="TEXT",
    help="End before this text; \\n and \\t are understood. Repeatable.",
)
@click.option(
    "--samples",
    default=1,
    show_default=True,
    type=click.IntRange(1, 10_000),
    help="Texts from the same prompt. Four are computed at once.",
)
@click.option(
    "--interactive", is_flag=True, help="Read prompts from stdin, line by line, and go on with the text after each."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@device_options
def command(
    ckpt: Path,
    prompt: str | None,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    seed: int,
    stops: tuple[str, ...],
    samples: int,
    interactive: bool,
    as_json: bool,
    wanted: str | None,
    threads: int | None,
) -> None:
    """Continue a prompt with the model of a run's newest checkpoint, or of one checkpoint.

    The same seed gives the same text, however many samples are drawn beside it. A text that fills the model's context T goes on
    from its last T / 2 tokens. Generation ends early where the model ends the document, or before a stop string.

    With --interactive, Ctrl+C stops the current answer and Ctrl+D ends.
    """
    from ptxtrain.cli.speaker import Speaker
    from ptxtrain.engine.errors import PtxtrainError
    from ptxtrain.engine.sampler import Sampling

    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    for flag, given in (("--samples", samples > 1), ("--json", as_json)):
        if interactive and given:
            raise click.UsageError(f"--interactive prints one text as it comes; it does not go with {flag}")
    if "" in stops:
        raise PtxtrainError("an empty --stop would end every text at once; leave it out")
    prompt = None if prompt is None else _text(prompt)
    if prompt == "":
        raise PtxtrainError("the prompt is empty; leave --prompt out to begin at the start of a document")
    speaker = Speaker(
        ckpt,
        sequences=1 if interactive else samples,
        tokens=tokens,
        sampling=sampling,
        stops=[_unescaped(stop) for stop in stops],
        wanted=wanted,
        threads=threads,
    )
    if interactive:
        from ptxtrain.cli.chat import chat

        chat(speaker, prompt)
    elif as_json:
        _print_json(speaker, prompt, samples, sampling)
    else:
        _print(speaker, prompt, samples)


def _text(text: str) -> str:
    """The command line's bytes as text: what is not UTF-8 becomes U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _unescaped(text: str) -> str:
    return _text(text).replace("\\n", "\n").replace("\\t", "\t")


def _print(speaker: Speaker, prompt: str | None, samples: int) -> None:
    """One text as it comes; several one after the other, each as soon as it is whole."""
    from ptxtrain.cli.main import say

    if samples == 1:
        start = speaker.start(prompt)
        speaker.echo(prompt or "")
        for _, text in speaker.speak(start, 1):
            speaker.echo(text)
        speaker.echo("\n")
    else:
        for number, answer in enumerate(speaker.answers(prompt, samples), 1):
            speaker.echo(f"--- sample {number} of {samples}\n{prompt or ''}{answer.text}\n")
    say(speaker.speed())


def _print_json(speaker: Speaker, prompt: str | None, samples: int, sampling: Sampling) -> None:
    import dataclasses
    import json

    answers = list(speaker.answers(prompt, samples))
    report = {
        "step": speaker.step,
        "prompt": prompt,
        "sampling": dataclasses.asdict(sampling),
        "samples": [{"text": a.text, "tokens": a.tokens, "ended": a.ended} for a in answers],
        "tokens_per_second": round(speaker.rate(), 2),
    }
    click.echo(json.dumps(report, indent=2))
