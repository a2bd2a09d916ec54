"""The process of a tokenizer, of the detokenizer, or of both: `python -m minisgl.stage8.text_process`.

Knows nothing of text: it takes all that has arrived, lets each role make of it what it can, and sends that on.
Neither torch nor transformers is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import msgspec

from minisgl.core.garbage import spare_for_good
from minisgl.core.tokenizer import Tokenizer
from minisgl.models.config import ModelConfig
from minisgl.stage8.child import Child, EngineInfo, Orders, Ready, run_child
from minisgl.stage8.detokenizer import DetokenizerRole
from minisgl.stage8.messages import TO_API, TO_DETOKENIZER, TO_TOKENIZER, Message
from minisgl.stage8.sockets import Addresses, Inbox, Outbox, Sockets
from minisgl.stage8.tokenizer import TokenizerRole


class Role(Protocol):
    def handle(self, messages: list[Message]) -> list[Message]: ...


def serve_text(inbox: Inbox, roles: dict[str, Role], to_api: Outbox, to_scheduler: Outbox, child: Child) -> None:
    """For ever: wait, take everything, and send on what each role makes of it."""
    while True:
        messages = inbox.receive()
        with child.working():
            for name, role in roles.items():
                with child.tracer.span("handle", name, messages=len(messages)):
                    results = role.handle(messages)
                for message in results:
                    (to_api if isinstance(message, TO_API) else to_scheduler).send(message)


def connect(sockets: Sockets, orders: Orders) -> tuple[Inbox, Outbox, Outbox]:
    """One inbox for both roles, since one loop waits for it; what leads to the API, and to the scheduler."""
    addresses = Addresses(Path(orders.directory))
    kinds: Any = TO_TOKENIZER | TO_DETOKENIZER
    inbox = sockets.inbox(
        kinds,
        bind=addresses.detokenizer if "detokenizer" in orders.roles else None,
        connect=[addresses.tokenizer(orders.index)] if "tokenizer" in orders.roles else [],
    )
    return inbox, sockets.outbox(connect=[addresses.api]), sockets.outbox(connect=[addresses.scheduler])


def make_role(name: str, orders: Orders, tokenizer: Tokenizer, info: EngineInfo) -> Role:
    if name == "detokenizer":
        return DetokenizerRole(tokenizer)
    vocab_size = ModelConfig.from_folder(orders.folder).vocab_size
    return TokenizerRole(tokenizer, vocab_size, info, orders.config.seed + orders.index)


def work(child: Child) -> None:
    orders = child.orders
    inbox, to_api, to_scheduler = connect(Sockets(child.tracer), orders)
    tokenizer = Tokenizer.from_folder(Path(orders.folder))
    info = msgspec.json.decode(child.line(), type=EngineInfo)
    child.watch()
    roles = {name: make_role(name, orders, tokenizer, info) for name in orders.roles}
    spare_for_good()
    child.tell(Ready())
    serve_text(inbox, roles, to_api, to_scheduler, child)


if __name__ == "__main__":
    run_child(work)
