"""Renders a conversation with the model's own Jinja template, never one from a request. Knows nothing of tokens.

The environment is that of `transformers.utils.chat_template_utils`, for which the templates of the hub are written.
A template is somebody else's program: it runs in Jinja's immutable sandbox, and what it writes is bounded. So is what
one operation can make of little (`"x" * 10**9`, `9**(9**9)`); the server bounds its time (`stage8.tokenizer`).
Not bounded is the memory of a text that is doubled again and again: whoever serves a model trusts it that far.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Sized
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED_CHARS = 2**24  # above the text of any context window, below what would exhaust memory
MAX_BASE, MAX_EXPONENT = 2**31, 64
MAX_MESSAGE_CHARS = 300


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template refused or failed on these messages."""


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: "bos_token" and its like with their text, which templates use as variables.
        Raises ChatTemplateError when the source is no Jinja."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is not valid Jinja: {_short(error)}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, kwargs: Mapping[str, Any]
    ) -> str:
        """The text the model continues. messages and kwargs: JSON values. A field that is None counts as absent,
        since many templates would print it. Raises ChatTemplateError."""
        if not messages:
            raise ChatTemplateError("there are no messages: give at least one")
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        known = {"messages": present, "add_generation_prompt": add_generation_prompt, **self._special_tokens}
        known |= {"tools": None, "documents": None}
        for name in sorted(kwargs.keys() & {*known, "chat_template"}):
            raise ChatTemplateError(f"{name} cannot be set as a variable of the chat template: the server sets it")
        return self._render({**kwargs, **known})

    def _render(self, variables: dict[str, Any]) -> str:
        pieces, size = [], 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    break
        except Exception as error:  # whatever a template can do wrong: it is code we did not write
            raise ChatTemplateError(f"the model's chat template refused these messages: {_short(error)}") from error
        if size > MAX_RENDERED_CHARS:
            raise ChatTemplateError(
                f"the chat template wrote over {MAX_RENDERED_CHARS} characters: shorten the messages"
            )
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "+"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= MAX_BASE and abs(right) <= MAX_EXPONENT):
            raise OverflowError(f"{left!r:.20} ** {right!r:.20} is too large a power")
        size = 0
        if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            size = len(left) + len(right)
        elif operator == "*":
            size = max(_repeated(left, right), _repeated(right, left))
        if size > MAX_RENDERED_CHARS:
            raise OverflowError(f"an operation makes something of size {size}, over the limit of {MAX_RENDERED_CHARS}")
        return super().call_binop(context, operator, left, right)


def _repeated(what: Any, times: Any) -> int:
    """The size of a product: characters, elements, or bits."""
    if not isinstance(times, int):
        return 0
    if isinstance(what, int):
        return what.bit_length() + times.bit_length()
    return len(what) * times if isinstance(what, Sized) else 0


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock])
    environment.filters["tojson"] = _to_json
    environment.globals["namespace"] = _Namespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training. Here only its contents matter."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Refuses names that Python itself would look up on the object, and call outside the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`: a template may have a variable of that name
        self, *rest = args
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r:.80}")
        super().__setitem__(name, value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, and the model would read the escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _short(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + " …"
