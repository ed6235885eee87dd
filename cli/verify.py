"""`ptxtrain verify`: whether a run, a checkpoint or a dataset is what was written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

EPILOG = """\b
Examples:
  ptxtrain verify runs/tiny-20260131-174501
  ptxtrain verify runs/mine/ckpt/step-00001514
  ptxtrain verify datasets/books --json
"""


@click.command("verify", epilog=EPILOG)
@click.argument("path", metavar="RUN|CKPT|DATASET", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(path: Path, as_json: bool) -> None:
    """Check everything that can be checked without training, and change nothing.

    Of a run: run.json, tokenizer, identity of the data; of each checkpoint sizes, SHA-256, manifest, digest of the state,
    place in the data, and that every number is finite; of the metrics that steps follow each other and that steps made by two
    attempts have equal bits. Of a dataset: manifest, tokenizer, every block of every shard. Exit code 1 if a check fails.
    """
    from ptxtrain.cli.main import say
    from ptxtrain.engine.errors import PtxtrainError
    from ptxtrain.engine.verify import FAIL, NOTE, Finding, kind_of, verify

    kind, found = kind_of(path), list[Finding]()
    for finding in verify(path):
        found.append(finding)
        line = f"{finding.state:<6}{finding.what:<18}{finding.text}"
        if as_json:
            say(line)
        else:
            click.echo(line)
    failed = [finding for finding in found if finding.state == FAIL]
    checks = sum(finding.state != NOTE for finding in found)
    if as_json:
        report = {"path": str(path), "kind": kind, "passed": not failed, "findings": [*map(dataclasses.asdict, found)]}
        click.echo(json.dumps(report, indent=2, ensure_ascii=False))
    if failed:
        raise PtxtrainError(
            f"{path}: {len(failed)} of {checks} checks failed; the first: {failed[0].what}: {failed[0].text}"
        )
    if not as_json:
        click.echo(f"verified {path}: {checks} check{'s' if checks != 1 else ''} passed")
