"""Train the same model on the CPU here and in PyTorch, in one run: tokens a second, ratios, and where our time goes.

    python tests/peers/pytorch_cpu.py [--preset tiny|dev] [--rounds N] [--threads N] [--json]

Both start from the same weights and see the same batch; a step is forward, backward, clip at a global norm of 1, AdamW and
the loss read back. PyTorch runs in f32 and under bf16 autocast, each eager and compiled (`torch.compile`, which needs a C++
compiler). The contenders take turns, a few steps each, so that all of them meet the same moments of a busy machine; each
figure is the median of all its steps, beside its best. Needs `pip install torch`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from ours import OurStep

from ptxtrain.engine import init
from ptxtrain.engine.config import Config, load_preset
from ptxtrain.engine.device.cpu import CpuDevice, processor_name

# Sequences of the batch. PyTorch takes it at once; ours in the preset's micro-batches and leaves, where they divide it.
SHAPES = {"tiny": (16, []), "dev": (4, ["sequences=4", "micro_batch=4", "leaves=1"])}
WAYS = {"pytorch f32": (False, False), "pytorch bf16": (True, False)} | {
    "pytorch f32 compiled": (False, True),
    "pytorch bf16 compiled": (True, True),
}
OURS = "ptxtrain fast"

Batch = tuple[np.ndarray[Any, np.dtype[np.int32]], np.ndarray[Any, np.dtype[np.int32]]]


def shape(preset: str) -> Config:
    """The preset at the batch that is measured."""
    sequences, overrides = SHAPES[preset]
    config = load_preset(preset, overrides)
    assert config.batch.sequences == sequences
    return config


def random_batch(config: Config, seed: int = 0) -> Batch:
    """Tokens and the tokens that follow them, each [S, T]."""
    size = (config.batch.sequences, config.model.context + 1)
    text = np.random.default_rng(seed).integers(0, config.model.vocab_size, size).astype(np.int32)
    return text[:, :-1].copy(), text[:, 1:].copy()


def peer_step(config: Config, weights: Any, batch: Batch, *, bf16: bool, compiled: bool) -> Callable[[], float]:
    """PyTorch's step on the batch."""
    import torch
    from pytorch_model import Llama, optimizer

    model = Llama(config.model)
    model.load_flat(weights)
    update = optimizer(model, config.optimizer)
    tokens, targets = (torch.from_numpy(part).long() for part in batch)
    loss_of: Any = torch.compile(model) if compiled else model

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = loss_of(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        update.step()
        update.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def take_turns(contenders: dict[str, Callable[[], float]], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each contender's steps; a round gives each of them one step that does not count, then `steps`."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, step in contenders.items():
            step()
            for _ in range(steps):
                start = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - start)
    return times


def measure(preset: str, threads: int, rounds: int, steps: int, ways: list[str]) -> dict[str, Any]:
    """Everything that is printed."""
    config = shape(preset)
    batch, weights = random_batch(config), init.initial_weights(config.model, 1)
    report: dict[str, Any] = {
        "preset": preset,
        "batch": f"{config.batch.sequences} x {config.model.context}",
        "processor": processor_name(),
        "threads": threads,
    }
    device = CpuDevice(threads)
    ours = OurStep(device, config, weights, *batch)
    contenders: dict[str, Callable[[], float]] = {OURS: ours}
    losses = {OURS: ours()}
    try:
        import torch
    except ImportError:
        report["note"] = "PyTorch is not installed: no peer (pip install torch)"
    else:
        torch.set_num_threads(threads)
        report["pytorch"] = torch.__version__
        for name in ways:
            note(f"{name}: first step")
            bf16, compiled = WAYS[name]
            step = peer_step(config, weights, batch, bf16=bf16, compiled=compiled)
            try:
                losses[name] = step()
            except Exception as error:
                if not compiled:
                    raise
                report["note"] = f"torch.compile does not work here: {str(error).splitlines()[0]}"
                continue
            contenders[name] = step
    note("taking turns")
    times = take_turns(contenders, rounds, steps)
    tokens = batch[0].size
    report["steps"] = {
        name: {
            "first_loss": round(losses[name], 4),
            "median_ms": round(1e3 * statistics.median(taken), 1),
            "best_ms": round(1e3 * min(taken), 1),
            "tokens_per_second": round(tokens / statistics.median(taken)),
            "best_tokens_per_second": round(tokens / min(taken)),
        }
        for name, taken in times.items()
    }
    report["ratios"] = {  # of times: above 1 ours is faster
        name: {
            "median": round(statistics.median(taken) / statistics.median(times[OURS]), 2),
            "best": round(min(taken) / min(times[OURS]), 2),
        }
        for name, taken in times.items()
        if name != OURS
    }
    note("where our time goes")
    report["kernels"] = {
        name: {"launches": count, "ms": round(1e3 * seconds, 2)} for name, (count, seconds) in ours.profile().items()
    }
    device.close()
    return report


def note(text: str) -> None:
    print(f"measuring: {text}", file=sys.stderr, flush=True)


def show(report: dict[str, Any]) -> None:
    print(f"{report['preset']}, batch {report['batch']}, {report['threads']} threads of {report['processor']}")
    if "pytorch" in report:
        print(f"PyTorch {report['pytorch']}")
    if "note" in report:
        print(f"note: {report['note']}")
    print(f"\n{'':24}{'tokens/s':>10}{'best':>10}{'ms a step':>11}{'first loss':>12}{'ours is':>10}{'at best':>9}")
    for name, step in report["steps"].items():
        ratio = report["ratios"].get(name)
        faster = f"{ratio['median']:9.2f}x{ratio['best']:8.2f}x" if ratio else ""
        print(
            f"{name:24}{step['tokens_per_second']:10,}{step['best_tokens_per_second']:10,}{step['median_ms']:11.1f}"
            f"{step['first_loss']:12.4f}{faster}"
        )
    total = sum(kernel["ms"] for kernel in report["kernels"].values())
    print(f"\nwhere our time goes, {total:.1f} ms in kernels{'':12}launches      ms   share")
    for name, kernel in report["kernels"].items():
        print(f"  {name:44}{kernel['launches']:8}{kernel['ms']:8.2f}{kernel['ms'] / total:8.1%}")


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
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args()
    report = measure(options.preset, options.threads, options.rounds, options.steps, options.ways)
    if options.as_json:
        print(json.dumps(report, indent=2))
    else:
        show(report)


if __name__ == "__main__":
    main()
