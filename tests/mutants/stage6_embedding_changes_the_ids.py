"""6.4: writes into the batch's ids."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from minisgl.layers.embedding import VocabParallelEmbedding

kills = "tests/exercises/test_stage6.py::test_the_ids_stay_as_they_are"
words = "not to be changed"


class MyVocabParallelEmbedding(VocabParallelEmbedding):
    def forward(self, input_ids: Tensor) -> Tensor:
        input_ids -= self.vocab_range.start
        elsewhere = (input_ids < 0) | (input_ids >= len(self.vocab_range))
        x = F.embedding(input_ids.masked_fill(elsewhere, 0), self.weight)
        return self.comm.all_reduce(x.masked_fill_(elsewhere[:, None], 0))
