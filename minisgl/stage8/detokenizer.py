"""Turns tokens into text as they come, all requests side by side. Knows nothing of sockets or processes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from minisgl.core.detokenizer import IncrementalDetokenizer
from minisgl.core.outputs import FinishReason
from minisgl.core.tokenizer import Tokenizer
from minisgl.stage8.answer_text import AnswerText, TokenTexts, add
from minisgl.stage8.messages import Answered, Begin, Heartbeat, Message, Rejected, Replies, Reply, Step, StopMatched

log = logging.getLogger("minisgl")


class DetokenizerRole:
    """Remembers a request from its first token to its last."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names = TokenTexts(tokenizer)
        self._texts: dict[int, IncrementalDetokenizer | AnswerText] = {}
        self._ended: set[int] = set()  # answered to the end; what the scheduler still sends of them is dropped

    @property
    def num_open(self) -> int:
        return len(self._texts) + len(self._ended)

    def handle(self, messages: Sequence[Message]) -> list[Message]:
        """What these messages come to: for the API the heartbeats, then all replies in one message, and word for the
        scheduler of those that ended here. Others' messages are ignored."""
        replies: list[Reply] = []
        heartbeats: list[Message] = []  # go first: who has an answer shall see what they say
        ended = self._ended.copy()
        for message in messages:
            if isinstance(message, Step):
                replies += self._step(message)
            elif isinstance(message, Begin):
                self._texts[message.uid] = AnswerText(self._tokenizer, message)
            elif isinstance(message, Answered):
                replies.append(Reply(message.uid, message.text, message.token_ids, "stop", 0, 0))
            elif isinstance(message, Rejected):
                words = (message.message, message.param, message.is_bug, message.code)
                replies.append(Reply(message.uid, "", [], None, 0, 0, *words))
            elif isinstance(message, Heartbeat):
                heartbeats.append(message)
        matched = [StopMatched(uid) for uid in sorted(self._ended - ended)]
        return [*heartbeats, *([Replies(replies)] if replies else []), *matched]

    def _step(self, step: Step) -> list[Reply]:
        """Most requests want nothing but text: their way through here is short."""
        replies: list[Reply] = []
        rows = zip(step.uids, step.token_ids, step.finish_reasons, step.prompt_tokens, step.cached_tokens, strict=True)
        for place, (uid, token_id, reason, prompt_tokens, cached_tokens) in enumerate(rows):
            text = self._texts.get(uid) or self._first(uid, reason)
            if text is None:
                continue
            try:
                if isinstance(text, IncrementalDetokenizer):
                    piece = add(text, token_id, reason)
                    ids = [] if token_id is None else [token_id]
                    replies.append(Reply(uid, piece, ids, reason, prompt_tokens, cached_tokens))
                    ended = reason is not None
                else:
                    replies += self._replies(text, step, place)
                    ended = replies[-1].is_terminal
            except Exception as error:  # one request may fail, the process may not
                log.error("request %d: the detokenizer failed", uid, exc_info=error)
                replies.append(Reply(uid, "", [], None, 0, 0, "the detokenizer failed on its text", is_bug=True))
                ended = True
            if ended:
                del self._texts[uid]
                if not reason:
                    self._ended.add(uid)
        return replies

    def _first(self, uid: int, reason: FinishReason | None) -> IncrementalDetokenizer | None:
        """For a request that is not known yet; None for one that has ended here."""
        if uid in self._ended:
            if reason:
                self._ended.remove(uid)
            return None
        text = self._texts[uid] = IncrementalDetokenizer(self._tokenizer)
        return text

    def _replies(self, text: AnswerText, step: Step, place: int) -> list[Reply]:
        """One for the token, and before the first one for the prompt, if that is echoed."""
        uid, token_id, reason = step.uids[place], step.token_ids[place], step.finish_reasons[place]
        counts = (step.prompt_tokens[place], step.cached_tokens[place])
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
