"""8.2: gives out the replacement characters of what is not finished."""

from __future__ import annotations

from minisgl.core.detokenizer import MAX_TOKENS, IncrementalDetokenizer

kills = "tests/exercises/test_stage8.py::test_a_character_comes_with_its_last_token"
words = "never half a character"


class MyIncrementalDetokenizer(IncrementalDetokenizer):
    def add(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids or token_id >= self._tokenizer.vocab_size:
            return ""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        end = len(text)
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        if len(self._ids) > MAX_TOKENS:
            self._shorten(text)
        return piece

    def finish(self) -> str:
        rest = self._tokenizer.decode(self._ids)[self._sent :]
        self._ids, self._sent = [], 0
        return rest
