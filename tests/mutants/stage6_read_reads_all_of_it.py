"""6.2: reads the whole tensor and cuts it then."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from minisgl.models.weights import Piece

kills = "tests/exercises/test_stage6.py::test_only_the_slice_is_read"
words = "were read"


class MyPiece(Piece):
    def read(self, checkpoint: Any) -> Tensor:
        return checkpoint[:].narrow(self.dim, self.source.start, len(self.source))
