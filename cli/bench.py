"""`ptxtrain bench`: how fast this machine runs the kernels, beside peers measured in the same run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ptxtrain.engine.bench import CpuBench
    from ptxtrain.engine.config import Config
    from ptxtrain.engine.device.base import Device
    from ptxtrain.engine.device.cuda import CudaDevice
    from ptxtrain.engine.gpubench import GpuBench
    from ptxtrain.engine.stepbench import StepTimes
    from ptxtrain.engine.trainerbench import TrainerTimes

EPILOG = """\b
Examples:
  ptxtrain bench --cpu-device
  ptxtrain bench --cpu-device --threads 1 --json
  ptxtrain bench --cpu-device --step tiny
  ptxtrain bench --device cuda --step dev --json
  ptxtrain bench --trainer tiny
"""

# What each ratio is held to on two threads; the second needs no bf16 instruction of the processor.
TARGETS = {
    "matmul_bf16_1024_vs_sgemm": 1.0,
    "matmul_bf16_1024_fma_vs_sgemm": 0.45,
    "matmul_bf16_1024_nt_vs_nn": 0.9,
    "matmul_bf16_1024_tn_vs_nn": 0.9,
    "swiglu_vs_copy": 0.7,
    "adamw_vs_copy": 0.7,
    "rmsnorm_vs_copy": 0.7,
    "decode_vs_bandwidth": 0.4,
    "prefill_vs_decode": 10.0,
}


@click.command("bench", epilog=EPILOG)
@click.option(
    "--device",
    "wanted",
    type=click.Choice(["auto", "cuda", "cpu"]),
    help="What to measure. [default: $PTXTRAIN_DEVICE, else auto]",
)
@click.option("--cpu-device", is_flag=True, help="The same as --device cpu.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads of the CPU device [default: 2].")
@click.option(
    "--step",
    "preset",
    metavar="PRESET",
    help="Also time a training step of a preset, kernel by kernel [on a GPU: dev].",
)
@click.option(
    "--trainer", metavar="PRESET", help="Measure the training loop instead: what of a step of a preset is no kernel."
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting of that preset.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    wanted: str | None,
    cpu_device: bool,
    threads: int | None,
    preset: str | None,
    trainer: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure kernels as ratios to peers, all in one run.

    On the CPU device the peers are OpenBLAS for products and the fastest copy for element-wise kernels. On a GPU they are
    cuBLAS through CuPy, PyTorch's scaled_dot_product_attention where PyTorch is installed, and a copy within the GPU's memory.

    Takes a minute or two. Run it on an idle machine: every figure is the best of several tries, but a busy one shows.
    """
    from ptxtrain.engine.config import load_preset
    from ptxtrain.engine.device.choice import open_device

    if cpu_device and wanted == "cuda":
        raise click.UsageError("--cpu-device and --device cuda contradict each other")
    if preset is not None and trainer is not None:
        raise click.UsageError("--step and --trainer are measured apart")
    if overrides and preset is None and trainer is None:
        raise click.UsageError("--set is for the preset of --step or --trainer")
    named = preset or trainer
    config = None if named is None else load_preset(named, overrides)
    device, choice = open_device("cpu" if cpu_device else wanted, threads)
    click.echo(f"device: {choice.kind} ({choice.reason})", err=True)
    if trainer is not None and config is not None:
        _trainer(device, config, as_json)
    elif device.kind == "cuda":
        _gpu(device, config or load_preset("dev"), as_json)  # type: ignore[arg-type]
    else:
        _cpu(threads, config, as_json)


def _note(text: str) -> None:
    click.echo(f"measuring: {text}", err=True)


def _cpu(threads: int | None, config: Config | None, as_json: bool) -> None:
    from ptxtrain.engine import bench, stepbench
    from ptxtrain.engine.device.cpu import CpuDevice

    threads = threads or bench.cpu_threads()
    report = bench.measure(threads, _note)
    step = None
    if config is not None:
        _note(f"a step of {config.name}")
        step = stepbench.measure(CpuDevice(threads), config)
    if as_json:
        _print_json(report.to_json() | ({} if step is None else {"step": step.to_json()}))
        return
    _show_cpu(report)
    if step is not None:
        _show_step(step)


