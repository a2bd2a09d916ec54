"""What crosses between the caller's process and the ranks, in MessagePack: data, never code. Knows no sockets."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from minisgl.core.llm import Request
from minisgl.core.outputs import TokenOutput


class Start(msgspec.Struct):
    """The first message to a rank: all it needs to become one."""

    module: str  # the stage's, with its LLM
    config: dict[str, Any]
    folder: str
    max_seq_len: int
    eos_ids: list[int]
    rank: int
    rendezvous: str
    log_level: int


class AddRequests(msgspec.Struct, tag=True):
    requests: list[Request]


class Abort(msgspec.Struct, tag=True):
    uids: list[int]


class Stop(msgspec.Struct, tag=True):
    """End the loop. What is unfinished is dropped."""


Order = AddRequests | Abort | Stop


class Ready(msgspec.Struct, tag=True):
    """A rank has started."""

    num_pages: int
    weight_bytes: int
    kv_bytes: int


class Outputs(msgspec.Struct, tag=True):
    """What one step gave."""

    outputs: list[TokenOutput]


class Idle(msgspec.Struct, tag=True):
    """Nothing waits, runs or is in flight."""

    stats: dict[str, int]


class Failed(msgspec.Struct, tag=True):
    """The rank's last words. "invalid": the caller's fault; "peer lost": another rank's, which knows more."""

    error: str
    kind: Literal["invalid", "peer lost", "error"]


Report = Ready | Outputs | Idle | Failed

encode = msgspec.msgpack.encode
