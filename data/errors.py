"""The one error that this package raises for a user's mistake or for data that is not what was written."""

from __future__ import annotations


class DataError(Exception):
    """One line that says what, where, the limit and the remedy. The command line prints it and exits with 1."""

    exit_code = 1