def _trainer(device: Device, config: Config, as_json: bool) -> None:
    from ptxtrain.engine import trainerbench

    _note(f"the training loop on {config.name}")
    times = trainerbench.measure(device, config)
    if as_json:
        _print_json(times.to_json())
    else:
        _show_trainer(times)


def _show_trainer(times: TrainerTimes) -> None:
    """The loop's costs, a line each."""
    threads = "" if times.threads is None else f", {times.threads} threads"
    click.echo(f"the training loop on {times.preset}, way {times.way}{threads}, {times.steps} steps\n")
    rows = [
        ("a step", times.step, ""),
        ("kernels of a step", times.kernels, ""),
        ("the device waited for the host", times.device_wait, ""),
        ("processor time of the loop", times.trainer_cpu, ""),
        ("processor time of the reader", times.reader_cpu, ""),
        ("copying the state for a save", times.snapshot, ""),
        ("what a save adds to a step", times.save_stall, "(aim: no more than the copy)"),
    ]
    for name, seconds, aim in rows:
        if seconds is not None:
            click.echo(f"{name:<36}{1e3 * seconds:10.3f} ms   {aim}".rstrip())
    if times.overhead is not None:
        click.echo(f"{'no kernel':<36}{times.overhead:10.2%}      (aim below 3 %)")


def _show_cpu(report: CpuBench) -> None:
    click.echo(f"CPU device, {report.threads} threads, products of brain floats by {report.products}\n")
    for name, ratio in report.ratios.items():
        click.echo(f"{name:<32}{ratio:7.2f}   (aim {TARGETS[name]:.2f})")
    click.echo()
    for name, rate in report.rates.items():
        unit = "GFLOP/s" if name.startswith(("sgemm", "matmul")) else "tokens/s" if "_tokens" in name else "GB/s"
        click.echo(f"{name:<32}{rate:7.1f}   {unit}")
    click.echo()
    click.echo(f"{'a launch inside a plan':<32}{report.launch_us:7.2f}   us   (aim 5)")
    click.echo(f"{'loading a cached kernel':<32}{report.load_ms:7.2f}   ms   (aim 10)")
    click.echo(f"{'compiling the matmul kernel':<32}{report.compile_s:7.2f}   s    (aim 10)")


def _gpu(device: CudaDevice, config: Config, as_json: bool) -> None:
    from ptxtrain.engine import gpubench

    report = gpubench.measure(device, config, progress=_note)
    if as_json:
        _print_json(report.to_json())
    else:
        _show_gpu(report)


def _show_gpu(report: GpuBench) -> None:
    """A table of rates by group, the step, and the notes."""
    click.echo(f"CUDA device, {report.device}")
    group = ""
    for row in report.rows:
        if row.group != group:
            group = row.group
            click.echo(f"\n{group:<56}{'ours':>9}{'peer':>9}{'ratio':>7}")
        peer = "-" if row.peer is None else f"{row.peer:.1f}"
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        click.echo(f"  {row.case:<54}{row.ours:9.1f}{peer:>9}{ratio:>7}   {row.unit}  {row.peer_name}".rstrip())
    if report.step is not None:
        _show_step(report.step)
    for note in report.notes:
        click.echo(f"note: {note}")


def _show_step(step: StepTimes) -> None:
    """Tokens a second of a step, then its kernels, most time first."""
    click.echo(
        f"\na step of {step.preset}, way {step.way}: {step.tokens:,} tokens in {1e3 * step.median:.1f} ms (best "
        f"{1e3 * step.best:.1f}), {step.tokens_per_second:,.0f} tokens/s, {step.tflops:.3f} TFLOP/s"
    )
    total = sum(seconds for _, seconds in step.kernels.values())
    click.echo(f"  {'kernel':<44}{'launches':>9}{'ms':>10}{'share':>8}")
    for name, (count, seconds) in step.kernels.items():
        click.echo(f"  {name:<44}{count:9}{1e3 * seconds:10.2f}{seconds / total:8.1%}")


def _print_json(report: dict[str, Any]) -> None:
    """One object on stdout."""
    click.echo(json.dumps(report, indent=2))
