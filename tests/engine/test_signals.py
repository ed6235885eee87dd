"""Stopping by signal, with real signals on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from ptxtrain.engine.signals import Stop, StopRequested

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals are sent with kill")


def _child(body: str) -> subprocess.CompletedProcess[str]:
    code = "import os, signal, sys, time\nfrom ptxtrain.engine.signals import Stop, StopRequested\n" + textwrap.dedent(
        body
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@posix
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_the_first_asks_and_the_handlers_are_put_back(name: str) -> None:
    number = getattr(signal, name)
    before = signal.getsignal(number)
    stop, said = Stop(), []
    stop.announce = said.append
    stop.describe = lambda: "step 3 is being saved"
    with stop.handlers():
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested and stop.signal_name == name
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before
    assert [line.split(":")[0] for line in said] == [name, name]
    assert "step 3 is being saved" in said[1] and "nothing has been saved yet" in said[1]


@posix
def test_the_third_leaves_at_once_with_3_and_names_the_last_good_step() -> None:
    done = _child(
        """
        stop = Stop()
        stop.last_good = lambda: "step 7 is the newest saved"
        with stop.handlers():
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
        print("not reached")
        """
    )
    assert done.returncode == 3
    assert "left at once; step 7 is the newest saved" in done.stderr
    assert done.stdout == ""


@posix
def test_while_nothing_needs_saving_it_raises_at_once() -> None:
    stop = Stop()
    with stop.handlers(), pytest.raises(StopRequested):  # noqa: PT012
        with stop.raising():
            os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("not reached")
    with pytest.raises(StopRequested), stop.raising():
        pytest.fail("a stop that was asked for earlier ends it on entry")


@posix
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_that_python_swallows_still_ends_the_block() -> None:
    stop = Stop()

    class Swallows:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)  # an exception in a finaliser is ignored by Python

    def block() -> None:
        with stop.handlers(), stop.raising():
            thing = Swallows()
            del thing

    with pytest.raises(StopRequested):
        block()


@posix
def test_an_ignored_hangup_stays_ignored() -> None:
    done = _child(
        """
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop = Stop()
        with stop.handlers():
            os.kill(os.getpid(), signal.SIGHUP)
            print(stop.requested)
        """
    )
    assert done.stdout == "False\n"


@posix
def test_an_interrupt_counts_in_a_background_job_of_a_script() -> None:
    """Shells start those with SIGINT ignored."""
    done = _child(
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop = Stop()
        with stop.handlers():
            os.kill(os.getpid(), signal.SIGINT)
            print(stop.requested)
        """
    )
    assert done.stdout == "True\n"


@posix
def test_a_terminal_that_is_gone_does_not_matter() -> None:
    done = _child(
        """
        os.close(2)
        stop = Stop()
        with stop.handlers():
            os.kill(os.getpid(), signal.SIGHUP)
            print(stop.requested)
        """
    )
    assert (done.returncode, done.stdout) == (0, "True\n")
