"""Contenders that take turns, so that all of them meet the same moments of a busy machine."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any


def take_turns(
    contenders: dict[str, Callable[[], float]],
    rounds: int,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each contender's steps; a round gives each of them one step that does not count, then `steps`."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, step in contenders.items():
            step()
            for _ in range(steps):
                start = clock()
                step()
                times[name].append(clock() - start)
    return times


def summary(times: dict[str, list[float]], losses: dict[str, float], tokens: int) -> dict[str, Any]:
    """Medians and bests of each contender, and how many times as long as ours, the first, it takes."""
    ours, *_ = times
    return {
        "steps": {
            name: {
                "first_loss": round(losses[name], 4),
                "median_ms": round(1e3 * statistics.median(taken), 1),
                "best_ms": round(1e3 * min(taken), 1),
                "tokens_per_second": round(tokens / statistics.median(taken)),
                "best_tokens_per_second": round(tokens / min(taken)),
            }
            for name, taken in times.items()
        },
        "ratios": {  # of times: above 1 ours is faster
            name: {
                "median": round(statistics.median(taken) / statistics.median(times[ours]), 2),
                "best": round(min(taken) / min(times[ours]), 2),
            }
            for name, taken in times.items()
            if name != ours
        },
    }


def show(report: dict[str, Any]) -> None:
    """The table of `summary`, and our kernels."""
    print(f"{report['preset']}, batch {report['batch']}, on {report['where']}")
    if "pytorch" in report:
        print(f"PyTorch {report['pytorch']}")
    for text in report["notes"]:
        print(f"note: {text}")
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


def kernels(profile: dict[str, tuple[int, float]]) -> dict[str, Any]:
    """`BatchStep.profile` for a report."""
    return {name: {"launches": count, "ms": round(1e3 * seconds, 2)} for name, (count, seconds) in profile.items()}


def note(text: str) -> None:
    """What goes on, to stderr."""
    print(f"measuring: {text}", file=sys.stderr, flush=True)
