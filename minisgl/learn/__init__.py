"""The exercises of the course: the mark on a method that is one, and `check`. Knows no method itself.

The package is the only hand-written implementation. What a learner gets to write, and the solutions, are cut out of it
(`python -m minisgl.learn generate`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable)


def exercise(number: str) -> Callable[[FunctionT], FunctionT]:
    """Marks a method as an exercise, for whoever reads the source. It does nothing else: the method stays as it is.

    number: chapter and exercise, such as "3.1". Several methods may be one exercise.
    """
    return lambda function: function


def check(which: str) -> None:
    """In a notebook: test your code for "3.1", or for all of chapter "3", and say how it stands."""
    from minisgl.learn.checking import show  # not at the top: the library imports this module for the mark alone

    try:
        show(which)
    except (ValueError, RuntimeError) as error:  # a traceback would hide it
        print(f"error: {error}")
