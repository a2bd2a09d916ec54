"""`--attn` knows the names that the library has, before torch is loaded."""

from __future__ import annotations

import pytest

from minisgl.attention import create_attention
from minisgl.stage3.config import EngineConfig

NAMES = (
    "auto torch triton fi triton,fi fi,triton fi,fi fa trtllm flash fi,torch torch,fi fi,fi,fi fi, ,fi auto,fi TORCH"
)


@pytest.mark.parametrize("name", [*NAMES.split(), "", " torch"])
def test_the_setting_and_the_library_know_the_same_names(name: str) -> None:
    unknown = []
    try:
        create_attention(name, 2, 1, 16, 16)
    except ValueError as error:
        unknown.append("must be" in str(error))  # the other errors are of a GPU that is not here
    if unknown == [True]:
        with pytest.raises(ValueError, match="auto, torch, triton, fi"):
            EngineConfig(attn=name)
    else:
        EngineConfig(attn=name)
