"""What Python's garbage collector need not look through again and again. Knows nothing of what it is.

torch, transformers and a model are some 400,000 objects that stay as long as they are used. A full collection walks
through all of them, which takes 0.1 to 0.3 s with no step launched, every few hundred steps, and finds nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def spare_for_good() -> None:
    """For a process of ours that is ready: what it has loaded stays until it ends."""
    gc.collect()
    gc.freeze()


@contextmanager
def spared() -> Iterator[None]:
    """For a while, in a process that is not ours alone: what is garbage now is found when it is over."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def unsearched() -> Iterator[None]:
    """While many objects are made at once of which none refers to itself, as from JSON: the collector would walk
    through them again and again. Let go of what is not needed of them before it ends."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
