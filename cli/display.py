"""What a run looks like: a live panel on a terminal, plain lines anywhere else, both on stderr.

A terminal that goes away (closed window, broken pipe, full disk behind a redirection) ends the drawing, never the run.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO, cast

from ptxtrain.engine.memory import size as size
from ptxtrain.engine.progress import FLOPS_FORMULA, Curve, StepReport, View, draw_curve

if TYPE_CHECKING:
    from rich.console import Console, Group

_LOST = (OSError, ValueError)  # ValueError: writing to a closed file


def make_view(title: str, start: int, steps: int, stream: TextIO | None = None) -> View:
    """The live panel if `stream` (stderr) is a terminal, else plain lines. The run goes from behind step `start` to `steps`."""
    stream = stream or sys.stderr
    try:
        terminal = stream.isatty()
    except _LOST:
        terminal = False
    if terminal:
        from rich.console import Console

        console = Console(file=cast(TextIO, _Lasting(stream)))
        if not console.is_dumb_terminal:
            return LiveView(console, title, start, steps)
    return PlainView(stream)


class _Lasting:
    """A stream whose writes go nowhere once its other end has gone. rich writes from a thread of its own, too."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(*_LOST):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(*_LOST):
            self._stream.flush()


def amount(number: float) -> str:
    """Three digits and a letter: 1.31M, 12.0k, 940."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= unit:
            value = number / unit
            return f"{value:.{max(0, 2 - len(str(int(abs(value)))) + 1)}f}{letter}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Two units at most: 1d 02h, 3h 05m, 4m 09s, 12s."""
    whole = round(seconds)
    if whole >= 86_400:
        return f"{whole // 86_400}d {whole % 86_400 // 3600:02}h"
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    if whole >= 60:
        return f"{whole // 60}m {whole % 60:02}s"
    return f"{whole}s"


def tflops(flops: float) -> str:
    """FLOP/s as TFLOP/s with digits enough for a CPU: 43.9, 0.082."""
    value = flops / 1e12
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


class PlainView(View):
    """One line every `interval` seconds, and one for each thing that stays."""

    def __init__(self, stream: TextIO, interval: float = 5.0) -> None:
        self._stream = stream
        self._interval = interval
        self._last = time.monotonic()  # when a line last told how far the run is
        self._begun = False

    def _line(self, text: str) -> None:
        with contextlib.suppress(*_LOST):
            self._stream.write(text + "\n")
            self._stream.flush()

    def note(self, text: str) -> None:
        self._line(text)

    def phase(self, text: str) -> None:
        if text and not self._begun:  # later ones end with a line of their own
            self._line(f"{text} …")

    def micro_batch(self, step: int, done: int, total: int) -> None:
        # Only where a step is so long that its own line does not come in time.
        if time.monotonic() - self._last >= 6 * self._interval:
            self._last = time.monotonic()
            self._line(f"step {step}: micro-batch {done} of {total}")

    def step(self, report: StepReport) -> None:
        if self._begun and report.step != report.steps and time.monotonic() - self._last < self._interval:
            return
        formula = "" if self._begun else f" ({FLOPS_FORMULA})"
        self._begun, self._last = True, time.monotonic()
        self._line(
            f"step {report.step}/{report.steps}  loss {report.loss:.4f}  lr {report.lr:.3g}  "
            f"grad norm {report.grad_norm:.3f}  {amount(report.tokens_per_second)} tokens/s  "
            f"{tflops(report.flops_per_second)} TFLOP/s{formula}  {duration(report.eta)} left"
        )

    def validated(self, step: int, loss: float, tokens: int) -> None:
        self._line(f"step {step}  validation loss {loss:.4f} over {tokens:,} tokens")

    def sample(self, step: int, text: str) -> None:
        self._line(f"step {step}  sample:\n{text}")


class LiveView(View):
    """A panel that is redrawn four times a second, below the lines that stay."""

    def __init__(self, console: Console, title: str, start: int, steps: int) -> None:
        from rich.live import Live

        self._console = console
        self._title = title
        self._start = start
        self._steps = steps
        self._curve = Curve()
        self._report: StepReport | None = None
        self._reported = time.monotonic()
        self._validation = ""
        self._phase = ""
        self._notice = ""
        self._micro = (0, 0, 1)
        self._live: Live | None = Live(
            console=console,
            get_renderable=self._draw,
            refresh_per_second=4,
            transient=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def notice(self, text: str) -> None:
        """A line in the panel from now on. Takes no lock, so a signal handler may call it wherever it came in."""
        self._notice = text

    def phase(self, text: str) -> None:
        self._phase = text

    def micro_batch(self, step: int, done: int, total: int) -> None:
        self._micro = (step, done, total)

    def step(self, report: StepReport) -> None:
        self._report = report
        self._reported = time.monotonic()
        self._curve.add(report.loss)

    def validated(self, step: int, loss: float, tokens: int) -> None:
        self._validation = f"{loss:.4f} at step {step}"
        self.note(f"step {step}  validation loss {loss:.4f} over {tokens:,} tokens")

    def sample(self, step: int, text: str) -> None:
        from rich.text import Text

        self._console.rule(f"sample after step {step}", style="dim")
        self._console.print(Text(text), soft_wrap=True)
        self._console.rule(style="dim")

    def history(self, losses: Sequence[float]) -> None:
        for loss in losses:
            self._curve.add(loss)

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _draw(self) -> Group:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        report = self._report
        step, done, total = self._micro
        figures = Table.grid(padding=(0, 3), expand=False)
        for _ in range(3):
            figures.add_column(no_wrap=True)
        cells = ["loss -", "lr -", "grad norm -", "- tokens/s", "- TFLOP/s", "- left"]
        finished = self._start
        if report is not None:
            finished = report.step
            left = max(report.eta - (time.monotonic() - self._reported), 0.0) if not self._phase else report.eta
            cells = [
                f"loss {report.loss:.4f}",
                f"lr {report.lr:.3g}",
                f"grad norm {report.grad_norm:.3f}",
                f"{amount(report.tokens_per_second)} tokens/s",
                f"{tflops(report.flops_per_second)} TFLOP/s",
                f"{duration(left)} left",
            ]
        cells.append(f"validation {self._validation or '-'}")
        cells.append(self._phase or (f"step {step}: micro-batch {done}/{total}" if step else "starting"))
        for row in range(0, len(cells), 3):
            figures.add_row(*cells[row : row + 3])
        width = max(20, min(self._console.width - 16, 100))
        points = self._curve.points(width)
        curve = draw_curve(points, rows=3)
        labels = [f"{max(points):.2f}", "", f"{min(points):.2f}"] if points else ["", "", ""]
        graph = Text("\n".join(f"{label:>7} {line}" for label, line in zip(labels, curve, strict=True)), style="cyan")
        within = done / total if step > finished else 0.0
        bar = Table.grid()  # a bar by itself does not end its line
        bar.add_row(
            ProgressBar(total=max(self._steps, 1), completed=min(finished + within, self._steps), width=width + 8)
        )
        head = Text(f"{self._title}   step {finished} of {self._steps}", style="bold")
        note = Text(f"FLOP: {FLOPS_FORMULA}", style="dim")
        notice = [Text(self._notice, style="bold yellow")] if self._notice else []
        return Group(Panel(Group(head, bar, figures, graph, note, *notice), expand=False))
