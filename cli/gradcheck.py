"""`ptxtrain gradcheck`: prove every gradient on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ptxtrain.cli.options import checked_option, way_option

if TYPE_CHECKING:
    from rich.table import Table

    from ptxtrain.engine import fastcheck
    from ptxtrain.engine.device.base import Device
    from ptxtrain.engine.gradcheck import Report

EPILOG = """\b
Example:
  ptxtrain gradcheck --device cpu
  ptxtrain gradcheck --json > report.json
  ptxtrain gradcheck --fast
  ptxtrain gradcheck --fast --way matmul=bf16
"""


@click.command("gradcheck", epilog=EPILOG)
@click.option(
    "--device",
    "wanted",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default=None,
    help="Where to run. [default: $PTXTRAIN_DEVICE, else auto]",
)
@click.option("--fast", is_flag=True, help="Check the fast kernels instead, each against its naive twin and float64.")
@way_option
@checked_option
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.pass_context
def command(
    ctx: click.Context, wanted: str | None, fast: bool, way: str | None, checked: bool | None, as_json: bool
) -> None:
    """Check every gradient against differences of the loss, and learn one batch by heart.

    A model of 2 layers with awkward sizes runs the naive kernels in f32. Each parameter tensor is nudged along its
    gradient and along a random direction, and the change of the loss is compared with what the gradient says. Exit code
    1 if anything is off.

    With --fast the kernels that training runs are checked: each at odd shapes, with an error against float64 of at most twice its
    naive twin's; then a model of 2 layers, whose loss and gradients may be twice as far from f32 as the naive bf16 ones are.
    --way leaves operations out.
    """
    from ptxtrain.engine import gradcheck
    from ptxtrain.engine.device.choice import open_device

    if way is not None and not fast:
        raise click.UsageError("--way needs --fast: the gradient check itself runs the naive kernels in f32")

    device, choice = open_device(wanted, checked=checked)
    click.echo(f"device: {choice.kind} ({choice.reason})", err=True)
    if fast:
        _run_fast(ctx, device, way, as_json)
        return
    report = gradcheck.run(device, progress=_show_progress if sys.stderr.isatty() else None)
    if as_json:
        click.echo(report.to_json())
    else:
        _print(report)
    if not report.passed:
        ctx.exit(1)


def _run_fast(ctx: click.Context, device: Device, way: str | None, as_json: bool) -> None:
    from ptxtrain.engine import fastcheck, ways

    chosen = "fast" if way is None else ways.changed("fast", way)
    show = (lambda name: click.echo(f"checking {name} …", err=True)) if sys.stderr.isatty() else None
    report = fastcheck.run(device, chosen, progress=show)
    if as_json:
        click.echo(report.to_json())
    else:
        _print_fast(report)
    if not report.passed:
        ctx.exit(1)


def _print_fast(report: fastcheck.Report) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("kernel", "case")
    for title in ("error", "allowed", "ratio"):
        table.add_column(title, justify="right")
    table.add_column("verdict")
    for row in report.rows:
        numbers = (f"{row.error:.2e}", f"{row.allowed:.2e}", f"{row.ratio:.2f}")
        table.add_row(row.what, row.case, *numbers, _verdict(row.passed))
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    console.print(table)
    console.print("error: the norm of what is off, kernels against float64, the model against its f32 way")
    console.print("allowed: twice the naive kernels' own, plus a few roundings for kernels")
    failed = sum(not row.passed for row in report.rows)
    if report.passed:
        console.print(f"gradcheck --fast passed: all {len(report.rows)} rows, way {report.way}")
    else:
        console.print(f"gradcheck --fast FAILED: {failed} of {len(report.rows)} rows are off, way {report.way}")


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
