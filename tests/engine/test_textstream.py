"""Text as tokens come: whole characters, and nothing of a stop string, however both are cut up."""

from __future__ import annotations

import codecs

from hypothesis import given, settings
from hypothesis import strategies as st

from ptxtrain.engine.textstream import TextStream


class Bytes:
    """Stands for a tokenizer whose tokens are bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def streamed(data: bytes, *stops: str) -> tuple[list[str], bool]:
    """What each byte gives, then what is left; and whether a stop string came."""
    stream = TextStream(Bytes(), stops)
    return [*(stream.push(byte) for byte in data), stream.flush()], stream.stopped


def test_characters_come_whole() -> None:
    """Two, three and four bytes: nothing until the last of them."""
    parts, _ = streamed("aä€😀".encode())
    assert parts == ["a", "", "ä", "", "", "€", "", "", "", "😀", ""]


def test_what_never_becomes_a_character_is_one_replacement() -> None:
    """An end in the middle, and bytes that are not UTF-8."""
    assert "".join(streamed("x€".encode()[:-1])[0]) == "x\ufffd"
    assert "".join(streamed(b"\xffx")[0]) == "\ufffdx"


def test_a_stop_string_ends_the_text_before_it() -> None:
    """Nothing of it is printed, nor anything after it; what only began like it is printed once that is clear."""
    assert streamed(b"one END two", "END") == (["o", "n", "e", " ", "", "", "", "", "", "", "", ""], True)
    parts, stopped = streamed(b"EN ENx", "END")
    assert parts == ["", "", "EN ", "", "", "ENx", ""] and not stopped
    assert "".join(streamed(b"an EN", "END")[0]) == "an EN"


def test_the_first_of_several_stop_strings_counts() -> None:
    """By place in the text, not by order of the options; one may begin inside another."""
    assert "".join(streamed(b"ab--cd==", "==", "--")[0]) == "ab"
    assert "".join(streamed(b"xaab", "aab", "ab")[0]) == "x"
    assert "".join(streamed(b"x\n\n", "\n\n")[0]) == "x"


@settings(max_examples=200, deadline=None)
@given(st.text("abé\n", max_size=30), st.lists(st.text("abé\n", min_size=1, max_size=4), max_size=3))
def test_it_is_the_text_up_to_the_first_stop_string(text: str, stops: list[str]) -> None:
    """Whatever the text and the strings."""
    parts, stopped = streamed(text.encode(), *stops)
    # The stop string that is complete first ends the text; of those that end together, the one that began first.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    expected = text
    if ends:
        seen = text[: min(ends)]
        expected = seen[: min(at for at in map(seen.find, stops) if at >= 0)]
    assert "".join(parts) == expected and stopped == bool(ends)
