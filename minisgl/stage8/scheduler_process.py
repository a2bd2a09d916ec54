"""The process of one rank's scheduler and engine: `python -m minisgl.stage8.scheduler_process`.

Knows nothing of text. The loop that it runs is in llm.py.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from minisgl.core.garbage import spare_for_good
from minisgl.core.llm import check_max_seq_len
from minisgl.core.threads import RANK_THREADS, usable_cores
from minisgl.core.tokenizer import Tokenizer
from minisgl.models.config import ModelConfig
from minisgl.stage8.child import Child, EngineInfo, Ready, run_child
from minisgl.stage8.llm import overlap_loop, plain_loop
from minisgl.stage8.messages import TO_SCHEDULER
from minisgl.stage8.scheduler_io import Desk, FirstRankInbox, OtherRankInbox, RankInbox
from minisgl.stage8.server_config import ServerConfig
from minisgl.stage8.sockets import Addresses, Sockets

if TYPE_CHECKING:
    from minisgl.stage5.scheduler import Scheduler


def work(child: Child) -> None:
    child.watch()
    orders, config = child.orders, child.orders.config
    addresses, sockets = Addresses(Path(orders.directory)), Sockets(child.tracer)
    if orders.index > 0:
        subscriber = sockets.subscriber(addresses.ranks)
        scheduler = make_scheduler(child)
        child.tell(Ready())
        serve(scheduler, OtherRankInbox(subscriber), Desk(scheduler, None))
    inbox = sockets.inbox(TO_SCHEDULER, bind=addresses.scheduler)
    outbox = sockets.outbox(connect=[addresses.detokenizer])
    publisher = sockets.publisher(addresses.ranks) if config.tp > 1 else None
    scheduler = make_scheduler(child)
    if publisher:
        publisher.wait_for(config.tp - 1)
    child.tell(Ready(EngineInfo(scheduler.engine.max_seq_len, config.page_size, scheduler.cache.num_pages)))
    serve(scheduler, FirstRankInbox(inbox, publisher), Desk(scheduler, outbox, inbox))


def make_scheduler(child: Child) -> Scheduler:
    """Loads torch, then the model."""
    from minisgl.stage5.scheduler import Scheduler
    from minisgl.stage6.engine import check_parallel
    from minisgl.stage6.ranks import loopback_only
    from minisgl.stage7.graph_runner import GraphEngine
    from minisgl.stage7.streams import HOST_THREADS

    orders = child.orders
    config = replace(orders.config, threads=orders.config.threads or default_threads(orders.config))
    folder = Path(orders.folder)
    model_config = ModelConfig.from_folder(folder)
    check_parallel(config, model_config)
    os.environ.update({**loopback_only(), **os.environ})
    rendezvous = Path(orders.directory) / "rendezvous" if config.tp > 1 else None
    max_seq_len = check_max_seq_len(config, model_config)
    engine_config = config if config.disable_overlap else replace(config, threads=HOST_THREADS)
    engine = GraphEngine(engine_config, folder, model_config, max_seq_len, orders.index, rendezvous)
    scheduler = Scheduler(config, engine, Tokenizer.from_folder(folder).eos_ids, child.tracer)
    spare_for_good()
    return scheduler


def serve(scheduler: Scheduler, inbox: RankInbox, desk: Desk) -> NoReturn:
    from minisgl.stage7.streams import engine_stream

    config = scheduler.config
    assert isinstance(config, ServerConfig)
    if config.disable_overlap:
        plain_loop(scheduler, inbox, desk)
    overlap_loop(scheduler, inbox, desk, engine_stream(scheduler.engine.device, config.threads))


def default_threads(config: ServerConfig) -> int:
    """Of a rank that computes on the CPU: alone it gets all cores but one, which the other processes need."""
    return RANK_THREADS if config.tp > 1 else max(1, usable_cores() - 1)


if __name__ == "__main__":
    run_child(work)
