"""The HTTP routes. Knows what each path means, and nothing of how answers are made or sent."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl import __version__
from minisgl.core.garbage import unsearched
from minisgl.stage8 import control
from minisgl.stage8.answer import Answer
from minisgl.stage8.call import Call, chat_call, completion_call
from minisgl.stage8.errors import FORESEEN, ApiError, as_api_error
from minisgl.stage8.frontend import QueueFull
from minisgl.stage8.native_protocol import generate_call
from minisgl.stage8.openai_protocol import check_model
from minisgl.stage8.openapi import openapi_document
from minisgl.stage8.prometheus import CONTENT_TYPE_LATEST, prometheus_text
from minisgl.stage8.service import Service

MAX_BODY = 16 << 20  # bytes: some million tokens
MAX_VALUES = 1 << 19  # of one body, such as 128 prompts of 4,096 ids: while they are read all streams wait
MAX_BODIES = 512 << 20  # of all that are being read at once, but for the small ones
SMALL_BODY = 64 << 10  # what a connection holds in any case
OPEN_PATHS = ("/health", "/ready")  # for load balancers, which have no key
ADMIN_PATHS = ("/flush_cache", "/reset_prefix_cache")  # what concerns everybody's requests

Handler = Callable[..., Awaitable[Response]]


def create_app(service: Service, api_key: str | None = None, admin_key: str | None = None) -> FastAPI:
    """admin_key: asked for by ADMIN_PATHS, in the place of api_key. None: no key is asked for."""
    app = FastAPI(title="minisgl", openapi_url=None, redirect_slashes=False)
    app.add_middleware(KeyGuard, api_key=api_key, admin_key=admin_key)
    for foreseen in (ApiError, *FORESEEN):  # of the others Starlette shows the trace
        app.add_exception_handler(foreseen, _failed)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _failed)
    _add_answer_routes(app, service)
    _add_model_routes(app, service)
    _add_control_routes(app, service)
    _add_state_routes(app, service)
    return app


def _add_answer_routes(app: FastAPI, service: Service) -> None:
    def add(path: str, make_call: Callable[[bytes, tuple[str, ...], Callable[[], int]], Call]) -> None:
        @app.post(path)
        async def answer(request: Request) -> Response:
            frontend = service.accepting()
            body = await read_body(request, service)
            with unsearched():
                call = make_call(body, service.names, frontend.new_uid)
            return Answer(frontend, call)

    add("/v1/chat/completions", chat_call)
    add("/v1/completions", completion_call)
    add("/generate", generate_call)


def _get(app: FastAPI, path: str) -> Callable[[Handler], Handler]:
    """Of HEAD's answer uvicorn sends all but the body."""
    return app.api_route(path, methods=["GET", "HEAD"])


def _add_model_routes(app: FastAPI, service: Service) -> None:
    @_get(app, "/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [_model_card(service, service.names[0])]})

    @_get(app, "/v1/models/{name:path}")
    async def model(name: str) -> Response:
        check_model(name, service.names)
        return _json(_model_card(service, name))


def _add_control_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return _json(await control.tokenize(await read_body(request, service), service))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return _json(await control.detokenize(await read_body(request, service), service))

    @app.post("/flush_cache")
    @app.post("/reset_prefix_cache")
    async def flush_cache() -> Response:
        return _json(await control.flush_cache(service.accepting()))


def _add_state_routes(app: FastAPI, service: Service) -> None:
    @_get(app, "/health")
    async def health() -> Response:
        service.check_health()
        return _json({"status": "ok"})

    @_get(app, "/ready")
    async def ready() -> Response:
        service.accepting()
        return _json({"status": "ready"})

    @_get(app, "/metrics")
    async def metrics() -> Response:
        frontend = service.loaded()
        text = prometheus_text(service.names[0], frontend.metrics, frontend.stats)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @_get(app, "/server_info")
    async def server_info() -> Response:
        return _json(service.info())

    @_get(app, "/openapi.json")
    async def openapi() -> Response:
        return _json(openapi_document(__version__))


async def read_body(request: Request, service: Service) -> bytes:
    """Raises ApiError 413 as soon as the body is known to be too long, which a header can tell, or when it has too many
    parts; QueueFull when all bodies together are too long."""
    too_long = ApiError(413, f"the body is over the limit of {MAX_BODY} bytes: send less in one request")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY:
        raise too_long
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            service.body_bytes += len(piece)
            if len(body) > MAX_BODY:
                raise too_long
            if len(body) > SMALL_BODY and service.body_bytes > MAX_BODIES:
                raise QueueFull(f"over {MAX_BODIES} bytes of requests are being read: try again later")
    finally:
        service.body_bytes -= len(body)
    _check_values(body, max(MAX_VALUES, 2 * (service.max_model_len or 0)))
    return bytes(body)


def _check_values(body: bytearray, limit: int) -> None:
    """Before they are made, which takes ten times as long. Commas within a text count too: few texts have so many.
    Raises ApiError 413."""
    values = body.count(b",")
    if values > limit:
        words = f"the body has {values} values, as its commas tell, over the limit of {limit}"
        raise ApiError(413, f"{words}: send fewer prompts or token ids in one request")


class KeyGuard:
    """ASGI middleware: 401 without the path's key, before anything else is looked at."""

    def __init__(self, app: ASGIApp, api_key: str | None, admin_key: str | None) -> None:
        self._app, self._api_key = app, api_key
        self._admin_key = api_key if admin_key is None else admin_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._admits(scope):
            await self._app(scope, receive, send)
            return
        message = "a valid API key is needed: send the header Authorization: Bearer KEY"
        error = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        await error.response(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        key = self._admin_key if scope["path"] in ADMIN_PATHS else self._api_key
        if key is None or scope["path"] in OPEN_PATHS:
            return True
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.lstrip(b" "), key.encode())


def _model_card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "minisgl",
        "root": service.root,
        "max_model_len": service.max_model_len,
    }


async def _failed(request: Request, error: Exception) -> Response:
    return as_api_error(error).response


async def _no_route(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses: no such path, or not with this method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    what = f"{request.method:.20} {request.scope['path']:.200}"
    reason = {404: f"there is nothing at {what}", 405: f"{what} is not allowed: see the Allow header"}
    return ApiError(status, reason.get(status, what), headers=headers).response


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody will read it


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
