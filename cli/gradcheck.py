"""`ptxtrain gradcheck`: prove every gradient on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

    from ptxtrain.engine.gradcheck import Report

EPILOG = """\b
Example:
  ptxtrain gradcheck --device cpu
  ptxtrain gradcheck --json > report.json
"""


@click.command("gradcheck", epilog=EPILOG)
@click.option(
    "--device",
    "wanted",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default=None,
    help="Where to run. [default: $PTXTRAIN_DEVICE, else auto]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.pass_context
def command(ctx: click.Context, wanted: str | None, as_json: bool) -> None:
    """Check every gradient against differences of the loss, and learn one batch by heart.

    A model of 2 layers with awkward sizes runs the naive kernels in f32. Each parameter tensor is nudged along its
    gradient and along a random direction, and the change of the loss is compared with what the gradient says. Exit code
    1 if anything is off.
    """
    from ptxtrain.engine import gradcheck
    from ptxtrain.engine.device.choice import open_device

    device, choice = open_device(wanted)
    click.echo(f"device: {choice.kind} ({choice.reason})", err=True)
    report = gradcheck.run(device, progress=_show_progress if sys.stderr.isatty() else None)
    if as_json:
        click.echo(report.to_json())
    else:
        _print(report)
    if not report.passed:
        ctx.exit(1)


def _show_progress(done: int, of: int) -> None:
    """One line on the terminal, rewritten and wiped at the end."""
    if done == of:
        click.echo("\r\x1b[K", err=True, nl=False)
    elif done % 4 == 0:
        click.echo(f"\rchecking {100 * done // of:3d}%", err=True, nl=False)


def _print(report: Report) -> None:
    from rich.console import Console

    from ptxtrain.engine import gradcheck

    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    console.print(_table(report))
    initial = gradcheck.initial_loss_is_right(report.loss_at_init)
    learned = report.memorised_loss < gradcheck.MEMORISED_BELOW
    console.print(
        f"loss at init    {report.loss_at_init:8.5f}  {_verdict(initial)}  (in float64 {gradcheck.REFERENCE_LOSS:.5f}; "
        f"ln {gradcheck.MODEL.vocab_size} = {gradcheck.UNIFORM_LOSS:.5f})"
    )
    console.print(
        f"memorised loss  {report.memorised_loss:8.5f}  {_verdict(learned)}  (one batch, {gradcheck.MEMORISE_STEPS} steps; "
        f"must be below {gradcheck.MEMORISED_BELOW})"
    )
    failed = sum(not row.passed for row in report.rows)
    if report.passed:
        console.print(f"gradcheck passed: all {len(report.rows)} rows")
    else:
        console.print(f"gradcheck FAILED: {failed} of {len(report.rows)} rows are off")


def _table(report: Report) -> Table:
    from rich.table import Table

    table = Table("tensor", "direction")
    for title in ("analytic", "numeric", "relative error"):
        table.add_column(title, justify="right")
    table.add_column("verdict")
    for row in report.rows:
        table.add_row(
            row.tensor,
            row.direction,
            f"{row.analytic: .6e}",
            f"{row.numeric: .6e}",
            f"{row.error:.1e}",
            _verdict(row.passed),
        )
    return table


def _verdict(passed: bool) -> str:
    return "[green]ok[/]" if passed else "[red]FAIL[/]"
