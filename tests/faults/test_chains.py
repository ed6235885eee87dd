"""Five stops at random steps, across shards and epochs, with other micro-batches between them: not a bit differs."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from figures import CHAINS, FULL, Figures
from lab import STEPS, Lab, faults, make_reference, saved

# Sequences of a step, 8, over those of a micro-batch: 1, 2, 4 and 8 micro-batches. With two leaves one never holds all eight.
SIZES = {1: (8, 4, 2, 1), 2: (4, 2, 1)}


@pytest.fixture(scope="module")
def one_leaf(bench: Lab, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A lab whose runs have a single leaf, so that a step may be one micro-batch."""
    folder = tmp_path_factory.mktemp("one-leaf")
    preset = folder / "small.toml"
    preset.write_text(bench.preset.read_text().replace("leaves = 2", "leaves = 1"))
    lab = Lab(bench.server, folder, preset, bench.dataset, bench.reference)
    lab.reference = make_reference(lab)
    assert lab.reference.digest != bench.reference.digest, "another order of sums"
    return lab


@pytest.mark.parametrize("leaves", [1, 2])
@pytest.mark.parametrize("seed", range(8 if FULL else 1))
def test_five_stops(lab: Lab, one_leaf: Lab, figures: Figures, tmp_path: Path, leaves: int, seed: int) -> None:
    """Each time by a signal in the midst of a step, which ends or is dropped; each time another micro-batch."""
    if leaves == 1:
        lab.preset, lab.reference = one_leaf.preset, one_leaf.reference
    rng, run, said = random.Random(100 * leaves + seed), lab.fresh(), ""
    stops = sorted(rng.sample(range(1, STEPS), 5))
    for number, step in enumerate(stops):
        size = SIZES[leaves][(seed + number) % len(SIZES[leaves])]
        other = ("--set", f"batch.micro_batch={size}")
        # Steps of this process: what a stop left unfinished is run again.
        first = max(saved(said), default=0)
        stop = faults(
            signal_at_step={"step": max(step - first, 1), "number": rng.choice((signal.SIGINT, signal.SIGTERM))}
        )
        done = lab.train(run, *other, inject=stop) if not said else lab.resume(run, *other, inject=stop)
        assert done.code == 2, done.err
        said += done.err
    assert len(set(saved(said)) & set(range(1, STEPS))) >= 3
    final = lab.survives(run, said, "--set", f"batch.micro_batch={SIZES[leaves][seed % len(SIZES[leaves])]}")
    assert final.digest == lab.reference.digest
    figures.add(CHAINS, 1)
