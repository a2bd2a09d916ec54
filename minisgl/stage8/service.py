"""What the server can do right now: which model, whether it takes requests, whether it is well. Knows no HTTP."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from minisgl.stage8.errors import unavailable
from minisgl.stage8.frontend import Frontend

# Seconds without a heartbeat, which its loop sends between two steps. A process that does not run at all is noticed
# long before (`silence`), so this is for a loop that hangs, and must be more than the longest step takes: thousands of
# tokens of a prompt on a CPU take a minute.
HEARTBEAT_LIMIT = 300.0


@dataclass
class Service:
    """names: the model's, the one that answers carry first. root: where the model came from.

    frontend and max_model_len are there once the engine is ready.
    """

    names: tuple[str, ...]
    root: str
    settings: dict[str, Any]  # as shown to clients: no keys
    frontend: Frontend | None = None
    max_model_len: int | None = None
    status: Literal["starting", "ready", "draining", "failed"] = "starting"
    problem: str | None = None  # why the engine is gone
    silence: str | None = None  # which process does not answer, which may pass
    body_bytes: int = 0  # of the bodies that are being read
    created: int = field(default_factory=lambda: int(time.time()))

    def accepting(self) -> Frontend:
        """Where requests go. Raises ApiError 503 that says why there is no such place."""
        if self.problem is not None:
            raise unavailable(self.problem)
        if self.status == "draining":
            raise unavailable("the server is shutting down: it takes no new requests")
        frontend = self.loaded()
        if self.silence is not None:
            raise unavailable(self.silence)
        return frontend

    def loaded(self) -> Frontend:
        """Where the numbers are. Raises ApiError 503."""
        if self.frontend is None:
            raise unavailable("the server is still loading the model")
        return self.frontend

    def check_health(self) -> None:
        """Raises ApiError 503 unless the engine lives."""
        for problem in (self.problem, self.silence):
            if problem is not None:
                raise unavailable(problem)
        age = self.loaded().heartbeat_age
        if age > HEARTBEAT_LIMIT:
            raise unavailable(f"the scheduler has not been heard of for {age:.0f} s")

    def fail(self, problem: str) -> None:
        """The engine is gone for good: open requests end with this, and none is taken any more."""
        self.status, self.problem = "failed", problem
        if self.frontend is not None:
            self.frontend.fail_all(problem)

    def info(self) -> dict[str, Any]:
        """Settings and live counters."""
        counters: dict[str, int] = {}
        if self.frontend is not None:
            own = {
                "requests_open": self.frontend.num_open,
                "replies_late": self.frontend.late,
                "malformed_messages": self.frontend.malformed + self.frontend.stats.get("malformed_messages", 0),
            }
            counters = self.frontend.stats | own
        return {
            "model": self.names[0],
            "max_model_len": self.max_model_len,
            "status": self.status,
            "settings": self.settings,
            **counters,
        }
