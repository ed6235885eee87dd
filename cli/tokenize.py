"""`ptxtrain tokenize`: text to a dataset directory."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ptxtrain.data.shards import Dataset

EPILOG = """\b
Examples:
  ptxtrain tokenize ~/books notes.txt --out datasets/books --vocab-size 8192
  ptxtrain tokenize @stdlib --out datasets/python --tokenizer datasets/books/tokenizer.json
"""


@contextlib.contextmanager
def _drawn_progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """A progress bar on stderr where that is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("", total=None)

        def draw(what: str, done: int, total: int) -> None:
            bars.update(bar, description=what, completed=done, total=total or None)

        yield draw


def _report(dataset: Dataset, out: str, seconds: float) -> dict[str, Any]:
    manifest = dataset.manifest
    tokens = dataset.train_tokens + dataset.val_tokens
    return {
        "out": out,
        "vocab_size": dataset.vocab_size,
        "documents": manifest.documents,
        "text_bytes": manifest.text_bytes,
        "bytes_per_token": round(manifest.text_bytes / tokens, 3),
        "train_tokens": dataset.train_tokens,
        "val_tokens": dataset.val_tokens,
        "train_shards": len(dataset.train),
        "val_shards": len(dataset.val),
        "tokenizer_sha256": dataset.tokenizer_digest,
        "sources": list(manifest.sources),
        "seconds": round(seconds, 2),
    }


@click.command(
    "tokenize",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option("--out", "-o", required=True, metavar="DIR", help="The dataset directory to make; must be new or empty.")
@click.option("--vocab-size", type=int, metavar="N", help="Learn a vocabulary of N tokens.  [default: 4096]")
@click.option("--tokenizer", metavar="FILE", help="Use this tokenizer.json instead of learning one.")
@click.option(
    "--val-fraction",
    type=float,
    default=0.03,
    show_default=True,
    metavar="F",
    help="Part of the documents kept for validation.",
)
@click.option(
    "--shard-tokens", type=int, default=1 << 26, show_default=True, metavar="N", help="Most tokens in one .tok file."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    sources: tuple[str, ...],
    out: str,
    vocab_size: int | None,
    tokenizer: str | None,
    val_fraction: float,
    shard_tokens: int,
    as_json: bool,
) -> None:
    """Tokenise text into a dataset to train on.

    SOURCE is a text file, a folder (every UTF-8 file in it, hidden ones left out) or @stdlib, the Python standard
    library's own sources on this machine. Within a file, a literal <|endoftext|> parts documents. The result is a
    directory with the shards of tokens, the tokenizer and a manifest; it appears whole or not at all.
    """
    from ptxtrain.data.build import build_dataset
    from ptxtrain.data.errors import DataError
    from ptxtrain.data.files import shown

    def note(line: str) -> None:
        click.echo(f"note: {line}", err=True)

    start = time.perf_counter()
    try:
        with _drawn_progress() as progress:
            dataset = build_dataset(
                sources,
                out,
                vocab_size=vocab_size,
                tokenizer=tokenizer,
                val_fraction=val_fraction,
                shard_tokens=shard_tokens,
                progress=progress,
                note=note,
            )
    except KeyboardInterrupt:  # SIGTERM and SIGHUP too: `ptxtrain` makes them unwind as Ctrl+C does
        if os.path.exists(os.path.join(out, "manifest.json")):
            raise DataError(f"stopped by request; {shown(out)} was already complete and is left there") from None
        raise DataError(f"stopped by request; nothing of {shown(out)} was left behind") from None
    report = _report(dataset, shown(out), time.perf_counter() - start)
    if as_json:
        click.echo(json.dumps(report))
        return
    shards = report["train_shards"] + report["val_shards"]
    documents = f"{report['documents']:,} document{'s' * (report['documents'] != 1)}"
    click.echo(
        f"{report['out']}: {report['train_tokens']:,} training and {report['val_tokens']:,} validation tokens "
        f"in {shards} shards, vocabulary {report['vocab_size']:,}, {documents}, "
        f"{report['bytes_per_token']:.2f} bytes a token, {report['seconds']:.1f} s"
    )
