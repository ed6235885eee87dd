"""What the crash bench counts, and the table that `make faults` prints of it, which stands in the README."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

FULL = os.environ.get("PTXTRAIN_FAULTS", "fast") != "fast"
_Any = TypeVar("_Any")


def some(values: Iterable[_Any], few: int) -> list[_Any]:
    """All of them in the full form, else `few`, spread out."""
    every = list(values)
    return every if FULL or few >= len(every) else [every[(2 * i + 1) * len(every) // (2 * few)] for i in range(few)]


# As the README names them.
PROMISES = {
    "P1": "durable",
    "P2": "exact",
    "P3": "never wrong",
    "P4": "never stuck",
    "P5": "nothing executes",
    "P6": "same bits",
    "": "the tests themselves",
}

KILLED_AT_CALLS = "`kill -9` at each durable call of a run, retention included"
KILLED_RESUMING = "`kill -9` at each durable call of a `resume` that clears up"
KILLED_TWICE = "`kill -9` twice in a row"
KILLED_ANYWHERE = "`kill -9` at random instants"
SIMULATED = "simulated kills of a save, and of the start after it, at each call"
DISK_STATES = "disk states that a power cut may leave, loaded"
DISK_STATES_RESUMED = "of which resumed to the end"
DISK_ERRORS = "disk errors injected into a save, call by call"
DISK_ERRORS_RUN = "disk errors, short writes and full disks under a whole run"
CHAINS = "chains of five stops across shards and epochs, accumulation 1, 2, 8"
RESUMED = "resumes that ended with the digest and losses of the undisturbed run"
DAMAGED = "damaged checkpoints refused (cut, flipped, swapped, links, fifos, …)"
SHARDS = "shards changed between runs or during one: stopped, file and place named"
NUMBERS = "poisoned gradients, weights and learning rates: stopped before the update"
SIGNALS = "signals in each phase, once, twice and three times"
LONG_STEP = "seconds from a signal to the end of the process in a step of half a minute, at most"
WORLD = "failed devices, closed streams, full logs, held runs, jumping clocks"
HEADERS = "hostile headers and manifests refused"
HEADER_SECONDS = "slowest of them, seconds"
HEADER_MEMORY = "most memory for one, MB"
WATCHED = "hostile run directories opened under watch"
REPEATS = "runs compared: again, other threads, other micro-batches"
TRIED = "one-line mutants of the tool tried"
CAUGHT = "of which caught"

ROWS = {
    "P1": (
        *(KILLED_AT_CALLS, KILLED_RESUMING, KILLED_TWICE, KILLED_ANYWHERE, SIMULATED),
        *(DISK_STATES, DISK_STATES_RESUMED, DISK_ERRORS, DISK_ERRORS_RUN),
    ),
    "P2": (RESUMED, CHAINS),
    "P3": (DAMAGED, SHARDS, NUMBERS),
    "P4": (SIGNALS, LONG_STEP, WORLD),
    "P5": (HEADERS, HEADER_SECONDS, HEADER_MEMORY, WATCHED),
    "P6": (REPEATS,),
    "": (TRIED, CAUGHT),
}
WORST = {LONG_STEP, HEADER_SECONDS, HEADER_MEMORY}  # rows that show a maximum; the others are sums


class Figures:
    """Adds to the rows. Every test says what it did, whatever process it ran in."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self._record = record

    def add(self, row: str, count: float) -> None:
        """`count` more of `row`, or a candidate for its maximum."""
        assert any(row in rows for rows in ROWS.values()), row
        self._record("figure", f"{count}|{row}")


def table(properties: Iterable[tuple[str, object]]) -> list[str]:
    """The table's lines, in Markdown."""
    found: dict[str, float] = {}
    for name, value in properties:
        if name == "figure":
            count, _, row = str(value).partition("|")
            found[row] = max(found.get(row, 0), float(count)) if row in WORST else found.get(row, 0) + float(count)
    lines = ["| promise | what was tried | |", "|---|---|---|"]
    for promise, rows in ROWS.items():
        for row in rows:
            name = f"{promise} {PROMISES[promise]}".strip() if row == rows[0] else ""
            number = found.get(row)
            shown = "-" if number is None else f"{number:,.0f}" if number == int(number) else f"{number:.2g}"
            lines.append(f"| {name} | {row} | {shown} |")
    return lines
