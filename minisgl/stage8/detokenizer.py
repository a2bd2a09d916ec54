"""Turns tokens into text as they come, all requests side by side. Knows nothing of sockets or processes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from minisgl.core.detokenizer import IncrementalDetokenizer
from minisgl.core.outputs import FinishReason
from minisgl.core.tokenizer import Tokenizer
from minisgl.stage8.answer_text import AnswerText, TokenTexts
from minisgl.stage8.messages import Answered, Begin, Heartbeat, Message, Rejected, Replies, Reply, Step, StopMatched

log = logging.getLogger("minisgl")


class DetokenizerRole:
    """Remembers a request from its first token to its last."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, IncrementalDetokenizer | None] = {}  # None: it failed, and what still comes is dropped

    @property
    def num_open(self) -> int:
        return len(self._texts)

    def handle(self, messages: Sequence[Message]) -> list[Message]:
        """What these messages come to, for the API: all replies in one message. Others' messages are ignored."""
        replies: list[Reply] = []
        results: list[Message] = []
        for message in messages:
            if isinstance(message, Step):
                replies += self._step(message)
            elif isinstance(message, Rejected):
                words = (message.message, message.param, message.is_bug)
            elif isinstance(message, Begin):
                self._texts[message.uid] = AnswerText(self._tokenizer, message)
            elif isinstance(message, Answered):
                replies.append(Reply(message.uid, message.text, message.token_ids, "stop", 0, 0))
                replies.append(Reply(message.uid, "", [], None, 0, 0, *words))
            elif isinstance(message, Heartbeat):
                results.append(message)
        return [Replies(replies), *results] if replies else results

    def _step(self, step: Step) -> list[Reply]:
        lists = (step.uids, step.token_ids, step.finish_reasons, step.prompt_tokens, step.cached_tokens)
        replies: list[Reply] = []
        for uid, token_id, reason, prompt_tokens, cached_tokens in zip(*lists, strict=True):
            try:
                replies += self._reply(uid, token_id, reason, prompt_tokens, cached_tokens)
            except Exception as error:  # one request may fail, the process may not
                log.error("request %d: the detokenizer failed", uid, exc_info=error)
                replies.append(Reply(uid, "", [], None, 0, 0, "the detokenizer failed on its text", is_bug=True))
                if uid in self._texts:
                    self._texts[uid] = None
        return replies

    def _reply(
        self, uid: int, token_id: int | None, reason: FinishReason | None, prompt_tokens: int, cached_tokens: int
    ) -> list[Reply]:
        """An end-of-sequence token is in the ids and not in the text. The last reply has all text that is left."""
        if uid not in self._texts:
            self._texts[uid] = IncrementalDetokenizer(self._tokenizer)
        text = self._texts.pop(uid) if reason else self._texts[uid]
        if text is None:
            return []
        piece = text.add(token_id) if token_id is not None and reason != "stop" else ""
        if reason:
            piece += text.finish()
        return [Reply(uid, piece, [] if token_id is None else [token_id], reason, prompt_tokens, cached_tokens)]
