"""Train the same model on the GPU here and in PyTorch, in one run: tokens a second of whole steps on the same batch.

    python tests/peers/pytorch_gpu.py [--preset dev] [--set KEY=VALUE] [--rounds N] [--json]

PyTorch runs under bf16 autocast, eager and compiled (`torch.compile`), in micro-batches of the preset's size, with clip and
its fused AdamW. The contenders take turns. Needs `pip install torch` with CUDA; without it ours is measured alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from typing import Any

from turns import kernels, note, show, summary, take_turns

from ptxtrain.engine import init
from ptxtrain.engine.config import Config, flops_per_token, load_preset
from ptxtrain.engine.device.cuda import CudaDevice
from ptxtrain.engine.stepbench import BatchStep, random_batch

OURS = "ptxtrain fast"


def measure(config: Config, rounds: int, steps: int, kind: str = "cuda") -> dict[str, Any]:
    """Everything that is printed. `kind` is where PyTorch runs; "cpu" tries the script without a GPU."""
    tokens, targets = random_batch(config)
    weights = init.initial_weights(config.model, 1)
    device = CudaDevice()
    ours = BatchStep(device, config, weights, tokens, targets)
    report: dict[str, Any] = {
        "preset": config.name,
        "batch": f"{config.batch.sequences} x {config.model.context}, {config.batch.micro_batch} at a time",
        "where": device.name,
        "notes": [],
    }
    contenders: dict[str, Callable[[], float]] = {OURS: ours}
    losses = {OURS: ours()}
    for name, compiled in (("pytorch bf16", False), ("pytorch bf16 compiled", True)):
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            report["notes"].append("PyTorch is not installed: no peer (pip install torch)")
            break
        if kind == "cuda" and not torch.cuda.is_available():
            report["notes"].append("this PyTorch sees no GPU: no peer")
            break
        from pytorch_model import training_step

        report["pytorch"] = torch.__version__
        torch.set_float32_matmul_precision("high")
        note(f"{name}: first step")
        size = config.batch.micro_batch
        step = training_step(
            config, weights, tokens, targets, device=kind, bf16=True, compiled=compiled, micro_batch=size
        )  # fmt: skip
        try:
            losses[name] = step()
        except Exception as error:
            report["notes"].append(f"{name} does not work here: {str(error).splitlines()[0]}")
            continue
        contenders[name] = step
    note("taking turns")
    report |= summary(take_turns(contenders, rounds, steps), losses, tokens.size)
    for step_report in report["steps"].values():
        rate = step_report["tokens_per_second"] * flops_per_token(config.model)
        step_report["tflops"] = round(rate / 1e12, 2)
    note("where our time goes")
    report["kernels"] = kernels(ours.profile())
    return report


def main() -> None:
    text, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=text, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="dev")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="steps of each contender in a round")
    parser.add_argument("--torch-on", choices=["cuda", "cpu"], default="cuda", help="cpu: to try this script")
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args()
    config = load_preset(options.preset, options.overrides)
    report = measure(config, options.rounds, options.steps, options.torch_on)
    if options.as_json:
        print(json.dumps(report, indent=2))
    else:
        show(report)


if __name__ == "__main__":
    main()
