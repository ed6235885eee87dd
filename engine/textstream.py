"""The text of tokens as they come: whole characters only, and nothing of a stop string.

What might be the beginning of a character or of a stop string is held back until it is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TokenText(Protocol):
    """What turns tokens into text one by one, such as `data.tokenizer.StreamDecoder`."""

    def push(self, token: int) -> str:
        """The text that a token completes."""

    def flush(self) -> str:
        """What was held back, at the end."""


class TextStream:
    """One text. `push` tokens and print what comes back; `stopped` once a stop string has come; `flush` at the end."""

    def __init__(self, decoder: TokenText, stops: Sequence[str] = ()) -> None:
        self._decoder, self._stops = decoder, tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain now, up to a stop string; nothing after one."""
        return "" if self.stopped else self._settle(self._decoder.push(token))

    def flush(self) -> str:
        """The rest: what never became a stop string, and U+FFFD for a character that was not finished."""
        if self.stopped:
            return ""
        text = self._settle(self._decoder.flush())
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _settle(self, text: str) -> str:
        text = self._held + text
        found = [at for at in map(text.find, self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = self._beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _beginning(self, text: str) -> int:
        """How many of the last characters are the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
