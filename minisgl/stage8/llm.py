"""The loops that every scheduler process runs; and the server without a port, which sends what the API would send.

Knows nothing of HTTP. The caller's process does not load torch: the engine is in another one.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from typing import TYPE_CHECKING, NoReturn

from minisgl.core.llm import BaseLLM, Request
from minisgl.core.outputs import TokenLogprob, TokenOutput
from minisgl.core.sampling_params import SamplingParams
from minisgl.stage3.page_count import check_fits
from minisgl.stage6.config import check_shares
from minisgl.stage8.launch import ProcessDied, Processes
from minisgl.stage8.messages import TO_API, Abort, Echo, Heartbeat, Reply, Tokenize
from minisgl.stage8.server_config import ServerConfig
from minisgl.stage8.sockets import Sockets
from minisgl.stage8.text_logprob import TextLogprob

if TYPE_CHECKING:
    from minisgl.stage5.scheduler import Scheduler
    from minisgl.stage7.streams import EngineStream
    from minisgl.stage8.scheduler_io import Desk, RankInbox


def plain_loop(scheduler: Scheduler, inbox: RankInbox, desk: Desk) -> NoReturn:
    """schedule N, compute N, commit N."""
    while True:
        desk.heartbeat()
        for message in inbox.receive(wait=not scheduler.has_work):
            desk.take(message)
        forward_input = scheduler.schedule()
        if forward_input is not None:
            desk.scheduled(forward_input.batch)
            with scheduler.tracer.span("forward", "engine", step=scheduler.step):
                output = scheduler.forward(forward_input)
            desk.report(scheduler.commit(forward_input, output))
        elif scheduler.has_work:
            raise RuntimeError("requests wait, nothing runs, and none can be admitted: this is a bug")


def overlap_loop(scheduler: Scheduler, inbox: RankInbox, desk: Desk, stream: EngineStream) -> NoReturn:
    """schedule N, launch N, commit N - 1."""
    from minisgl.stage7.overlap import InFlight, commit, launch  # loads torch, which the caller of `generate` does not

    last: InFlight | None = None
    while True:
        desk.heartbeat()
        for message in inbox.receive(wait=last is None and not scheduler.has_work):
            desk.take(message)
        forward_input = scheduler.schedule()
        launched = None
        if forward_input is not None:
            desk.scheduled(forward_input.batch)
            launched = launch(scheduler, stream, forward_input)
        if last is not None:
            desk.report(commit(scheduler, last))
        elif launched is None and scheduler.has_work:
            raise RuntimeError("requests wait, nothing runs, and none can be admitted: this is a bug")
        last = launched


class LLM(BaseLLM):
    config: ServerConfig
    config_class = ServerConfig
    gives_logprobs = True

    def _start(self) -> None:
        self._parts = ExitStack()
        check_shares(self.config.tp, self.model_config)
        self.processes = Processes(self.config, self.folder)
        self._parts.callback(self.processes.stop)
        sockets = Sockets(self.tracer)
        self._parts.callback(sockets.close)
        self._tokenizers = [sockets.outbox(bind=address) for address in self.processes.to_tokenizer_addresses]
        self._inbox = sockets.inbox(TO_API, bind=self.processes.from_detokenizer_address)
        self._heartbeat = Heartbeat(0, {})
        self.processes.start()
        for outbox in self._tokenizers:
            outbox.wait_for_reader()

    def _stop(self) -> None:
        self._parts.close()

    def _run(self, requests: list[Request]) -> Generator[TokenOutput, None, None]:
        """Closing it waits for the last message of what it aborts: then all that was held is free."""
        unfinished = {request.uid for request in requests}
        self._check_alive()
        for request in requests:
            params = request.sampling_params
            echo: Echo = "before" if params.prompt_logprobs else "no"  # those of a prompt come with its text
            self._send(Tokenize(request.uid, params, token_ids=request.prompt_ids, echo=echo))
        try:
            while unfinished:
                yield from self._next(unfinished)
        except ProcessDied:
            raise
        except BaseException:
            for uid in sorted(unfinished):
                self._send(Abort(uid))
            while unfinished:
                self._next(unfinished)
            raise

    def stats(self) -> dict[str, int]:
        """As of now: what comes with the scheduler's next heartbeat, within a second."""
        now = time.monotonic_ns()
        while self._heartbeat.time < now:
            self._receive()
        return self._heartbeat.stats

    def _check(self, prompt: str | Sequence[int], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        ids, params = super()._check(prompt, params)
        check_fits(len(ids), params, self.processes.info.page_size, self.processes.info.num_pages)
        return ids, params

    def _send(self, message: Tokenize | Abort) -> None:
        try:
            self._tokenizers[message.uid % len(self._tokenizers)].send(message)
        except BrokenPipeError:
            self._check_alive()
            raise

    def _next(self, unfinished: set[int]) -> list[TokenOutput]:
        """The tokens of the next messages. What has ended leaves `unfinished`."""
        outputs: list[TokenOutput] = []
        for reply in self._receive():
            outputs += _outputs(reply)
            if reply.finish_reason or reply.error:
                unfinished.remove(reply.uid)
        return outputs

    def _receive(self) -> list[Reply]:
        """Replies as they come; waits for messages. Raises ProcessDied."""
        replies: list[Reply] = []
        for message in self._inbox.receive(also=self.processes.signs_of_death):
            if isinstance(message, Heartbeat):
                self._heartbeat = message
            else:
                replies += message.replies
        if not replies:
            self._check_alive()
        return replies

    def _check_alive(self) -> None:
        death = self.processes.dead()
        if death:
            raise ProcessDied(f"{death}; this LLM is of no more use, make a new one")


def _outputs(reply: Reply) -> list[TokenOutput]:
    """One for each token, of which the last says how the request ended; one without a token if there is none: it ended
    without, or these are the logprobs of its prompt."""
    if reply.error:
        raise RuntimeError(f"request {reply.uid} was refused: {reply.error}")
    logprobs = [_without_text(one) for one in reply.logprobs]
    if not reply.token_ids:
        return [TokenOutput(reply.uid, None, reply.finish_reason, reply.cached_tokens, None, logprobs or None)]
    last = len(reply.token_ids) - 1
    return [
        TokenOutput(reply.uid, token_id, reply.finish_reason if i == last else None, reply.cached_tokens, logprob)
        for i, (token_id, logprob) in enumerate(zip_longest(reply.token_ids, logprobs))
    ]


def _without_text(one: TextLogprob) -> TokenLogprob | None:
    if one.logprob is None:
        return None
    return TokenLogprob(one.logprob, [(token.token_id, logprob) for token, logprob in one.top])
