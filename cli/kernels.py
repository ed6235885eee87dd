"""`ptxtrain kernels`: the shipped kernels, as text in every form, assembled, and checked."""

from __future__ import annotations

import click

EPILOG = """\b
Examples:
  ptxtrain kernels list
  ptxtrain kernels show swiglu_forward
  ptxtrain kernels show matmul --as llvm
  ptxtrain kernels check
"""


@click.group("kernels", epilog=EPILOG)
def command() -> None:
    """List, print and check the shipped kernels."""


@command.command("list")
def list_command() -> None:
    """List the kernels with the first line of each one's contract, and the functions of the kit that call them.

    \b
    Example:
      ptxtrain kernels list
    """
    from ptxtrain.engine import kernelbook

    rows = kernelbook.kernels()
    functions = kernelbook.functions()
    width = max(len(name) for name in (*(k.stem for k in rows), *(name for name, _ in functions))) + 2
    for kernel in rows:
        click.echo(f"{kernel.stem:<{width}}{kernel.summary}")
    click.echo("\nFunctions on arrays of your own, in the Python module ptxtrain.engine.kit:")
    for name, summary in functions:
        click.echo(f"{name:<{width}}{summary}")


@command.command("show")
@click.argument("kernel")
@click.option(
    "--as",
    "form",
    type=click.Choice(["ptx", "llvm", "asm"]),
    default="ptx",
    show_default=True,
    help="PTX, the CPU device's LLVM IR, or this processor's assembly.",
)
def show_command(kernel: str, form: str) -> None:
    """Print a kernel as it is loaded.

    \b
    Example:
      ptxtrain kernels show rmsnorm_forward --as asm
    """
    from ptxtrain.engine import kernelbook

    click.echo(kernelbook.show(kernel, form))


@command.command("check")
@click.argument("kernel", nargs=-1)
def check_command(kernel: tuple[str, ...]) -> None:
    """Assemble kernels for every architecture (where ptxas is installed) and run them in the checked mode.

    \b
    Example:
      ptxtrain kernels check matmul swiglu_forward
    """
    from ptxtrain.engine import kernelbook

    failed = 0
    for line in kernelbook.check(kernel):
        click.echo(line.text)
        failed += not line.passed
    if failed:
        raise click.exceptions.Exit(1)
