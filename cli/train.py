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
@click.option("--dry-run", is_flag=True, help="Print the resolved config, what it needs, and how long it would take.")
@click.option("--no-measure", "measure", flag_value=False, default=True, help="With --dry-run: do without the time.")
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
    measure: bool,
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
        from ptxtrain.cli.session import find_dataset
        from ptxtrain.engine.dryrun import describe
        from ptxtrain.engine.rundir import refuse_existing

        # What the run itself would refuse at once. Without --data nothing is looked for: the sample corpus may not be made yet.
        if run_path is not None:
            refuse_existing(run_path)
        if data is not None:
            _, config = find_dataset(config, data)
        needs = describe(config)
        needs["estimate"] = _estimate(config, wanted, threads) if measure else None
        click.echo(json.dumps(needs, indent=2, ensure_ascii=False) if as_json else as_text(needs))
        return
    if not measure:
        raise click.UsageError("--no-measure needs --dry-run")
    if as_json:
        raise click.UsageError("--json needs --dry-run")
    from ptxtrain.cli.session import start_run

    start_run(config, data, run_path, wanted=wanted, threads=threads, checked=checked)


def _estimate(config: Config, wanted: str | None, threads: int | None) -> dict[str, Any] | None:
    """The time of a run, measured on the device that it would take; None where that does not work, with the reason on stderr."""
    from ptxtrain.cli.main import say
    from ptxtrain.engine.device.choice import open_device
    from ptxtrain.engine.dryrun import estimate
    from ptxtrain.engine.errors import DeviceError
    from ptxtrain.engine.preflight import missing

    try:
        device, choice = open_device(wanted, threads)
        say(f"measuring a few steps on {device.name} ({choice}) …")
        if (why := missing(config, device)) is not None:
            say(f"memory: {why}; training would go on with a smaller micro-batch, or stop before step 1")
        return dataclasses.asdict(estimate(config, device))
    except (DeviceError, MemoryError) as error:
        say(f"no estimate of the time: {error}")
        return None


def as_text(needs: dict[str, Any]) -> str:
    """The same for people: the config as a preset file, then a table."""
    from ptxtrain.cli.display import amount, duration, size, tflops
    from ptxtrain.engine.config import from_dict, to_toml

    config, time = from_dict(needs["config"]), needs["estimate"]
    micro_batches = config.batch.sequences // config.batch.micro_batch
    rows = [
        ("parameters", f"{needs['parameters']:,}"),
        ("step", f"{micro_batches} micro-batches, {needs['tokens_per_step']:,} tokens"),
        ("run", f"{config.train.steps:,} steps, {needs['tokens']:,} tokens, {needs['flops']:.3g} FLOP"),
        ("warm-up", f"{needs['warmup_steps']:,} steps, then {config.optimizer.schedule}"),
        ("a token", f"{amount(needs['flops_per_token'])} FLOP = {needs['flops_formula']}"),
        ("a checkpoint", f"{size(needs['checkpoint_bytes'])} on disk, {config.train.keep} kept and the best one"),
        (
            "disk",
            f"{size(needs['disk_bytes'])} for {needs['checkpoints_at_once']} checkpoints at most, one being written",
        ),
        *((f"memory, {kind}", size(count)) for kind, count in needs["memory"].items()),
    ]
    if time is not None:
        rows += [
            ("time", f"{duration(time['seconds'])} for the steps alone, on {time['device']}"),
            (
                "a step's time",
                f"{time['step_seconds']:.3g} s, {amount(time['tokens_per_second'])} tokens/s, "
                f"{tflops(time['flops_per_second'])} TFLOP/s, by micro-batches of {time['sequences']}",
            ),
        ]
    rows += [("note", note) for note in needs["ways"]["notes"]]
    return "\n".join([to_toml(config), *(f"{name:<24}{value}" for name, value in rows)])
