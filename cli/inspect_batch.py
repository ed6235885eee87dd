"""`ptxtrain inspect-batch`: what a step of a run was trained on."""

from __future__ import annotations

import json
from pathlib import Path

import click

EPILOG = """\b
Examples:
  ptxtrain inspect-batch runs/mine --step 1514
  ptxtrain inspect-batch runs/mine --step 1514 --json
  ptxtrain inspect-batch runs/mine --step 1514 --data /mnt/books
"""


@click.command("inspect-batch", epilog=EPILOG)
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--step", required=True, type=click.IntRange(1), metavar="N", help="The step, from 1.")
@click.option(
    "--data", type=click.Path(path_type=Path), metavar="DIR", help="Where the run's dataset lies now, if moved."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with the tokens' ids.")
def command(run: Path, step: int, data: Path | None, as_json: bool) -> None:
    """Print the sequences that a step was or would be trained on: shard, first token, text.

    Control characters in the text are printed as escapes. Nothing is trained, and the run may be in use.
    """
    from ptxtrain.cli.session import run_dataset
    from ptxtrain.data.tokenizer import load_tokenizer
    from ptxtrain.engine.batches import batch
    from ptxtrain.engine.rundir import read_info

    info = read_info(run)
    dataset = run_dataset(info.config, data)
    sequences = list(batch(info, dataset, step))
    tokenizer = load_tokenizer(dataset.tokenizer_path, dataset.tokenizer_digest)
    texts = [tokenizer.decode(sequence.tokens.tolist()) for sequence in sequences]
    if as_json:
        found = [
            {
                "index": sequence.index,
                "leaf": sequence.leaf,
                "shard": sequence.shard,
                "token": sequence.token,
                "tokens": sequence.tokens.tolist(),
                "text": text,
            }
            for sequence, text in zip(sequences, texts, strict=True)
        ]
        report = {"run": str(run), "step": step, "data": str(dataset.directory), "sequences": found}
        click.echo(json.dumps(report, ensure_ascii=False))
        return
    context = info.config.model.context
    click.echo(f"step {step} of {run}: {len(sequences)} sequences of {context} tokens of {dataset.directory}")
    for sequence, text in zip(sequences, texts, strict=True):
        click.echo(f"--- {sequence.index}, leaf {sequence.leaf}: {sequence.shard}, token {sequence.token:,}")
        click.echo(printable(text))


def printable(text: str) -> str:
    """The text with control characters, but for line ends and tabs, as escapes: data must not drive a terminal."""
    return "".join(
        c if c in "\n\t" or (c.isprintable() or c == " ") else c.encode("unicode_escape").decode() for c in text
    )
