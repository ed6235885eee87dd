"""`ptxtrain resume`: the rest of a run that was stopped, killed or is to be longer."""

from __future__ import annotations

from pathlib import Path

import click

from ptxtrain.cli.options import Cadence, accept_options, device_options, keep_options, keep_settings, skip_option

EPILOG = """\b
Examples:
  ptxtrain resume
  ptxtrain resume runs/tiny-20260131-174501
  ptxtrain resume runs/mine --steps 2000
  ptxtrain resume runs/mine --step 1500
  ptxtrain resume runs/mine --set batch.micro_batch=4 --threads 2
"""


@click.command("resume", epilog=EPILOG)
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option(
    "--step",
    type=click.IntRange(0),
    metavar="N",
    help="Go on from this checkpoint; later ones are set aside. [default: newest]",
)
@click.option("--steps", type=click.IntRange(1), help="Go on to this step. [default: the run's own last step]")
@click.option(
    "--data", type=click.Path(path_type=Path), metavar="DIR", help="Where the run's dataset lies now, if moved."
)
@click.option("--save-every", type=Cadence(), help="Checkpoint interval from here: 500, 90s, 10m, 2h.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change what does not show in the result: batch.micro_batch, or how often to validate, sample and save.",
)
@keep_options
@skip_option
@accept_options
@device_options
def command(
    run: Path | None,
    step: int | None,
    steps: int | None,
    data: Path | None,
    save_every: tuple[str, str] | None,
    settings: tuple[str, ...],
    keep: int | None,
    keep_every: int | None,
    skip_nonfinite: tuple[str, ...],
    wanted: str | None,
    threads: int | None,
    **accept: bool,
) -> None:
    """Carry on RUN (by default the newest one under runs/) from its newest sound checkpoint, or from that of --step N.

    The result has the same bits as a run that never stopped. A finished run says so; with more --steps it goes on, at the
    learning rate that its schedule ended with. Data, tokenizer, kernels or a device that are not what the checkpoint was made
    with are named and refused, unless --accept-… says otherwise.
    """
    from ptxtrain.cli.session import resume_run

    resume_run(
        run,
        step=step,
        steps=steps,
        data=data,
        overrides=[*settings, *(save_every or ()), *keep_settings(keep, keep_every), *skip_nonfinite],
        accept={name.removeprefix("accept_") for name, given in accept.items() if given},
        wanted=wanted,
        threads=threads,
    )
