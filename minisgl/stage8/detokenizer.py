"""Turns tokens into text as they come, all requests side by side. Knows nothing of sockets or processes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from minisgl.core.tokenizer import Tokenizer
from minisgl.stage8.answer_text import AnswerText, TokenTexts
from minisgl.stage8.messages import Answered, Begin, Heartbeat, Message, Rejected, Replies, Reply, Step, StopMatched

log = logging.getLogger("minisgl")


class DetokenizerRole:
    """Remembers a request from its first token to its last."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names = TokenTexts(tokenizer)
        self._texts: dict[int, AnswerText] = {}
        self._ended: set[int] = set()  # answered to the end; what the scheduler still sends of them is dropped

    @property
    def num_open(self) -> int:
        return len(self._texts) + len(self._ended)

    def handle(self, messages: Sequence[Message]) -> list[Message]:
        """What these messages come to: all replies in one message for the API, and word for the scheduler of those
        that ended here. Others' messages are ignored."""
        replies: list[Reply] = []
        results: list[Message] = []
        ended = self._ended.copy()
        for message in messages:
            if isinstance(message, Step):
                replies += self._step(message)
            elif isinstance(message, Begin):
                self._texts[message.uid] = AnswerText(self._tokenizer, message)
            elif isinstance(message, Answered):
                replies.append(Reply(message.uid, message.text, message.token_ids, "stop", 0, 0))
            elif isinstance(message, Rejected):
                words = (message.message, message.param, message.is_bug)
                replies.append(Reply(message.uid, "", [], None, 0, 0, *words))
            elif isinstance(message, Heartbeat):
                results.append(message)
        results += [StopMatched(uid) for uid in sorted(self._ended - ended)]
        return [Replies(replies), *results] if replies else results

    def _step(self, step: Step) -> list[Reply]:
        replies: list[Reply] = []
        for place, uid in enumerate(step.uids):
            last = step.finish_reasons[place] is not None
            if uid in self._ended:
                if last:
                    self._ended.remove(uid)
                continue
            try:
                replies += self._replies(step, place)
            except Exception as error:  # one request may fail, the process may not
                log.error("request %d: the detokenizer failed", uid, exc_info=error)
                replies.append(Reply(uid, "", [], None, 0, 0, "the detokenizer failed on its text", is_bug=True))
            if last or replies[-1].is_terminal:
                self._texts.pop(uid, None)
                if not last:
                    self._ended.add(uid)
        return replies

    def _replies(self, step: Step, place: int) -> list[Reply]:
        """One for the token, and before the first one for the prompt, if that is echoed."""
        uid, token_id, reason = step.uids[place], step.token_ids[place], step.finish_reasons[place]
        counts = (step.prompt_tokens[place], step.cached_tokens[place])
        text = self._texts.get(uid)
        if text is None:
            text = self._texts[uid] = AnswerText(self._tokenizer)
        replies: list[Reply] = []
        if text.echo != "no" and reason != "abort":
            alone = text.echo == "alone"
            echo, logprobs = text.take_echo(self._names, step.prompt_logprobs.get(place, []))
            replies.append(Reply(uid, echo, [], "length" if alone else None, *counts, logprobs=logprobs))
            if alone:
                return replies
        offset = text.length
        piece, reason = text.add(token_id, reason)
        ids = [] if token_id is None else [token_id]
        logprob = step.logprobs.get(place)
        logprobs = [] if logprob is None or token_id is None else [self._names.logprob(token_id, logprob, offset)]
        replies.append(Reply(uid, piece, ids, reason, *counts, logprobs=logprobs))
        return replies
