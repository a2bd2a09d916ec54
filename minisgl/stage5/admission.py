"""How many pages a request is promised when it is admitted. Knows nothing of who is admitted, or when.

A promise that covers everything can always be kept, but most answers end long before max_tokens, and what was promised
for the rest lies idle. An estimate admits more at once; when it was too low, somebody must be retracted.
"""

from __future__ import annotations

import math

from minisgl.core.req import Req
from minisgl.stage5.config import SchedulerConfig


def new_pages(start: int, end: int, page_size: int) -> int:
    """Pages that the tokens [start, end) of a row need beside those that hold the tokens before them."""
    return max(0, -(-end // page_size) - -(-start // page_size))


class FullReservation:
    """All it may ever need: nobody is ever retracted. (The walk-through's.)"""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def final_len(self, prompt_len: int, next_len: int, max_len: int) -> int:
        """Tokens that the row of a request is expected to hold in the end. It has next_len now, and of max_len, prompt
        and answer, the last is sampled but never computed."""
        return max_len - 1

    def note_finished(self, output_len: int) -> None:
        """A request came to its own end after output_len tokens. (Nothing is to be learnt.)"""

    def pages(self, cached_len: int, prompt_len: int, next_len: int, max_len: int) -> int:
        """Pages promised beyond those that hold cached_len tokens."""
        return new_pages(cached_len, self.final_len(prompt_len, next_len, max_len), self.page_size)

    def pages_to_come(self, req: Req) -> int:
        return self.pages(req.cached_len, req.prompt_len, req.next_len, req.max_device_len)


class EstimatedOutput(FullReservation):
    """As many tokens as the answers of late had on average, and at least MARGIN more than it has. Until an answer has
    ended nothing is known, and it is all that the request may ever need."""

    MEMORY = 32  # answers: one counts for 1 / e of itself when so many have followed
    MARGIN = 16  # tokens

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self.mean_output = math.inf

    def final_len(self, prompt_len: int, next_len: int, max_len: int) -> int:
        expected = max(prompt_len + self.mean_output, next_len + self.MARGIN)
        return math.ceil(min(expected, max_len - 1))

    def note_finished(self, output_len: int) -> None:
        if self.mean_output == math.inf:
            self.mean_output = output_len
        self.mean_output += (output_len - self.mean_output) / self.MEMORY


def create_admission(config: SchedulerConfig) -> FullReservation:
    return {"reserve": FullReservation, "estimate": EstimatedOutput}[config.admission](config.page_size)
