"""The text of one answer as its tokens come: echo, stop strings, and what its tokens are called in logprobs.

Knows nothing of messages but what asks for that. Text that is held back, since it may be the beginning of a stop
string, comes with a later token; a token's logprob is never held back.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.core.detokenizer import IncrementalDetokenizer
from minisgl.core.outputs import FinishReason, TokenLogprob
from minisgl.core.tokenizer import Tokenizer
from minisgl.stage8.messages import Begin
from minisgl.stage8.stop_strings import StopStrings
from minisgl.stage8.text_logprob import TextLogprob, TokenText


class TokenTexts:
    """What each token is called by itself. Remembers: an answer with 20 logprobs a token asks for as many names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}

    def name(self, token_id: int) -> TokenText:
        known = self._known.get(token_id)
        if known is None:
            data = self._tokenizer.token_bytes(token_id)
            known = self._known[token_id] = TokenText(token_id, data.decode(errors="replace"), data)
        return known

    def logprob(self, token_id: int, logprob: TokenLogprob | None, offset: int) -> TextLogprob:
        """logprob None: of the first token of a prompt."""
        if logprob is None:
            return TextLogprob(self.name(token_id), None, [], offset)
        top = [(self.name(other), value) for other, value in logprob.top]
        return TextLogprob(self.name(token_id), logprob.logprob, top, offset)


def add(text: IncrementalDetokenizer, token_id: int | None, reason: FinishReason | None) -> str:
    """What this token lets out. An end-of-sequence token has no text. The last one lets out all that is left."""
    piece = text.add(token_id) if token_id is not None and reason != "stop" else ""
    return piece + text.finish() if reason else piece


class AnswerText:
    """length: characters so far, an echoed prompt's and those held back included."""

    def __init__(self, tokenizer: Tokenizer, begin: Begin) -> None:
        self._tokenizer, self._begin = tokenizer, begin
        self._text = IncrementalDetokenizer(tokenizer)
        self._stop = StopStrings(begin.stop) if begin.stop else None
        self._must_come = begin.min_tokens
        self.echo = begin.echo  # what is still to be done
        self.length = 0

    def add(self, token_id: int | None, reason: FinishReason | None) -> tuple[str, FinishReason | None]:
        """What this token lets out, and whether the answer ends with it: "stop" also if it completed a stop string."""
        piece = add(self._text, token_id, reason)
        self.length += len(piece)
        if self._stop is None:
            return piece, reason
        self._must_come -= 1
        if self._must_come < 0 and reason != "abort":
            before = self._stop.end(piece)
            if before is not None:
                return before, "stop"
        piece = self._stop.take(piece)
        return (piece + self._stop.rest() if reason else piece), reason

    def take_echo(self, names: TokenTexts, logprobs: Sequence[TokenLogprob | None]) -> tuple[str, list[TextLogprob]]:
        """The prompt's text, and its tokens if they have logprobs. Once, before the first `add`."""
        ids, given, alone = self._begin.prompt_ids, self._begin.text, self.echo == "alone"
        self.echo = "no"
        if logprobs:
            text, offsets = self._text_and_offsets(ids, given)
        else:
            text, offsets = self._text.begin_after(ids), []
        if alone:
            text += self._text.finish()
        text = text if given is None else given
        self.length = len(text)
        return text, [names.logprob(*of_one) for of_one in zip(ids, logprobs, offsets, strict=True)] if logprobs else []

    def _text_and_offsets(self, ids: Sequence[int], given: str | None) -> tuple[str, list[int]]:
        """Special tokens have no text of their own, but the client may have written them out."""
        pieces, offsets, length = [], [], 0
        for token_id in ids:
            offsets.append(length)
            pieces.append(self._text.add(token_id))
            length += len(pieces[-1])
            if given is not None and token_id in self._tokenizer.special_ids:
                name = self._tokenizer.token_bytes(token_id).decode(errors="replace")
                length += len(name) if given.startswith(name, length) else 0
        return "".join(pieces), offsets
