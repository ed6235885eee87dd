"""`ptxtrain bench`: how fast this machine runs the kernels, beside peers measured in the same run."""

from __future__ import annotations

import json

import click

EPILOG = """\b
Examples:
  ptxtrain bench --cpu-device
  ptxtrain bench --cpu-device --threads 1 --json
"""

# What each ratio is held to on two threads; the second needs no bf16 instruction of the processor.
TARGETS = {
    "matmul_bf16_1024_vs_sgemm": 1.0,
    "matmul_bf16_1024_fma_vs_sgemm": 0.45,
    "swiglu_vs_copy": 0.7,
    "adamw_vs_copy": 0.7,
    "rmsnorm_vs_copy": 0.7,
}


@click.command("bench", epilog=EPILOG)
@click.option("--cpu-device", is_flag=True, help="Measure the CPU device (what there is to measure without a GPU).")
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads to measure with [default: 2].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(cpu_device: bool, threads: int | None, as_json: bool) -> None:
    """Measure kernels as ratios to peers: OpenBLAS for products, the fastest copy for element-wise kernels.

    Takes about a minute. Run it on an idle machine: every figure is the best of several tries, but a busy one shows.
    """
    from ptxtrain.engine import bench

    if not cpu_device:
        raise click.UsageError("say what to measure: --cpu-device")
    report = bench.measure(threads or bench.cpu_threads(), lambda text: click.echo(f"measuring: {text}", err=True))
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
        return
    click.echo(f"CPU device, {report.threads} threads, products of brain floats by {report.products}\n")
    for name, ratio in report.ratios.items():
        click.echo(f"{name:<32}{ratio:7.2f}   (aim {TARGETS[name]:.2f})")
    click.echo()
    for name, rate in report.rates.items():
        unit = "GFLOP/s" if name.startswith(("sgemm", "matmul")) else "GB/s"
        click.echo(f"{name:<32}{rate:7.1f}   {unit}")
    click.echo()
    click.echo(f"{'a launch inside a plan':<32}{report.launch_us:7.2f}   us   (aim 5)")
    click.echo(f"{'loading a cached kernel':<32}{report.load_ms:7.2f}   ms   (aim 10)")
    click.echo(f"{'compiling the matmul kernel':<32}{report.compile_s:7.2f}   s    (aim 10)")
