"""What was measured of a batch, to the outputs it belongs to. Knows nothing of logits."""

from __future__ import annotations

from minisgl.core.outputs import TokenOutput
from minisgl.core.req import Req
from minisgl.sampling.logprobs import LogprobsOnHost


def attach_logprobs(reqs: list[Req], outputs: list[TokenOutput | None], measured: LogprobsOnHost) -> None:
    """outputs: those of reqs, changed in place. None: a chunk, or a request that had ended before.

    A prompt's come together with its first token, and once: a request that is retracted later has tokens of its
    answer, and one that was retracted before begins anew.
    """
    sampled, of_prompts = measured.read()
    for row, more in of_prompts.items():
        known = reqs[row].prompt_logprobs
        if known is not None:
            known += more
    for row, logprob in sampled.items():
        output = outputs[row]
        if output is not None:
            outputs[row] = output._replace(logprob=logprob, prompt_logprobs=reqs[row].prompt_logprobs)
            reqs[row].prompt_logprobs = None
