"""8.2: decodes each token by itself."""

from __future__ import annotations

from minisgl.core.detokenizer import IncrementalDetokenizer

kills = "tests/exercises/test_stage8.py::test_a_space_between_words_stays"
words = "loses it"


class MyIncrementalDetokenizer(IncrementalDetokenizer):
    def add(self, token_id: int) -> str:
        if token_id in self._tokenizer.special_ids or token_id >= self._tokenizer.vocab_size:
            return ""
        return self._tokenizer.decode([token_id])

    def finish(self) -> str:
        return ""
