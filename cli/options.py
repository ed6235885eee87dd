"""Options and values that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

HELP_WIDTH = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

_CADENCE = re.compile(r"(\d+)|(\d+(?:\.\d+)?)([smh])")
_MINUTES = {"s": 1 / 60, "m": 1.0, "h": 60.0}


class Cadence(click.ParamType[Any]):
    """`500` steps, or a time: `90s`, `10m`, `2h`. Becomes the settings that say so."""

    name = "STEPS|TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        match = _CADENCE.fullmatch(str(value))
        if not match:
            self.fail(f"{value!r} is neither a number of steps (500) nor a time (90s, 10m, 2h)", param, ctx)
        if match[1]:
            return f"train.save_every={match[1]}", "train.save_minutes=0"
        return "train.save_every=0", f"train.save_minutes={float(match[2]) * _MINUTES[match[3]]:g}"


def device_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--device` as `wanted` and `--threads` as `threads`."""
    function = click.option(
        "--threads",
        type=click.IntRange(1, 1024),
        help="Threads of the CPU device; the result does not depend on it. [default: $PTXTRAIN_THREADS, else all cores]",
    )(function)
    return click.option(
        "--device",
        "wanted",
        type=click.Choice(["auto", "cuda", "cpu"]),
        help="Where to run. [default: $PTXTRAIN_DEVICE, else auto]",
    )(function)


def keep_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--keep` as `keep` and `--keep-every` as `keep_every`; `keep_settings` makes settings of them."""
    function = click.option(
        "--keep-every",
        type=click.IntRange(0),
        metavar="M",
        help="Keep checkpoints of each M-th step for good; 0: none.",
    )(function)
    return click.option(
        "--keep",
        type=click.IntRange(2),
        metavar="N",
        help="Newest checkpoints to keep, besides the best by validation.",
    )(function)


def keep_settings(keep: int | None, keep_every: int | None) -> list[str]:
    """What `keep_options` ask for, as settings."""
    wanted = (("keep", keep), ("keep_every", keep_every))
    return [f"train.{key}={value}" for key, value in wanted if value is not None]


def accept_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--accept-data`, `-tokenizer`, `-kernels` and `-device` as `accept_data`, …; see `engine.identity`."""
    for what, help_text in (
        ("device", "Go on although the device is another kind than the run's: the bits will not be an unbroken run's."),
        ("kernels", "Go on although the kernels were changed; likewise."),
        ("tokenizer", "Go on although the data's tokenizer is another; text is still decoded by the run's own copy."),
        ("data", "Go on although the data were changed: at the same place if they begin alike, else at their start."),
    ):
        function = click.option(f"--accept-{what}", is_flag=True, help=help_text)(function)
    return function


def checked_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--checked` as `checked`: True, or None to leave it to the environment."""
    return click.option(
        "--checked",
        is_flag=True,
        default=None,
        help="Run the kernels on the CPU device and check every access, barrier and warp collective: many times slower, the same "
        "bits; what is found ends the run with exit code 1. [default: $PTXTRAIN_CHECKED]",
    )(function)


def skip_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--skip-nonfinite` as `skip_nonfinite`: the settings that say so, one or none."""
    return click.option(
        "--skip-nonfinite",
        type=click.IntRange(0),
        metavar="N",
        callback=lambda _context, _param, value: () if value is None else (f"train.skip_nonfinite={value}",),
        help="Let up to N steps whose loss or gradient norm is not finite go without an update, instead of stopping.",
    )(function)


def way_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--way` as `way`."""
    return click.option(
        "--way",
        metavar="WAY|OP=WAY,…",
        help="How operations run: f32, bf16 (naive kernels) or fast; matmul=bf16,attention=bf16 puts twins in place of fast "
        "kernels. Operations: matmul, attention, cross_entropy. [default: the preset's]",
    )(function)
