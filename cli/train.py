"""`ptxtrain train`: a run from a preset, from its first step to its last."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ptxtrain.cli.options import (
    Cadence,
    checked_option,
    device_options,
    keep_options,
    keep_settings,
    skip_option,
    way_option,
)

if TYPE_CHECKING:
    from ptxtrain.engine.config import Config

EPILOG = """\b
Examples:
  ptxtrain train --preset tiny
  ptxtrain train --preset dev --data datasets/books --save-every 10m
  ptxtrain train --preset tiny --set optimizer.lr=3e-3 --set batch.micro_batch=4 --steps 100
  ptxtrain train --preset tiny --way attention=bf16
  ptxtrain train --preset dev --dry-run
"""


@click.command("train", epilog=EPILOG)
@click.option(
    "--preset", required=True, metavar="NAME|FILE", help="A preset that comes along (tiny, dev), or a TOML file."
)
@click.option("--data", type=click.Path(path_type=Path), metavar="DIR", help="A dataset made by `ptxtrain tokenize`.")
@click.option("--run", "run_path", type=click.Path(path_type=Path), metavar="DIR", help="[default: runs/PRESET-TIME]")
@click.option("--steps", type=click.IntRange(1), help="Length of the run, schedule included. [default: the preset's]")
@click.option("--save-every", type=Cadence(), help="Checkpoint interval: 500, 90s, 10m, 2h. [default: the preset's]")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key of the preset; repeatable.")
@keep_options
@skip_option
@way_option
@device_options
@checked_option
@click.option("--dry-run", is_flag=True, help="Print the resolved config and what it needs, and stop.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print it as one JSON object.")
def command(
    preset: str,
    data: Path | None,
    run_path: Path | None,
    steps: int | None,
    save_every: tuple[str, str] | None,
    settings: tuple[str, ...],
    keep: int | None,
    keep_every: int | None,
    skip_nonfinite: tuple[str, ...],
    way: str | None,
    wanted: str | None,
    threads: int | None,
    checked: bool | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train a model.

    Without --data the preset's own dataset is used if it is there; otherwise the Python standard library's sources on this
    machine are tokenised at the preset's vocabulary. Ctrl+C saves and exits with code 2; `ptxtrain resume` then carries on with
    the same bits. The last line on stdout is the digest of weights, optimizer state, step and place in the data.
    """
    from ptxtrain.engine.config import load_preset
    from ptxtrain.engine.ways import changed

    overrides = [*settings, *([f"train.steps={steps}"] if steps else []), *(save_every or ())]
    overrides += [*keep_settings(keep, keep_every), *skip_nonfinite]
    config = load_preset(preset, overrides)
    if way is not None:
        train = dataclasses.replace(config.train, way=changed(config.train.way, way))
        config = dataclasses.replace(config, train=train)
    if dry_run:
        needs = describe(config)
        click.echo(json.dumps(needs, indent=2, ensure_ascii=False) if as_json else as_text(needs))
        return
    if as_json:
        raise click.UsageError("--json needs --dry-run")
    from ptxtrain.cli.session import start_run

    start_run(config, data, run_path, wanted=wanted, threads=threads, checked=checked)


def describe(config: Config) -> dict[str, Any]:
    """The resolved config and what a run of it needs: parameters, bytes of memory and disk, tokens, operations."""
    from ptxtrain.engine.config import flops_per_token, parameter_count, to_dict, tokens_per_step
    from ptxtrain.engine.progress import FLOPS_FORMULA
    from ptxtrain.engine.step import memory_plan
    from ptxtrain.engine.ways import resolve

    parameters = parameter_count(config.model)
    memory = memory_plan(config, config.train.way)
    tokens = tokens_per_step(config) * config.train.steps
    return {
        "config": to_dict(config),
        "ways": dataclasses.asdict(resolve(config.model, config.train.way)),
        "parameters": parameters,
        "memory": {**memory, "total": sum(memory.values())},
        "checkpoint_bytes": 12 * parameters,
        "tokens_per_step": tokens_per_step(config),
        "tokens": tokens,
        "flops_per_token": flops_per_token(config.model),
        "flops_formula": FLOPS_FORMULA,
        "flops": flops_per_token(config.model) * tokens,
    }


def as_text(needs: dict[str, Any]) -> str:
    """The same for people: the config as a preset file, then a table."""
    from ptxtrain.cli.display import amount, size
    from ptxtrain.engine.config import from_dict, to_toml

    config = dict(needs["config"])
    lines = [to_toml(from_dict(config)).rstrip()]
    batch = config["batch"]
    rows = [
        ("parameters", f"{needs['parameters']:,}"),
        ("step", f"{batch['sequences'] // batch['micro_batch']} micro-batches, {needs['tokens_per_step']:,} tokens"),
        ("run", f"{config['train']['steps']:,} steps, {needs['tokens']:,} tokens, {needs['flops']:.3g} FLOP"),
        ("a token", f"{amount(needs['flops_per_token'])} FLOP = {needs['flops_formula']}"),
        (
            "a checkpoint",
            f"{size(needs['checkpoint_bytes'])} on disk, {config['train']['keep']} kept and the best one",
        ),
        *((f"memory, {kind}", size(count)) for kind, count in needs["memory"].items()),
    ]
    rows += [("note", note) for note in needs["ways"]["notes"]]
    return "\n".join([*lines, "", *(f"{name:<24}{value}" for name, value in rows)])
