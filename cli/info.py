"""`ptxtrain info`: what this machine has and what would be chosen on it."""

from __future__ import annotations

import json

import click

from ptxtrain.cli.options import device_options

EPILOG = """\b
Examples:
  ptxtrain info
  ptxtrain info --json
  ptxtrain info --device cuda
"""


@click.command("info", epilog=EPILOG)
@device_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(wanted: str | None, threads: int | None, as_json: bool) -> None:
    """Show devices, versions, CPU features, and each choice with its reason."""
    from importlib.metadata import version

    from ptxtrain.engine.config import preset_names
    from ptxtrain.engine.device.choice import facts

    lines = [("ptxtrain", version("ptxtrain")), *facts(wanted, threads), ("presets", ", ".join(preset_names()))]
    if as_json:
        click.echo(json.dumps(dict(lines), indent=2))
        return
    width = max(len(name) for name, _ in lines) + 2
    click.echo("\n".join(f"{name:<{width}}{value}" for name, value in lines))
