"""Errors as OpenAI's clients expect them. Knows status codes and bodies, and nothing of why something failed.

400 bad input, 401 key, 404 model or route, 405 method, 413 body, 429 queue full, 503 no engine; 500 only for our own
bugs, since clients send those requests again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from minisgl.stage8.ask import EngineGone, RequestFailed, RequestRefused
from minisgl.stage8.frontend import QueueFull

MAX_MESSAGE = 500  # characters: an error never repeats a large input
RETRY_AFTER = 1  # seconds
FORESEEN = (RequestRefused, RequestFailed, QueueFull, EngineGone)  # what `as_api_error` knows besides ApiError

_log = logging.getLogger(__name__)


class ApiError(Exception):
    """What the client gets instead of an answer. param: the field at fault. code: for programs to tell it by."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers
        self.message = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 2] + " …"

    @property
    def body(self) -> bytes:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    @property
    def response(self) -> Response:
        return Response(self.body, self.status, self.headers, "application/json")


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param)


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, code="unavailable", headers={"Retry-After": str(RETRY_AFTER)})


def as_api_error(error: Exception) -> ApiError:
    """Whatever was raised, as what the client is told. Something unforeseen is logged, and told in no detail."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRefused):
        return ApiError(400, str(error), error.param, error.code)
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(RETRY_AFTER)})
    if isinstance(error, EngineGone):
        return unavailable(str(error))
    if not isinstance(error, RequestFailed):  # the process that failed has logged why
        _log.error("a request failed with an unforeseen %s", type(error).__name__, exc_info=error)
    return ApiError(500, "the server failed on this request: this is a bug in it", code="internal_error")
