"""`python -m minisgl.stage6.rank_main FD`: a rank's process, from its first message to its last words.

Run by `RankGroup` and by nobody else: FD is its end of a socket. The loop itself is the stage's `serve`.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import msgspec

from minisgl.core.config import make_config
from minisgl.core.garbage import spare_for_good
from minisgl.core.trace import Tracer
from minisgl.models.config import ModelConfig
from minisgl.stage5.scheduler import Scheduler
from minisgl.stage6.communicators import DistributedCommunicator, PeerLost
from minisgl.stage6.inbox import LockStepInbox, Mailbox
from minisgl.stage6.messages import Failed, Idle, Outputs, Ready, Report, Start, encode

log = logging.getLogger("minisgl")


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    try:
        start = msgspec.msgpack.decode(connection.recv_bytes(), type=Start)
    except EOFError:  # the parent died first
        return
    form = f"[rank {start.rank}] %(message)s"
    logging.basicConfig(format=form, level=start.log_level if start.rank == 0 else logging.WARNING)
    mailbox = Mailbox(connection, Path(start.rendezvous).parent)
    try:
        _run(start, connection, mailbox)
    except BaseException as error:
        connection.send_bytes(encode(_last_words(error)))
        end_process(1)


def end_process(status: int) -> NoReturn:
    """At once: not by way of destructors, which may wait for other ranks, nor through the interpreter's own end. There
    a thread of gloo that still has to let go of a tensor asks for Python's lock, which ends it in the midst of C++:
    "terminate called without an active exception". Call it while the communicator is still held."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(start: Start, connection: Connection, mailbox: Mailbox) -> NoReturn:
    stage = importlib.import_module(start.module).LLM
    config = make_config(stage.config_class, start.config)
    tracer = Tracer(config.trace, "rank", start.rank)
    folder = Path(start.folder)
    model_config = ModelConfig.from_folder(folder)
    engine = stage.engine_class(config, folder, model_config, start.max_seq_len, start.rank, Path(start.rendezvous))
    comm: DistributedCommunicator = engine.comm
    scheduler = Scheduler(config, engine, frozenset(start.eos_ids), tracer)

    def report(message: Report) -> None:
        connection.send_bytes(encode(message))

    def report_idle() -> None:
        if comm.rank == 0:
            report(Idle(scheduler.stats()))

    spare_for_good()
    report(Ready(engine.pool.num_pages, *engine.memory()))
    for outputs in stage.serve(scheduler, LockStepInbox(mailbox, comm.broadcast, report_idle)):
        if outputs and comm.rank == 0:  # the others have computed the same
            report(Outputs(outputs))
    tracer.close()
    comm.close()
    end_process(0)


def _last_words(error: BaseException) -> Failed:
    if isinstance(error, ValueError):
        return Failed(str(error), "invalid")
    if isinstance(error, PeerLost):
        return Failed(str(error), "peer lost")
    log.error("this rank ends", exc_info=error)
    return Failed(f"{type(error).__name__}: {error}", "error")


if __name__ == "__main__":
    main()
