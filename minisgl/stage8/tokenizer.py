"""Turns requests into token ids, and refuses those that cannot be served. Knows nothing of sockets or processes.

A request may fail here, the process may not: whatever goes wrong becomes the request's `Rejected`.
"""

from __future__ import annotations

import logging
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

from minisgl.core.errors import ContextLengthExceeded
from minisgl.core.prompts import check_prompt
from minisgl.core.sampling_params import MAX_SEED, SamplingParams
from minisgl.core.tokenizer import Tokenizer
from minisgl.stage3.page_count import check_fits
from minisgl.stage8.child import EngineInfo, one_line
from minisgl.stage8.messages import (
    Abort,
    Answered,
    Decode,
    Encode,
    Flush,
    Generate,
    Message,
    Rejected,
    Tokenize,
)

log = logging.getLogger("minisgl")

MAX_ERROR_CHARS = 300
TEMPLATE_SECONDS = 5.0  # a template is a program, and all other requests wait for it

Outcome = list[int] | BaseException  # of one request: its ids, or why there are none


class TokenizerRole:
    """vocab_size: the model's, which may be larger than the tokenizer's. seed: draws the seeds of requests without.
    From now on the tokenizer remembers no words: clients make up any."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, info: EngineInfo, seed: int) -> None:
        tokenizer.forget_words()
        self._tokenizer, self._vocab_size, self._info = tokenizer, vocab_size, info
        self._seeds = random.Random(seed)

    def handle(self, messages: Sequence[Message]) -> list[Message]:
        """What these messages come to, for the scheduler and in their order. Messages of other roles are ignored."""
        outcomes = iter(self._encode_all([message for message in messages if isinstance(message, Tokenize)]))
        results: list[Message] = []
        for message in messages:
            if isinstance(message, Tokenize):
                results.append(self._result(message, next(outcomes)))
            elif isinstance(message, Encode | Decode):
                results.append(self._answer(message))
            elif isinstance(message, Abort | Flush):
                results.append(message)
        return results

    def _answer(self, question: Encode | Decode) -> Answered | Rejected:
        try:
            if isinstance(question, Encode):
                (outcome,) = self._encode([question.text], question.special)
                return Answered(question.uid, token_ids=_checked(outcome))
            for token_id in question.token_ids:
                if not 0 <= token_id < self._vocab_size:
                    raise ValueError(f"token id {token_id} is not from 0 to {self._vocab_size - 1}")
            return Answered(question.uid, self._tokenizer.decode(question.token_ids))
        except BaseException as error:  # see `_rejected`
            return _rejected(question, error)

    def _encode_all(self, requests: Sequence[Tokenize]) -> list[Outcome]:
        """One outcome a request. Texts are encoded together; a template has written BOS, plain text has not."""
        rendered = [_attempt(self._render, request) for request in requests]
        for special in (True, False):
            texts = {i: text for i, text in enumerate(rendered) if isinstance(text, str)}
            texts = {i: text for i, text in texts.items() if (requests[i].chat is None) is special}
            for i, outcome in zip(texts, self._encode(list(texts.values()), special), strict=True):
                rendered[i] = outcome
        return rendered

    def _encode(self, texts: list[str], special: bool) -> list[Outcome]:
        """A batch that fails is encoded again one by one: only those that are at fault shall fail. A single text is a
        batch too: `encode` would keep Python's lock, and with megabytes the process would seem to hang."""
        batch = _attempt(self._tokenizer.encode_batch, texts, special)
        if isinstance(batch, list):
            return batch
        return [_attempt(self._tokenizer.encode, text, special) for text in texts]

    def _render(self, request: Tokenize) -> list[int] | str:
        if [request.text, request.token_ids, request.chat].count(None) != 2:
            raise ValueError("a request needs exactly one of text, token ids and chat messages")
        if request.chat is not None:
            with time_limit(TEMPLATE_SECONDS, "the chat template"):
                return self._check_length(self._tokenizer.apply_chat_template(request.chat, **request.template_kwargs))
        return request.token_ids or [] if request.text is None else self._check_length(request.text)

    def _check_length(self, text: str) -> str:
        """Before the work of encoding it: no token stands for more characters than it has letters (but for those
        that stand for anything unknown, of which nobody wants so many)."""
        limit = self._info.max_seq_len * self._tokenizer.longest_token
        if len(text) > limit:
            words = f"the prompt has {len(text)} characters, and {self._info.max_seq_len} tokens hold at most {limit}"
            raise ContextLengthExceeded(f"{words}: shorten it")
        return text

    def _result(self, request: Tokenize, outcome: Outcome) -> Generate | Rejected:
        try:
            ids = _checked(outcome)
            params = self._complete(request, len(ids))
            check_prompt(ids, params, self._vocab_size, self._info.max_seq_len)
            check_fits(len(ids), params, self._info.page_size, self._info.num_pages)
            text = None if request.echo == "no" else request.text
            return Generate.of(request.uid, ids, params, request.stop, request.echo, text)
        except BaseException as error:  # see `_rejected`
            return _rejected(request, error)

    def _complete(self, request: Tokenize, prompt_len: int) -> SamplingParams:
        """What only now can be said: how much the context leaves, and the seed, which all ranks must share."""
        params = request.params
        if request.fill_context:
            params = replace(params, max_tokens=max(1, self._info.max_total_tokens - prompt_len))
        if params.seed is None and not params.is_greedy:
            params = replace(params, seed=self._seeds.randint(0, MAX_SEED))
        return params


def _checked(outcome: Outcome) -> list[int]:
    if not isinstance(outcome, list):
        raise outcome
    return outcome


def _rejected(question: Tokenize | Encode | Decode, error: BaseException) -> Rejected:
    """A panic of the Rust library is not an Exception, and is no more to end this process than one."""
    is_bug = not isinstance(error, ValueError)
    if is_bug:
        log.error("request %d: the tokenizer failed", question.uid, exc_info=error)
    words = one_line(error, MAX_ERROR_CHARS)
    if isinstance(error, ContextLengthExceeded) and isinstance(question, Tokenize):
        return Rejected(question.uid, words, question.field, code="context_length_exceeded")
    field = words.partition(" ")[0]
    return Rejected(question.uid, words, field if field in SamplingParams.__dataclass_fields__ else None, is_bug)


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raises TimeoutError within what takes longer. Only in the main thread, where signals arrive; elsewhere no limit.
    One long call of C is not interrupted: what a template can do within one is bounded where it is rendered."""

    def ring(*_: object) -> NoReturn:
        raise TimeoutError(f"{what} took over {seconds:g} s: send fewer or shorter messages")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _attempt(call: Callable[..., Any], *args: Any) -> Any:
    """What the call returns, or what it raised."""
    try:
        return call(*args)
    except BaseException as error:  # see above
        return error
