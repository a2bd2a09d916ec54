"""The OpenAPI document: every endpoint, from the structs that read their bodies. Knows nothing of how they answer.

The structs of answers are here for the document alone: answers are written as bytes. A test holds them to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from minisgl.stage8.control import DecodeBody, EncodeBody
from minisgl.stage8.native_protocol import GenerateBody
from minisgl.stage8.openai_protocol import ChatBody, CompletionBody


class Exact(msgspec.Struct, forbid_unknown_fields=True):
    """What an answer has, and nothing else."""


class Error(Exact):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Exact):
    error: Error


class Details(Exact):
    cached_tokens: int


class UsageFacts(Exact):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Details


class AnswerMessage(Exact):
    role: Literal["assistant"]
    content: str


class ChatChoice(Exact):
    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class CompletionChoice(Exact):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class ChatAnswer(Exact):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageFacts


class CompletionAnswer(Exact):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageFacts


class MetaInfo(Exact):
    id: str
    finish_reason: dict[str, Any]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class GenerateAnswer(Exact):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class EncodeAnswer(Exact):
    tokens: list[int]
    count: int
    max_model_len: int


class DecodeAnswer(Exact):
    prompt: str
    text: str


class Status(Exact):
    status: str


class ModelCard(Exact):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class ModelList(Exact):
    object: Literal["list"]
    data: list[ModelCard]


@dataclass(frozen=True)
class Endpoint:
    """answer: the type of what a 200 has as JSON, None for text. errors: the statuses besides 401 and 500."""

    method: str
    path: str
    summary: str
    answer: Any
    errors: tuple[int, ...] = ()
    body: Any = None
    streams: bool = False


OneOrMore = GenerateAnswer | list[GenerateAnswer]
_ASKED = (400, 404, 413, 429, 503)
ENDPOINTS = (
    Endpoint("post", "/v1/chat/completions", "Answer a conversation", ChatAnswer, _ASKED, ChatBody, True),
    Endpoint("post", "/v1/completions", "Go on from prompts", CompletionAnswer, _ASKED, CompletionBody, True),
    Endpoint("post", "/generate", "The same in SGLang's form", OneOrMore, _ASKED, GenerateBody, True),
    Endpoint("post", "/tokenize", "The token ids of a text", EncodeAnswer, _ASKED, EncodeBody),
    Endpoint("post", "/detokenize", "The text of token ids", DecodeAnswer, _ASKED, DecodeBody),
    Endpoint("post", "/flush_cache", "Forget all cached prefixes; not while requests run", Status, (409, 429, 503)),
    Endpoint("post", "/reset_prefix_cache", "The same under vLLM's name", Status, (409, 429, 503)),
    Endpoint("get", "/v1/models", "The models served", ModelList),
    Endpoint("get", "/v1/models/{name}", "One model", ModelCard, (404,)),
    Endpoint("get", "/health", "Whether every process lives and the scheduler is heard of", Status, (503,)),
    Endpoint("get", "/ready", "Whether requests are taken", Status, (503,)),
    Endpoint("get", "/metrics", "Counters and histograms in Prometheus' format", None, (503,)),
    Endpoint("get", "/server_info", "Settings and live counters", dict[str, Any]),
    Endpoint("get", "/openapi.json", "This document", dict[str, Any]),
)


def openapi_document(version: str) -> dict[str, Any]:
    types = [ErrorAnswer, *(kind for one in ENDPOINTS for kind in (one.body, one.answer) if kind is not None)]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, Any] = {}
    for one in ENDPOINTS:
        paths.setdefault(one.path, {})[one.method] = _operation(one, by_type)
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "minisgl", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": bearer}},
        "security": [{"key": []}, {}],  # whether keys are asked for is the server's setting
    }


def _operation(one: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    answers: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if one.answer is not None:
        answers = {"application/json": {"schema": schemas[repr(one.answer)]}}
    if one.streams:
        answers["text/event-stream"] = {}
    failed = {"description": "refused or failed", "content": _json(schemas[repr(ErrorAnswer)])}
    responses = {str(status): failed for status in (*one.errors, 401, 500)}
    operation: dict[str, Any] = {"summary": one.summary, "responses": {"200": _answered(answers), **responses}}
    if one.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(schemas[repr(one.body)])}
    if "{name}" in one.path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _answered(content: dict[str, Any]) -> dict[str, Any]:
    return {"description": "answered", "content": content}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
