"""A trace made here, in the columns of Qwen-Bailian's, for where that one is not to be had. Knows nothing of serving.

Chats begin as they like; a turn's prompt is the one before it, its answer, and a new message; each chat begins with
one of a few system prompts. Lengths are lognormal. The constants are chosen, not fitted: 1,000 requests come in 99 s,
with 1,400 prompt tokens (median 820) and 350 answer tokens (240) each; 54 % of the prompt tokens stand in blocks that
an earlier prompt began with too. The columns are those of Wang et al., "KVCache Cache in the Wild", USENIX ATC '25:
each line is a whole request, each of its hashes stands for 16 tokens, the last one for those that are left.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from minisgl.benchmark.trace_file import BAILIAN

CHATS_S = 6.0  # that begin in a second, as a Poisson process
GOES_ON = 0.5  # share of the turns after which the user asks again
READ_S = (15.0, 0.8)  # from a request to the next of its chat: this median and sigma, as all pairs below
SYSTEM_PROMPTS = (400, 0.7, 6)  # tokens, and how many there are; of n, the nth is asked for 1/n times as often
MESSAGES = {"text": (80, 1.2, 0.80), "search": (1500, 0.6, 0.12), "file": (4000, 0.8, 0.08)}  # and the share of each
OUTPUTS = (250, 0.9)
LONGEST = 16384  # tokens of a message or an answer
MOST = 32768  # of a prompt: a chat that would pass it ends


class Turn(NamedTuple):
    """Of a chat, before its prompt is made. In the order in which they come."""

    timestamp: float
    chat: int
    number: int  # 1 for the first
    parent: int  # the request before it in its chat, or -1
    kind: str
    system: int  # which system prompt
    history: int  # tokens that stand before its message


def synthetic_trace(requests: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows in order of time. The first n of a longer trace are the n of a shorter one."""
    rng = np.random.default_rng(seed)
    systems = [_lognormal(rng, *SYSTEM_PROMPTS[:2]) for _ in range(SYSTEM_PROMPTS[2])]
    chats = _chats(rng, systems)
    waiting, ids = [next(chats)], _Ids()
    rows: list[dict[str, Any]] = []
    while len(rows) < requests:
        turn = heapq.heappop(waiting)
        if turn.number == 1:
            heapq.heappush(waiting, next(chats))
        prompt = turn.history + _lognormal(rng, *MESSAGES[turn.kind][:2])
        output = _lognormal(rng, *OUTPUTS)
        if prompt > MOST:
            continue
        chat_id = len(rows)
        rows.append(
            {
                "chat_id": chat_id,
                "parent_chat_id": turn.parent,
                "timestamp": round(turn.timestamp, 3),
                "input_length": prompt,
                "output_length": output,
                "type": turn.kind,
                "turn": turn.number,
                "hash_ids": ids.of_prompt(turn.chat, turn.system, systems[turn.system], prompt),
            }
        )
        if rng.random() < GOES_ON:
            later = turn.timestamp + rng.lognormal(np.log(READ_S[0]), READ_S[1])
            after = Turn(later, turn.chat, turn.number + 1, chat_id, "text", turn.system, prompt + output)
            heapq.heappush(waiting, after)
    return rows


def _chats(rng: np.random.Generator, systems: list[int]) -> Iterator[Turn]:
    """First turns, for ever."""
    popularity = 1 / np.arange(1, len(systems) + 1)
    shares = [share for _, _, share in MESSAGES.values()]
    time = 0.0
    for chat in itertools.count():
        kind = str(rng.choice(list(MESSAGES), p=shares))
        system = int(rng.choice(len(systems), p=popularity / popularity.sum()))
        yield Turn(time, chat, 1, -1, kind, system, systems[system])
        time += rng.exponential(1 / CHATS_S)


class _Ids:
    """Numbers blocks by what stands in them, in the order in which they are first seen."""

    def __init__(self) -> None:
        self._ids: dict[tuple[Any, ...], int] = {}

    def of_prompt(self, chat: int, system: int, system_len: int, length: int) -> list[int]:
        """Blocks within the system prompt are everybody's who has it, later ones the chat's; one that is not full is
        another than the same one filled."""
        size, found = BAILIAN.block_size, []
        for start in range(0, length, size):
            end = min(start + size, length)
            owner = ("system", system) if end <= system_len else ("chat", chat)
            found.append(self._ids.setdefault((*owner, start, end), len(self._ids)))
        return found


def _lognormal(rng: np.random.Generator, median: float, sigma: float) -> int:
    return int(np.clip(round(rng.lognormal(np.log(median), sigma)), 1, LONGEST))
