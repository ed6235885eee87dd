"""The live panel and the plain lines, and that a terminal which goes away takes nothing with it."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from ptxtrain.cli import display
from ptxtrain.engine.progress import FLOPS_FORMULA, StepReport


def _report(step: int, loss: float = 3.25) -> StepReport:
    return StepReport(
        step=step,
        steps=300,
        loss=loss,
        grad_norm=0.812,
        lr=1e-3,
        tokens_per_second=12_345.0,
        flops_per_second=1.234e11,
        seconds=0.4,
        device_wait=0.0,
        eta=3725.0,
    )


class Lost(io.StringIO):
    """A stream whose other end has gone after `good` writes."""

    def __init__(self, good: int, terminal: bool) -> None:
        super().__init__()
        self.good, self.terminal = good, terminal

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        self.good -= 1
        if self.good < 0:
            raise OSError(5, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00k"),
        (12_345, "12.3k"),
        (315_000, "315k"),
        (1_311_872, "1.31M"),
        (22e9, "22.0G"),
    ],
)
def test_amounts_have_three_digits(number: float, text: str) -> None:
    assert display.amount(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m 00s"), (249, "4m 09s"), (3725, "1h 02m"), (93_600, "1d 02h")]
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert display.duration(seconds) == text


def test_sizes_and_rates() -> None:
    assert [display.size(n) for n in (512, 1536, 25_125_453_005)] == ["512 B", "1.5 KiB", "23.4 GiB"]
    assert [display.tflops(f) for f in (43.9e12, 8.2e10)] == ["43.9", "0.082"]


def test_plain_lines_come_every_so_often_and_at_the_end() -> None:
    stream = io.StringIO()
    view = display.PlainView(stream, interval=3600)
    for step in (1, 2, 3, 299, 300):
        view.step(_report(step))
    view.validated(300, 3.5, 8192)
    view.sample(300, "def main():")
    view.note("saved step 300")
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines[:2]] == ["1/300", "300/300"]
    assert "loss 3.2500  lr 0.001  grad norm 0.812  12.3k tokens/s  0.123 TFLOP/s" in lines[0]
    assert FLOPS_FORMULA in lines[0] and FLOPS_FORMULA not in lines[1]
    assert lines[0].endswith("1h 02m left")
    assert lines[2:] == [
        "step 300  validation loss 3.5000 over 8,192 tokens",
        "step 300  sample:",
        "def main():",
        "saved step 300",
    ]


def test_a_long_step_says_how_far_it_is() -> None:
    stream = io.StringIO()
    view = display.PlainView(stream, interval=0.0)
    view.micro_batch(4, 3, 8)
    assert stream.getvalue() == "step 4: micro-batch 3 of 8\n"


@pytest.mark.parametrize("width", [80, 90, 110, 200])
def test_the_panel_shows_everything(width: int) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, color_system=None)
    view = display.LiveView(console, "runs/tiny-1", 2, 300)
    view.history([8.3, 7.0])
    view.step(_report(3, 6.0))
    view.validated(3, 6.2, 8192)
    view.micro_batch(4, 1, 2)
    view.note("saved step 3 [not markup]")
    view.sample(3, "import [os]")
    view.notice("SIGINT: stopping")
    view.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    for part in (
        *("runs/tiny-1   step 3 of 300", "loss 6.0000", "lr 0.001", "grad norm 0.812", "12.3k tokens/s"),
        *("0.123 TFLOP/s", "1h 02m left", "validation 6.2000 at step 3", "step 4: micro-batch 1/2", FLOPS_FORMULA),
        *("saved step 3 [not markup]", "import [os]", "8.30", "█", "│ SIGINT: stopping"),
    ):
        assert part in text, part
    assert stream.getvalue().endswith("\x1b[?25h"), "the cursor is shown again"


def test_a_resumed_run_begins_where_it_stood() -> None:
    stream = io.StringIO()
    display.LiveView(Console(file=stream, force_terminal=True, width=90, color_system=None), "runs/x", 7, 9).close()
    assert "runs/x   step 7 of 9" in stream.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("good", [0, 1, 5])
@pytest.mark.filterwarnings("error")
def test_a_terminal_that_goes_away_ends_the_drawing_only(
    good: int, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    view = display.make_view("runs/x", 0, 10, Lost(good, terminal))
    assert isinstance(view, display.LiveView if terminal else display.PlainView)
    view.note("a note")
    view.phase("compiling")
    for step in range(1, 4):
        view.micro_batch(step, 1, 1)
        view.step(_report(step))
    view.validated(3, 3.0, 10)
    view.sample(3, "text")
    view.close()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(display.make_view("runs/x", 0, 10, Lost(100, True)), display.PlainView)
