"""The crash bench's lab, and its figures: what was tried and held, by promise.

`PTXTRAIN_FAULTS=full` (what `make faults` sets) tries everything; otherwise, as in `make test`, a sample of each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The small run and the benches of the command line's and the engine's tests.
sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("cli", "engine")]

from figures import FULL, RESUMED, Figures, table  # noqa: E402
from lab import Lab, Reference, Server, make_dataset, make_reference, preset_text  # noqa: E402


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def bench(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The lab with its reference run; tests work in copies of it."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "small.toml").write_text(preset_text())
    lab = Lab(server, folder, folder / "small.toml", make_dataset(folder), Reference("", {}, {}, []))
    lab.reference = make_reference(lab)
    return lab


@pytest.fixture
def figures(record_property: Callable[[str, object], None]) -> Figures:
    return Figures(record_property)


@pytest.fixture
def lab(bench: Lab, tmp_path: Path, figures: Figures) -> Iterator[Lab]:
    """A lab of the test's own."""
    made = Lab(bench.server, tmp_path, bench.preset, bench.dataset, bench.reference)
    yield made
    figures.add(RESUMED, made.resumed)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Under `make faults`, the table that the README shows."""
    if FULL:
        ends = (report for reports in terminalreporter.stats.values() for report in reports)
        figures = [
            getattr(report, "user_properties", []) for report in ends if getattr(report, "when", "") == "teardown"
        ]
        terminalreporter.write_line("")
        for line in table(pair for pairs in figures for pair in pairs):
            terminalreporter.write_line(line)
