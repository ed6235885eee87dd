"""Train the same model on the CPU here and in PyTorch, in one run: tokens a second, ratios, and where our time goes.

    python tests/peers/pytorch_cpu.py [--preset tiny|dev] [--rounds N] [--threads N] [--json]

Both start from the same weights and see the same batch; a step is forward, backward, clip at a global norm of 1, AdamW and
the loss read back. PyTorch runs in f32 and under bf16 autocast, each eager and compiled (`torch.compile`, which needs a C++
compiler). The contenders take turns, a few steps each; a figure is the median of all its steps, beside its best. PyTorch's
threads spin while they wait for each other, so on a machine with other work its median suffers more than ours: there the
bests, or `--threads 1 --cpu-time`, are the fairer comparison. Needs `pip install torch`; without it our part is measured alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

from turns import kernels, note, show, summary, take_turns

from ptxtrain.engine import init
from ptxtrain.engine.config import Config, load_preset
from ptxtrain.engine.device.cpu import CpuDevice
from ptxtrain.engine.stepbench import BatchStep, random_batch

# The batch of a step. PyTorch takes it at once; ours in the preset's micro-batches and leaves, where they divide it.
SHAPES = {"tiny": (), "dev": ("sequences=4", "micro_batch=4", "leaves=1")}
WAYS = {  # bf16, compiled
    "pytorch f32": (False, False),
    "pytorch bf16": (True, False),
    "pytorch f32 compiled": (False, True),
    "pytorch bf16 compiled": (True, True),
}
OURS = "ptxtrain fast"


def measure(
    config: Config, threads: int, rounds: int, steps: int, ways: list[str], cpu_time: bool = False
) -> dict[str, Any]:
    """Everything that is printed."""
    tokens, targets = random_batch(config)
    weights = init.initial_weights(config.model, 1)
    device = CpuDevice(threads)
    ours = BatchStep(device, config, weights, tokens, targets)
    report: dict[str, Any] = {
        "preset": config.name,
        "batch": f"{config.batch.sequences} x {config.model.context}",
        "where": device.name,
        "threads": threads,
        "notes": [],
    }
    contenders: dict[str, Callable[[], float]] = {OURS: ours}
    losses = {OURS: ours()}
    try:
        import torch
    except ImportError:
        report["notes"].append("PyTorch is not installed: no peer (pip install torch)")
        ways = []
    else:
        from pytorch_model import training_step

        torch.set_num_threads(threads)
        report["pytorch"] = torch.__version__
    for name in ways:
        note(f"{name}: first step")
        bf16, compiled = WAYS[name]
        step = training_step(config, weights, tokens, targets, bf16=bf16, compiled=compiled)
        try:
            losses[name] = step()
        except Exception as error:
            if not compiled:
                raise
            report["notes"].append(f"torch.compile does not work here: {str(error).splitlines()[0]}")
            continue
        contenders[name] = step
    note("taking turns")
    if cpu_time:
        report["notes"].append("seconds are those that the process spent on the processor, not those that passed")
    clock = time.process_time if cpu_time else time.perf_counter
    report |= summary(take_turns(contenders, rounds, steps, clock), losses, tokens.size)
    note("where our time goes")
    report["kernels"] = kernels(ours.profile())
    device.close()
    return report


def main() -> None:
    text, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=text, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=list(SHAPES), default="tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of each contender in a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="PyTorch's contenders")
    parser.add_argument("--cpu-time", action="store_true", help="count the process's seconds on the processor")
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args()
    if options.cpu_time and options.threads > 1:
        parser.error("--cpu-time needs --threads 1: threads that wait for each other spin")
    config = load_preset(options.preset, SHAPES[options.preset])
    report = measure(config, options.threads, options.rounds, options.steps, options.ways, options.cpu_time)
    if options.as_json:
        print(json.dumps(report, indent=2))
    else:
        show(report)


if __name__ == "__main__":
    main()
