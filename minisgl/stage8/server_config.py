"""What can be set about the server. Does not load torch: the process that owns the port reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from minisgl.core.config import option
from minisgl.stage7.config import OverlapConfig

MOST_TOKENIZERS = 64


@dataclass(frozen=True)
class ServerConfig(OverlapConfig):
    group: ClassVar[str] = "server"

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = option(1919, "port to listen on", metavar="N")
    served_model_name: str | None = option(None, "the name clients use; default: the value of --model", metavar="NAME")
    num_tokenizer: int = option(0, "tokenizer processes; 0: the detokenizer's process does both", metavar="N")
    api_key: str | None = option(None, "the key clients must send; default: none is asked for", metavar="KEY")
    admin_key: str | None = option(None, "the key for /flush_cache; default: the same as for the rest", metavar="KEY")
    log_level: str = option("info", "what is said on standard error", ("debug", "info", "warning", "error"))
    drain_timeout: float = option(30.0, "seconds that running requests get to finish at the end", metavar="S")
    max_queued_requests: int = option(1024, "requests that may be open at once; more get 429", metavar="N")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least("port", 0)
        self.at_least("num_tokenizer", 0)
        self.at_least("drain_timeout", 0)
        self.at_least("max_queued_requests", 1)
        if self.num_tokenizer > MOST_TOKENIZERS:
            raise ValueError(
                f"--num-tokenizer must be at most {MOST_TOKENIZERS}, a process each, not {self.num_tokenizer}"
            )
        for name, key in (("--api-key", self.api_key), ("--admin-key", self.admin_key)):
            if key == "":
                raise ValueError(f"{name} is empty, and nobody could give it: leave it out, or give one")
        if self.port > 65535:
            raise ValueError(f"--port must be from 0 to 65535 (0 takes a free one), not {self.port}")
