"""Numbers as people read them: seconds, bytes, counts, shares, tokens. No figures here."""

from __future__ import annotations

from typing import NamedTuple


class Unit(NamedTuple):
    scale: float  # of one, in seconds or bytes
    name: str


_TIMES = (Unit(1, "s"), Unit(1e-3, "ms"), Unit(1e-6, "µs"))
_BYTES = (Unit(2**30, "GiB"), Unit(2**20, "MiB"), Unit(2**10, "KiB"), Unit(1, "bytes"))


def time_unit(seconds: float) -> Unit:
    """One in which the longest time of an axis is a number of one to four digits."""
    return next((unit for unit in _TIMES if seconds >= unit.scale), _TIMES[-1])


def byte_unit(size: float) -> Unit:
    return next((unit for unit in _BYTES if size >= unit.scale), _BYTES[-1])


def duration(seconds: float) -> str:
    unit = time_unit(seconds)
    return f"{_digits(seconds / unit.scale)} {unit.name}"


def size(value: float) -> str:
    unit = byte_unit(value)
    return f"{_digits(value / unit.scale)} {unit.name}"


def count(number: float, noun: str = "", plural: str = "") -> str:
    """`count(1, "page")` is "1 page", `count(6112, "token")` is "6,112 tokens"."""
    noun = noun if number == 1 or not noun else plural or noun + "s"
    return f"{number:,.0f} {noun}".strip()


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.1f} times"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
