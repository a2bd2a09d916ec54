"""8.2: decodes all of the answer for each token."""

from __future__ import annotations

from minisgl.core.detokenizer import IncrementalDetokenizer, finished_len

kills = "tests/exercises/test_stage8.py::test_the_window_stays_short"
words = "is quadratic"


class MyIncrementalDetokenizer(IncrementalDetokenizer):
    def add(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids or token_id >= self._tokenizer.vocab_size:
            return ""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        end = finished_len(text)
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def finish(self) -> str:
        rest = self._tokenizer.decode(self._ids)[self._sent :]
        self._ids, self._sent = [], 0
        return rest
