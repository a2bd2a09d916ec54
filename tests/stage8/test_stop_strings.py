"""Stop strings cut exactly, wherever the pieces of a text begin and end; what was streamed is never taken back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.stage8.stop_strings import StopStrings

LETTERS = st.text("ab🙂", max_size=6)
STRINGS = st.lists(st.text("ab🙂", min_size=1, max_size=4), min_size=1, max_size=4)


def one_by_one(pieces: list[str], strings: list[str], free: int) -> str | None:
    """The oracle: after each character, whether one of the strings ends there. free: the first piece that may."""
    text = ""
    for number, piece in enumerate(pieces):
        for character in piece:
            text += character
            ended = [len(string) for string in strings if text.endswith(string)]
            if ended and number >= free:
                return text[: len(text) - max(ended)]
    return None


def run(pieces: list[str], strings: list[str], free: int) -> tuple[list[str], bool]:
    stop = StopStrings(strings)
    out: list[str] = []
    for number, piece in enumerate(pieces):
        before = stop.end(piece) if number >= free else None
        if before is not None:
            return [*out, before], True
        out.append(stop.take(piece))
    return [*out, stop.rest()], False


@given(pieces=st.lists(LETTERS, max_size=8), strings=STRINGS, free=st.integers(0, 3))
@settings(max_examples=1000)
def test_as_if_the_text_came_one_character_at_a_time(pieces: list[str], strings: list[str], free: int) -> None:
    expected = one_by_one(pieces, strings, free)
    out, ended = run(pieces, strings, free)
    assert ended == (expected is not None)
    assert "".join(out) == ("".join(pieces) if expected is None else expected)


@given(text=st.text("ab🙂", max_size=20), strings=STRINGS, cuts=st.lists(st.integers(0, 20), max_size=6))
def test_the_cut_does_not_depend_on_the_pieces(text: str, strings: list[str], cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(borders)]
    (whole, ended), (cut, also_ended) = run([text], strings, 0), run(pieces, strings, 0)
    assert ("".join(whole), ended) == ("".join(cut), also_ended)


@given(pieces=st.lists(LETTERS, max_size=8), strings=STRINGS)
def test_no_more_is_held_back_than_must_be(pieces: list[str], strings: list[str]) -> None:
    """Held is the longest end of the text that begins one of the strings, and nothing else."""
    stop, text, given_out = StopStrings(strings), "", ""
    for piece in pieces:
        if stop.end(piece) is not None:
            return
        text += piece
        given_out += stop.take(piece)
        begins = [n for n in range(len(text)) if any(s.startswith(text[n:]) for s in strings)]
        assert given_out == text[: min(begins, default=len(text))]


@pytest.mark.parametrize(
    ("pieces", "strings", "expected"),
    [
        (["Hello", " wor", "ld"], ["wor"], "Hello "),
        (["Hello", " w", "or", "ld"], ["world"], "Hello "),
        (["a\n", "\nb"], ["\n\n"], "a"),
        (["xabcx"], ["b", "abc"], "xa"),
        (["xab"], ["b", "ab"], "x"),
        (["a", "b", "a", "c"], ["abab", "bac"], "a"),
        (["aaaa", "b"], ["aab"], "aa"),
        (["stop"], ["stop"], ""),
    ],
)
def test_examples(pieces: list[str], strings: list[str], expected: str) -> None:
    out, ended = run(pieces, strings, 0)
    assert ("".join(out), ended) == (expected, True)


def test_hazard_25_the_longest_stop_strings_cost_little() -> None:
    """16 of 1,000 characters, and a text that is nearly one of them: no more is looked at than is held."""
    looked_at = 0

    class Counting(str):
        def startswith(self, prefix: object, *args: object) -> bool:
            nonlocal looked_at
            looked_at += 1
            return super().startswith(prefix)  # type: ignore[arg-type]

    stop = StopStrings([Counting("a" * 999 + chr(98 + i)) for i in range(16)])
    for _ in range(2000):
        assert stop.end("a") is None
        stop.take("a")
    assert looked_at <= 2000 * 16 * 2
