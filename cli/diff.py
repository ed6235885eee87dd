"""`ptxtrain diff`: where two runs or checkpoints part, to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import click

EPILOG = """\b
Examples:
  ptxtrain diff runs/a runs/b
  ptxtrain diff runs/a/ckpt/step-00000500 runs/b/ckpt/step-00000500
  ptxtrain diff runs/a/ckpt/step-00000500 runs/b --json
"""


@click.command("diff", epilog=EPILOG)
@click.argument("a", metavar="RUN|CKPT", type=click.Path(path_type=Path))
@click.argument("b", metavar="RUN|CKPT", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(a: Path, b: Path, as_json: bool) -> None:
    """Name the first step, tensor and index in which A and B differ, with both values in hex and decimal.

    Two runs are compared in their configs, in their metrics step by step (loss, gradient norm, learning rate, digest of the
    state) and in the checkpoints of each step that both have; a checkpoint with a run in that one step. Exit code 0 if all of it
    is equal, 1 if not.
    """
    from ptxtrain.engine.compare import compare
    from ptxtrain.engine.errors import PtxtrainError

    found = compare(a, b)
    if as_json:
        report = {"a": str(a), "b": str(b), "equal": found.first is None, "first": found.first, "lines": found.lines}
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        click.echo("\n".join(found.lines))
    if found.first is not None:
        raise PtxtrainError(f"{a} and {b} differ first in {found.first}")
