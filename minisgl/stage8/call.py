"""Turns a request's body into requests for the engine and the form of the answer. Knows nothing of what runs them.

Choices are numbered prompt by prompt: choice i answers prompt i // n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minisgl.core.sampling_params import SamplingParams
from minisgl.stage8.errors import bad_request
from minisgl.stage8.messages import Echo, Tokenize
from minisgl.stage8.openai_protocol import (
    MAX_TOKEN_ID,
    ROLES,
    Body,
    ChatBody,
    ChatMessage,
    CompletionBody,
    StreamOptions,
    chat_logprobs,
    check_choices,
    check_model,
    decode_body,
    for_choice,
    sampling_params,
    stop_strings,
    template_kwargs,
    token_limit,
)
from minisgl.stage8.sse import AnswerFormat, ChatFormat, CompletionFormat

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
MAX_COPIED = 16 << 20  # of all answers' requests together: about what one body may have
MAX_MESSAGES = 10_000  # each is several tokens, and a template may look at every pair of them


@dataclass(frozen=True)
class Call:
    requests: list[Tokenize]  # one a choice
    n: int  # choices a prompt
    stream: bool
    include_usage: bool  # of a stream, which has usage only if asked; a whole answer always has it
    continuous_usage: bool  # every event of a stream says what was used so far
    format: AnswerFormat


def chat_call(data: bytes, served: tuple[str, ...], new_uid: Callable[[], int]) -> Call:
    """The body of /v1/chat/completions. Raises ApiError 400 or 404."""
    body = decode_body(data, ChatBody)
    check_model(body.model, served)
    limit, limit_name = token_limit(body)
    if not 1 <= len(body.messages) <= MAX_MESSAGES:
        raise bad_request(f"messages must be 1 to {MAX_MESSAGES}, not {len(body.messages)}", "messages")
    request = {
        "field": "messages",
        "chat": [_plain(message, f"messages[{index}]") for index, message in enumerate(body.messages)],
        "template_kwargs": template_kwargs(body),
        "fill_context": limit is None,
    }
    max_tokens = MAX_TOKEN_ID if limit is None else limit  # any min_tokens is less, until it is known what is left
    params = sampling_params(body, max_tokens, limit_name, logprobs=chat_logprobs(body))
    return make_call(body, [request], params, ChatFormat, served, new_uid)


def completion_call(data: bytes, served: tuple[str, ...], new_uid: Callable[[], int]) -> Call:
    """The body of /v1/completions. Raises ApiError 400 or 404.

    max_tokens 0 with echo asks for the prompt alone, and its logprobs: one token is computed and not shown.
    """
    body = decode_body(data, CompletionBody)
    check_model(body.model, served)
    limit, limit_name = token_limit(body)
    echo: Echo = "no" if not body.echo else "alone" if limit == 0 else "before"
    max_tokens = 1 if echo == "alone" else COMPLETION_MAX_TOKENS if limit is None else limit
    of_prompt = body.logprobs is not None and echo != "no"
    params = sampling_params(body, max_tokens, limit_name, logprobs=body.logprobs, prompt_logprobs=of_prompt)
    prompts = [{**prompt, "echo": echo} for prompt in prompts_of(body.prompt, "prompt")]
    return make_call(body, prompts, params, CompletionFormat, served, new_uid)


def make_call(
    body: Body,
    prompts: list[dict[str, Any]],
    params: SamplingParams,
    make_format: Callable[[str, bool, bool], AnswerFormat],
    served: tuple[str, ...],
    new_uid: Callable[[], int],
) -> Call:
    n = check_choices(len(prompts), body.n)
    _check_copies(prompts, n)
    stop = stop_strings(body)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only for streams: set stream to true or leave it out", "stream_options")
    options = body.stream_options or StreamOptions()
    requests = [
        Tokenize(uid=new_uid(), params=for_choice(params, choice), stop=stop, **prompt)
        for prompt in prompts
        for choice in range(n)
    ]
    usage, continuous = bool(options.include_usage), bool(options.continuous_usage_stats)
    form = make_format(body.model or served[0], usage, params.logprobs is not None)
    return Call(requests, n, bool(body.stream), usage, continuous, form)


def _check_copies(prompts: list[dict[str, Any]], n: int) -> None:
    """Each answer's request travels with a prompt of its own."""
    size = n * sum(map(_size, prompts))
    if n > 1 and size > MAX_COPIED:
        words = f"{n} answers to each prompt make {size} characters or ids of prompts, over the limit of {MAX_COPIED}"
        raise bad_request(f"n: {words}: ask for fewer", "n")


def _size(prompt: dict[str, Any]) -> int:
    """In characters or ids."""
    of_chat = sum(len(message["content"]) for message in prompt.get("chat") or [])
    return len(prompt.get("text") or prompt.get("token_ids") or "") + of_chat


def _plain(message: ChatMessage, path: str) -> dict[str, str]:
    """What the chat template is given: content as one string, parts joined by newlines as vLLM does."""
    if message.role not in ROLES:
        raise bad_request(f"{path}.role must be one of {', '.join(ROLES)}, not {message.role!r:.80}", f"{path}.role")
    if isinstance(message.content, str):
        content = message.content
    else:
        for index, part in enumerate(message.content):
            place = f"{path}.content[{index}]"
            if part.type != "text":
                raise bad_request(f"{place} must be a text part, not one of type {part.type!r:.80}", place)
            if part.text is None:
                raise bad_request(f"{place}.text is missing", f"{place}.text")
        content = "\n".join(part.text or "" for part in message.content)
    # Templates know the system's role; most drop what a "developer" says without a word.
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content} | ({} if message.name is None else {"name": message.name})


def prompts_of(prompt: str | list[int | str | list[int]], name: str) -> list[dict[str, Any]]:
    """A string, a list of strings, a list of ids, or a list of lists of ids. name: the field's."""
    if isinstance(prompt, str):
        return [{"text": prompt, "field": name}]
    if not prompt:
        raise bad_request(f"{name} is empty: give text or token ids", name)
    kinds = set(map(type, prompt))  # a loop over isinstance takes twice as long
    if len(kinds) > 1:
        raise bad_request(f"{name} must hold only strings, only ids, or only lists of ids", name)
    if kinds == {int}:
        return [{"token_ids": prompt, "field": name}]
    return [{"text" if kinds == {str} else "token_ids": item, "field": name} for item in prompt]
