"""How many pages a request takes. Knows of no pool and no table, and does not load torch."""

from __future__ import annotations

from minisgl.core.errors import ContextLengthExceeded
from minisgl.core.sampling_params import SamplingParams


def max_pages(prompt_len: int, params: SamplingParams, page_size: int) -> int:
    """All the pages a request may ever need: its last token is sampled, but never computed."""
    return -(-(prompt_len + params.max_tokens - 1) // page_size)


def check_fits(prompt_len: int, params: SamplingParams, page_size: int, num_pages: int) -> None:
    """Raises ContextLengthExceeded for a request that the whole pool could not hold, alone."""
    needed = max_pages(prompt_len, params, page_size)
    if needed > num_pages:
        raise ContextLengthExceeded(
            f"{prompt_len} prompt tokens and max_tokens {params.max_tokens} need {needed} pages, and the pool has "
            f"{num_pages}: shorten the prompt, lower max_tokens, or raise --num-pages"
        )
