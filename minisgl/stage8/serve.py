"""The server's life: port, processes, HTTP, and an orderly end. Knows no request.

The port is taken first, so that a clash costs no loading; then the processes start while HTTP already answers that it
is not ready. The first signal drains (no new requests, open ones may finish), the second ends at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import errno
import logging
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.core.cli import config_options, fail, run_prompts, sampling_params, with_mine
from minisgl.core.garbage import spare_for_good
from minisgl.core.llm import check_max_seq_len
from minisgl.core.terminal import show_any_text
from minisgl.core.trace import Tracer, merge
from minisgl.models.config import ModelConfig
from minisgl.models.resolve import resolve_model
from minisgl.stage6.config import check_shares
from minisgl.stage8.args import num_processes, parse
from minisgl.stage8.frontend import Frontend
from minisgl.stage8.launch import ProcessDied, Processes
from minisgl.stage8.ring import Ring
from minisgl.stage8.server_config import ServerConfig
from minisgl.stage8.service import Service
from minisgl.stage8.signals import Signals, default_signals

if TYPE_CHECKING:
    import uvicorn

BACKLOG = 2048
KEEP_ALIVE = 75  # seconds: longer than clients keep idle connections, so that they never meet a closed one
FLUSH_SECONDS = 5  # for the last bytes of answers whose reader is slow
SECONDS_BETWEEN_QUESTIONS = 1.0
SECONDS_TO_TELL = 1.0  # that the engine died: /health and open streams say it before the program ends


def main(argv: Sequence[str] | None = None, prog: str = "python -m minisgl.stage8", more_help: str = "") -> int:
    """Returns the exit status: 2 for what the user can mend, 1 for a port in use or a process that died."""
    show_any_text()
    config, args = parse(argv, prog, more_help)
    return with_mine(args.mine, lambda: _main(config, args))


def _main(config: ServerConfig, args: argparse.Namespace) -> int:
    if args.prompt:
        from minisgl.stage8.llm import LLM

        default_signals()
        return run_prompts(LLM, config_options(ServerConfig, args), args, sampling_params(args))
    if args.shell:
        from minisgl.stage8.shell import run_shell

        default_signals()
        return run_shell(config, sampling_params(args))
    try:
        listener = listen(config.host, config.port)
    except OSError as error:
        remedy = "choose another with --host or --port (0 takes a free one)"
        print(f"error: cannot listen on {config.host}:{config.port} ({error.strerror}): {remedy}", file=sys.stderr)
        return 1 if error.errno == errno.EADDRINUSE else 2
    with listener:
        return serve(config, listener)


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except UnicodeError as error:  # a name that can be none
        raise OSError(errno.EINVAL, str(error)) from None
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def serve(config: ServerConfig, listener: socket.socket) -> int:
    """Until a signal or a death. Returns the exit status."""
    form = "%(asctime)s [api] %(levelname)s %(message)s"
    logging.basicConfig(level=config.log_level.upper(), format=form, datefmt="%H:%M:%S", stream=sys.stderr)
    try:
        with contextlib.closing(Tracer(config.trace)) as tracer:
            folder = resolve_model(config.model, config.model_source)
            model_config = ModelConfig.from_folder(folder)
            check_max_seq_len(config, model_config)
            check_shares(config.tp, model_config)
            signals = Signals()  # from here on there is something to clean up
            return asyncio.run(Server(config, folder, listener, tracer, signals).run())
    except ValueError as error:
        fail(str(error))
    except ProcessDied as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        if config.trace is not None:
            merge(config.trace)


class Server:
    def __init__(
        self, config: ServerConfig, folder: Path, listener: socket.socket, tracer: Tracer, signals: Signals
    ) -> None:
        names = dict.fromkeys((config.served_model_name or config.model, config.model))
        shown = dataclasses.asdict(config)
        del shown["api_key"], shown["admin_key"]
        self.config, self.listener, self.tracer = config, listener, tracer
        self.service = Service(tuple(names), config.model, shown)
        self.processes = Processes(config, folder)
        self.signals = signals

    async def run(self) -> int:
        """Returns the exit status. Raises what `Processes.start` raises. No process is left in any case."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.processes.stop)
            ring = stack.enter_context(Ring(self.processes))
            starting = asyncio.create_task(asyncio.to_thread(self.processes.start))
            await asyncio.sleep(0)  # they start now, beside the imports of the web framework
            http = self._http()
            serving = asyncio.create_task(http.serve(sockets=[self.listener]))
            try:
                return await self._live(ring, starting)
            finally:
                http.should_exit, http.force_exit = True, self.signals.count > 1
                await serving

    async def _live(self, ring: Ring, starting: asyncio.Task) -> int:
        signalled = asyncio.Event()
        self.signals.event(asyncio.get_running_loop(), signalled)
        stopping = asyncio.create_task(signalled.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            await asyncio.to_thread(self.processes.stop)
            await asyncio.gather(starting, return_exceptions=True)  # that it was stopped is no news
            return 0
        self.service.max_model_len = starting.result().max_total_tokens
        frontend = Frontend(ring.tokenizers, ring.replies, self.config.max_queued_requests, self.tracer)
        listening, dying = asyncio.create_task(frontend.listen()), asyncio.create_task(self._death())
        ends = (stopping, listening, dying)
        heard = asyncio.create_task(frontend.heard.wait())
        try:
            await asyncio.wait((heard, *ends), return_when=asyncio.FIRST_COMPLETED)
            if heard.done():
                spare_for_good()
                self.service.frontend, self.service.status = frontend, "ready"
                print(self._ready_line(), file=sys.stderr, flush=True)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done() and await self._drained(frontend, dying):
                return 0
            if not dying.done():
                listening.result()  # it ends only by a bug of ours, which this raises
            await self._tell(dying.result())
            return 1
        finally:
            for task in (heard, dying, listening):
                task.cancel()

    async def _death(self) -> str:
        """Which process died, in one line, when one has. Until then asks all of them, about once a second, whether
        they run: one that was stopped is not dead, and its heartbeats may be late because a step is long."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        descriptors = self.processes.signs_of_death
        try:
            for descriptor in descriptors:
                loop.add_reader(descriptor, changed.set)
            while not self.processes.hear():
                changed.clear()
                self.service.silence = self.processes.silent()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(changed.wait(), SECONDS_BETWEEN_QUESTIONS)
                    continue  # that was an answer, or a death
                self.processes.ask()
        finally:
            for descriptor in descriptors:
                loop.remove_reader(descriptor)
        return await asyncio.to_thread(self.processes.dead) or "a process of the server has closed its reports"

    async def _drained(self, frontend: Frontend, dying: asyncio.Task) -> bool:
        """Let open requests finish while there is time. Returns False when a process died instead."""
        self.service.status = "draining"
        deadline = asyncio.get_running_loop().time() + self.config.drain_timeout
        if frontend.num_open:
            print(f"stopping: {frontend.num_open} requests may finish; a second signal ends them", file=sys.stderr)
        while frontend.num_open and self.signals.count < 2 and not dying.done():
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.05)
        if dying.done():
            return False
        if frontend.num_open:
            self.service.fail("the server is shutting down, and this request was not finished in time")
        return True

    async def _tell(self, problem: str) -> None:
        print(f"error: {problem}; the server ends", file=sys.stderr, flush=True)
        self.service.fail(problem)
        await asyncio.sleep(SECONDS_TO_TELL)

    def _http(self) -> uvicorn.Server:
        import uvicorn  # here, so that the processes need not wait for these imports

        from minisgl.stage8.api import create_app
        from minisgl.stage8.connection import Connection, allow_connections

        config = uvicorn.Config(
            create_app(self.service, self.config.api_key, self.config.admin_key),
            http=partial(Connection, most=allow_connections()),  # type: ignore[arg-type]  # as a class is called
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=FLUSH_SECONDS,
        )
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]  # ours
        return server

    def _ready_line(self) -> str:
        host, port = self.listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        model, count = self.service.names[0], num_processes(self.config)
        return f"minisgl ready: http://{host}:{port}/v1 · model {model} · {count} processes"
