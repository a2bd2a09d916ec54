"""Errors that several rooms must tell apart. Says nothing of what caused them."""

from __future__ import annotations


class ContextLengthExceeded(ValueError):
    """A prompt, or it and the answer that is asked for, is more than the model or its memory can hold."""


class EngineFailure(RuntimeError):
    """The engine could not start or cannot go on, and no setting is at fault. Its message is one line for the user."""
