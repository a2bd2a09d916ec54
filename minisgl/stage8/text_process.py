"""The process of a tokenizer, of the detokenizer, or of both: `python -m minisgl.stage8.text_process`.

Knows nothing of text: it takes all that has arrived, lets each role make of it what it can, and sends that on.
Neither torch nor transformers is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import msgspec

from minisgl.core.tokenizer import Tokenizer
from minisgl.core.trace import Tracer
from minisgl.models.config import ModelConfig
from minisgl.stage8.child import Child, EngineInfo, Orders, Ready, run_child
from minisgl.stage8.detokenizer import DetokenizerRole
from minisgl.stage8.messages import TO_DETOKENIZER, TO_TOKENIZER, Message
from minisgl.stage8.sockets import Addresses, Inbox, Outbox, Sockets
from minisgl.stage8.tokenizer import TokenizerRole


class Role(Protocol):
    def handle(self, messages: list[Message]) -> list[Message]: ...


def serve_text(inbox: Inbox, roles: list[tuple[str, Role, Outbox]], tracer: Tracer) -> None:
    """For ever: wait, take everything, and let each role send on what it makes of it."""
    while True:
        messages = inbox.receive()
        for name, role, outbox in roles:
            with tracer.span("handle", name, messages=len(messages)):
                results = role.handle(messages)
            for message in results:
                outbox.send(message)


def connect(sockets: Sockets, orders: Orders) -> tuple[Inbox, dict[str, Outbox]]:
    """One inbox for both roles, since one loop waits for it; an outbox for each."""
    addresses = Addresses(Path(orders.directory))
    kinds: Any = TO_TOKENIZER | TO_DETOKENIZER
    inbox = sockets.inbox(
        kinds,
        bind=addresses.detokenizer if "detokenizer" in orders.roles else None,
        connect=[addresses.tokenizer(orders.index)] if "tokenizer" in orders.roles else [],
    )
    readers = {"detokenizer": addresses.api, "tokenizer": addresses.scheduler}
    return inbox, {role: sockets.outbox(connect=[readers[role]]) for role in orders.roles}


def make_role(name: str, orders: Orders, tokenizer: Tokenizer, info: EngineInfo) -> Role:
    if name == "detokenizer":
        return DetokenizerRole(tokenizer)
    vocab_size = ModelConfig.from_folder(orders.folder).vocab_size
    return TokenizerRole(tokenizer, vocab_size, info, orders.config.seed + orders.index)


def work(child: Child) -> None:
    orders = child.orders
    inbox, outboxes = connect(Sockets(child.tracer), orders)
    tokenizer = Tokenizer.from_folder(Path(orders.folder))
    info = msgspec.json.decode(child.line(), type=EngineInfo)
    child.watch()
    roles = [(name, make_role(name, orders, tokenizer, info), outbox) for name, outbox in outboxes.items()]
    child.tell(Ready())
    serve_text(inbox, roles, child.tracer)


if __name__ == "__main__":
    run_child(work)
