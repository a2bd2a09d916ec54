"""Recorded traffic as requests to simulate: Mooncake's and Qwen-Bailian's JSON lines. Knows nothing of serving.

Mooncake (Qin et al., FAST '25): timestamp in milliseconds, input_length, output_length, hash_ids of blocks of 512
tokens. Qwen-Bailian adds chat_id, parent_chat_id, type and turn, counts in seconds, and its blocks have 16 tokens.
Equal hash ids in equal places mean equal tokens, and nothing else does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from minisgl.benchmark.arrivals import Arrival, Segment


class Dialect(NamedTuple):
    block_size: int  # tokens
    unit_ns: int  # of a timestamp


MOONCAKE = Dialect(block_size=512, unit_ns=10**6)
BAILIAN = Dialect(block_size=16, unit_ns=10**9)
COLUMNS = ("timestamp", "input_length", "output_length", "hash_ids")  # that both have, and nothing else is read


def read_trace(path: Path, requests: int, time_scale: float | None = 1.0) -> list[Arrival]:
    """The first `requests` lines. Timestamps count from the first, times time_scale; with None all arrive at once.
    Raises ValueError that names the line which is not as described above."""
    try:
        with path.open(encoding="utf-8") as lines:
            return parse_trace(lines, str(path), requests, time_scale)
    except OSError as error:
        raise ValueError(f"trace {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"trace {path} is not UTF-8 text: {error}") from None


def parse_trace(lines: Iterable[str], source: str, requests: int, time_scale: float | None = 1.0) -> list[Arrival]:
    """As `read_trace`. source: where the lines are from, for errors."""
    arrivals: list[Arrival] = []
    streams: dict[Any, int] = {}
    first: float | None = None
    for number, line in enumerate(lines, start=1):
        if len(arrivals) == requests:
            break
        if not line.strip():
            continue
        try:
            row = _row(line)
            dialect = BAILIAN if "chat_id" in row else MOONCAKE
            first = row["timestamp"] if first is None else first
            if row["timestamp"] < first:
                raise ValueError(f"timestamp {row['timestamp']} is before the first line's, {first}")
            time = (row["timestamp"] - first) * dialect.unit_ns * (time_scale or 0)
            uid = len(arrivals)
            arrivals.append(Arrival(uid, _segments(row, dialect, streams), _length(row, "output_length"), int(time)))
        except ValueError as error:
            needed = f"each line is a JSON object with {', '.join(COLUMNS)}"
            raise ValueError(f"line {number} of {source}: {error}; {needed}: mend this one, or delete it") from None
    if not arrivals:
        raise ValueError(f"trace {source} holds no request")
    return sorted(arrivals, key=lambda arrival: arrival.time_ns)


def _row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{line.strip()!r:.80} is no JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{line.strip()!r:.80} is no object")
    for name in COLUMNS:
        if name not in row:
            raise ValueError(f"{name!r} is missing")
    time = row["timestamp"]
    if isinstance(time, bool) or not isinstance(time, int | float) or not math.isfinite(time):
        raise ValueError(f"timestamp must be a number, not {time!r:.80}")
    return row


def _segments(row: dict[str, Any], dialect: Dialect, streams: dict[Any, int]) -> tuple[Segment, ...]:
    """One for each block. What has no hash (a trace may leave out the last, partial block) is shared with nobody."""
    length, hashes, size = _length(row, "input_length"), row["hash_ids"], dialect.block_size
    if not isinstance(hashes, list) or any(type(key) is not int for key in hashes):
        raise ValueError(f"hash_ids must be a list of integers, not {hashes!r:.80}")
    if len(hashes) not in (length // size, -(-length // size)):
        raise ValueError(f"{len(hashes)} hash_ids for {length} tokens in blocks of {size}")
    ends = [min((index + 1) * size, length) for index in range(len(hashes))]
    segments = [Segment(_stream(streams, key), end) for key, end in zip(hashes, ends, strict=True)]
    if not ends or ends[-1] < length:
        segments.append(Segment(_stream(streams, object()), length))
    return tuple(segments)


def _stream(streams: dict[Any, int], key: Any) -> int:
    return streams.setdefault(key, 2 * len(streams))


def _length(row: dict[str, Any], name: str) -> int:
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, not {value!r:.80}")
    return value
