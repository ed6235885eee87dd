"""Everything to run on a machine with an NVIDIA GPU, in one go: `python tests/gpu/run.py [--out build/gpu.json]`.

In order: the tests that take the `device` fixture, on the GPU; `ptxtrain gradcheck` of the naive and of the fast kernels;
`ptxtrain bench` beside cuBLAS, `scaled_dot_product_attention` and a copy; whole steps of the dev preset beside PyTorch, eager
and compiled. Each stage is a process with a time limit; one that fails is reported and the rest goes on. The report is
written as JSON after every stage, and a summary is printed beside the run that this tool's design describes. Exit code 1
if a stage failed.

Needs `pip install -e .[test]`; `pip install torch nvidia-cublas-cu12` for the peers, which are left out where they are missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests" / "gpu" / "on_fake.py"

# The run that the design describes: the dev preset, from its beginning, and after two changes.
REFERENCE = {
    "tokens_per_second": 315_000,
    "later_tokens_per_second": 381_000,
    "tflops": 43.9,
    "loss_at_1b_tokens": 3.745,
}


@dataclass(frozen=True)
class Stage:
    """`arguments` follow `python`; `read` makes the stage's part of the report of what it printed, and raises if it cannot."""

    name: str
    arguments: list[str]
    seconds: int
    read: Callable[[str], Any]


def tests_read(output: str) -> dict[str, int]:
    """The counts of pytest's last line. A run in which everything was skipped is a failure."""
    last = output.strip().splitlines()[-1]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    if not counts.get("passed"):
        raise ValueError(f"no test has passed: {last}")
    return counts


def stages(fake: bool, python: str = sys.executable) -> list[Stage]:
    """What is run. `fake`: on the fake CuPy, at sizes that mean nothing."""
    tests = ["tests/ops/test_cast.py", "tests/ops/test_add.py"] if fake else ["tests"]
    workers = ["-n", "4"] if not fake and importlib.util.find_spec("xdist") else []
    small = ["--set", "batch.sequences=2", "--set", "batch.micro_batch=1"]
    preset = ["tiny", *small] if fake else ["dev"]
    torch_on = ["--torch-on", "cpu"] if fake else []
    turns = ["--rounds", "1", "--steps", "1"] if fake else []
    command = ["-m", "ptxtrain.cli"]
    peer = str(ROOT / "tests" / "peers" / "pytorch_gpu.py")
    found = [
        Stage("tests", ["-m", "pytest", "-q", *workers, "-m", "not slow", "-k", "cuda", *tests], 400, tests_read),
        Stage("gradcheck", [*command, "gradcheck", "--device", "cuda", "--json"], 120, json.loads),
        Stage("gradcheck --fast", [*command, "gradcheck", "--fast", "--device", "cuda", "--json"], 180, json.loads),
        Stage("bench", [*command, "bench", "--device", "cuda", "--step", *preset, "--json"], 240, json.loads),
        Stage("peer", [peer, "--preset", *preset, *torch_on, *turns, "--json"], 300, json.loads),
    ]
    if not fake:
        return found
    return [
        Stage(s.name, [str(FAKE), *(s.arguments[1:] if s.arguments[0] == "-m" else s.arguments)], s.seconds, s.read)
        for s in found
    ]


def run_stage(stage: Stage, python: str = sys.executable) -> dict[str, Any]:
    """The stage's result, with `ok`, the seconds and, where something went wrong, the end of what it printed."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            [python, *stage.arguments], cwd=ROOT, capture_output=True, text=True, timeout=stage.seconds, check=False
        )  # fmt: skip
        output, errors, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as expired:
        output, errors, code = _text(expired.stdout), _text(expired.stderr) + f"\nstopped after {stage.seconds} s", -1
    result: dict[str, Any] = {"ok": code == 0, "exit_code": code, "seconds": round(time.monotonic() - start, 1)}
    try:
        result["result"] = stage.read(output)
    except (ValueError, IndexError) as error:
        result |= {"ok": False, "unread": str(error)}
    if not result["ok"]:
        result["output"], result["errors"] = output[-4000:], errors[-4000:]
    return result


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def summary(report: dict[str, Any]) -> str:
    """What to read first."""
    lines = []
    for name, stage in report["stages"].items():
        lines.append(f"{name:<18}{'ok' if stage['ok'] else 'FAILED':<8}{stage['seconds']:7.1f} s")
    parts = {name: stage.get("result") or {} for name, stage in report["stages"].items()}
    counts = parts.get("tests", {})
    if counts:
        lines.append("tests on the GPU: " + ", ".join(f"{number} {word}" for word, number in counts.items()))
    bench = parts.get("bench", {})
    for row in bench.get("rows", []):
        peer = "-" if row["peer"] is None else f"{row['peer']:.1f}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:6.2f}x"
        lines.append(
            f"{row['group']:<10}{row['case']:<48}{row['ours']:9.1f}{peer:>9} {row['unit']:<8}{ratio} {row['peer_name']}"
        )
    lines.append("")
    lines.append(f"{'a step':<34}{'tokens/s':>10}{'TFLOP/s':>9}")
    reference = report["reference"]
    lines.append(f"{'the design, first run':<34}{reference['tokens_per_second']:10,}{reference['tflops']:9.1f}")
    lines.append(f"{'the design, later':<34}{reference['later_tokens_per_second']:10,}")
    step = bench.get("step")
    if step:
        label = f"ptxtrain, {step['preset']}, steps in a row"
        lines.append(f"{label:<34}{step['tokens_per_second']:10,}{step['tflops']:9.1f}")
    for name, row in parts.get("peer", {}).get("steps", {}).items():
        lines.append(f"{name + ', taking turns':<34}{row['tokens_per_second']:10,}{row['tflops']:9.1f}")
    for part in (bench, parts.get("peer", {})):
        lines += [f"note: {note}" for note in part.get("notes", [])]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    text, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=text, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu.json")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="stages to run")
    parser.add_argument("--fake", action="store_true", help="on the fake CuPy, to try the script without a GPU")
    options = parser.parse_args(arguments)
    chosen = [stage for stage in stages(options.fake) if options.only is None or stage.name in options.only]
    if not chosen:
        parser.error(f"no such stage; there are {', '.join(stage.name for stage in stages(options.fake))}")
    report: dict[str, Any] = {"fake": options.fake, "reference": REFERENCE, "stages": {}}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for stage in chosen:
        print(f"running: {stage.name} (at most {stage.seconds} s)", file=sys.stderr, flush=True)
        report["stages"][stage.name] = run_stage(stage)
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(summary(report))
    for name, stage in report["stages"].items():
        if not stage["ok"]:
            print(
                f"\n{name} failed with exit code {stage['exit_code']}:\n{stage['output'][-1500:]}\n{stage['errors'][-1500:]}"
            )
    print(f"report: {options.out}")
    return 0 if all(stage["ok"] for stage in report["stages"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
