"""`ptxtrain replay`: a part of a run once more, in memory, as a proof that the run, or a device, is sound."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from ptxtrain.cli.options import accept_options, device_options

EPILOG = """\b
Examples:
  ptxtrain replay runs/mine
  ptxtrain replay runs/mine --from 1000 --to 1500
  ptxtrain replay runs/mine --from 0 --to 20 --set batch.micro_batch=1 --threads 1
"""


@click.command("replay", epilog=EPILOG)
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "first",
    type=click.IntRange(0),
    metavar="A",
    help="Begin with this checkpoint, or 0. [default: that before B]",
)
@click.option(
    "--to", "last", type=click.IntRange(1), metavar="B", help="Go on to this step. [default: the newest checkpoint]"
)
@click.option(
    "--data", type=click.Path(path_type=Path), metavar="DIR", help="Where the run's dataset lies now, if moved."
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change what does not show in the result: batch.micro_batch.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@accept_options
@device_options
def command(
    run: Path,
    first: int | None,
    last: int | None,
    data: Path | None,
    settings: tuple[str, ...],
    as_json: bool,
    wanted: str | None,
    threads: int | None,
    **accept: bool,
) -> None:
    """Train steps A + 1 to B of RUN again and compare each one's loss, gradient norm and digest with the run's metrics, and the
    last state with the run's checkpoint. Nothing is written, and the run may be in use.

    The first step that does not come out to the last bit is named, with both values, and the exit code is 1.
    """
    from ptxtrain.cli.display import make_view
    from ptxtrain.cli.main import say
    from ptxtrain.cli.session import changed, open_and_say, run_dataset
    from ptxtrain.engine import identity
    from ptxtrain.engine.numerics import numerics_id
    from ptxtrain.engine.replay import describe, replay, span, start_of
    from ptxtrain.engine.rundir import read_info

    info = read_info(run)
    config = changed(info.config, settings)
    first, last = span(info, first, last)
    start = start_of(info, first)
    dataset = run_dataset(config, data)
    device = open_and_say(wanted, threads)
    accepted = {name.removeprefix("accept_") for name, given in accept.items() if given}
    for change in identity.refuse(run, identity.changes(start, info, dataset, numerics_id(device)), accepted):
        say(f"accepted: {change.text}")
    view = make_view(f"replay of {run}", first, last)
    try:
        found = replay(info, config, dataset, device, start, last, view)
    finally:
        view.close()
    if as_json:
        click.echo(json.dumps({"run": str(run), **dataclasses.asdict(found)}))
    else:
        click.echo("\n".join(describe(found, run)))
