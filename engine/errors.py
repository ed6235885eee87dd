"""Errors that become one line at the command line's edge, each with its exit code."""

from __future__ import annotations


class PtxtrainError(Exception):
    """A user's mistake or a failed check: the message says what, where, the limit and the remedy. Exit code 1."""

    exit_code = 1


class StoppedSaved(PtxtrainError):
    """Stopped by request with the newest state saved. Exit code 2."""

    exit_code = 2


class StoppedUnsaved(PtxtrainError):
    """Stopped with the newest state not saved; the message names the last good step. Exit code 3."""

    exit_code = 3


class DeviceError(PtxtrainError):
    """The device failed or cannot be used. Exit code 4."""

    exit_code = 4


class OutOfMemory(DeviceError):
    """There is no memory for what was to be allocated. Exit code 4, where nothing smaller will do."""


class RunInUse(PtxtrainError):
    """Another process holds the run directory. Exit code 5."""

    exit_code = 5
