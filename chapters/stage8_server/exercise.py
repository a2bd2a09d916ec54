"""Stage 8, server: your code.

`minisgl start 8` copies this file to mine.py, which is yours. There, replace each `raise NotImplementedError` by
the method that its docstring asks for; `minisgl check 8` says how you stand, `minisgl hint 8.1` helps.
A method may use the rest of its class, and what is imported here; what it needs of both is listed above it. Methods
that you add beside it are yours too.

Generated from the package by `python -m minisgl.learn generate`: a change here is lost.
"""

# ruff: noqa: F401 (imports for the answers)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from minisgl.core.detokenizer import MAX_TOKENS, IncrementalDetokenizer, finished_len
from minisgl.stage8.ask import Ask, EngineGone, RequestFailed, RequestRefused
from minisgl.stage8.codec import MalformedMessage, MessageDecoder
from minisgl.stage8.frontend import Frontend
from minisgl.stage8.messages import Reply
from minisgl.stage8.stop_strings import StopStrings


class MyMessageDecoder(MessageDecoder):
    # 8.1 refuse malformed messages
    #   self._decoder.decode(data)   msgspec's: raises msgspec.DecodeError, or a ValueError of a message's own check, or
    #       a RecursionError, for bytes that are none
    #   self.malformed   int: how many were dropped; MalformedMessage(text)
    def decode(self, data: bytes) -> Any:
        """The message. Raises MalformedMessage, and nothing else, for bytes that are none."""
        raise NotImplementedError("exercise 8.1")

    def decode_all(self, received: Sequence[bytes]) -> list[Any]:
        """Those that are messages, in order. The others are counted."""
        raise NotImplementedError("exercise 8.1")


class MyIncrementalDetokenizer(IncrementalDetokenizer):
    # 8.2 text from tokens as they come
    #   self._tokenizer.decode(ids) -> str; self._tokenizer.special_ids (they have no text), self._tokenizer.vocab_size
    #   self._ids    list[int], the window: the last tokens; self._sent   int: characters of its text that were given
    #       out
    #   finished_len(text) -> int   characters before an end that a later token may still complete
    #   self._shorten(text)   forgets tokens of a window of more than MAX_TOKENS, and lowers _sent; text: the window's
    def add(self, token_id: int) -> str:
        """The text that this token makes certain: "" while its character is unfinished."""
        raise NotImplementedError("exercise 8.2")

    def finish(self) -> str:
        """The rest, whatever it is: an answer can end within a character. Ends the use of this object."""
        raise NotImplementedError("exercise 8.2")


class MyStopStrings(StopStrings):
    # 8.3 hold back a possible stop string
    #   self._strings   the stop strings, none of them empty; self._longest: the length of the longest
    #   self._held      str: what was held back so far, "" at first
    #   self._begins(text) -> bool   whether a stop string begins with it and is longer
    def end(self, piece: str) -> str | None:
        """What is left to give out before the string that this piece completes. None, and no change, if it does not."""
        raise NotImplementedError("exercise 8.3")

    def take(self, piece: str) -> str:
        """What may be given out now: all but the longest end that begins one of the strings."""
        raise NotImplementedError("exercise 8.3")


class MyAsk(Ask):
    # 8.4 every reply to its own request
    #   self._open      dict from the uid of a request without its last reply to its index in this Ask
    #   self._silent    set of the indices that had no reply yet
    #   self._keep(index, reply)   for the reader; self._wake.set()   wakes the reader, whatever came
    #   self._failure   None, or the exception that the reader shall get: RequestRefused(message, param, code),
    #       RequestFailed(message), EngineGone(message)
    #   reply.uid, .error (str or None), .param, .code, .is_bug (the server is at fault), .finish_reason (None: more to
    #       come)
    def put(self, reply: Reply) -> bool:
        """Take in a reply to one of the open requests. Returns whether it was the last of that request."""
        raise NotImplementedError("exercise 8.4")

    # 8.5 abort what nobody waits for
    #   self._open      dict from uid to index: the requests without a last reply
    #   self._abort(uid)   Frontend.abort; self._wake.set()   wakes the reader
    def close(self) -> None:
        """Abort what has not ended. May be called twice, and never waits: it is safe while being cancelled."""
        raise NotImplementedError("exercise 8.5")


class MyFrontend(Frontend):
    # 8.4 every reply to its own request
    #   self._asks   dict from uid to Ask; ask.put(reply) -> bool   your other half
    #   self.late    int: replies that nobody waits for; self._send_abort(uid)   tells the engine
    #   self._tracer.instant("Reply", "messages", reply.uid, tokens=len(reply.token_ids))   for the journey's figure
    #   reply.uid, reply.is_bug
    def _route(self, replies: Sequence[Reply]) -> None:
        """Each to the Ask that has it open, which is forgotten after the last one; those that none has are counted.

        A reply that tells of a bug comes from the detokenizer alone: then the scheduler is told to stop.
        """
        raise NotImplementedError("exercise 8.4")

    # 8.5 abort what nobody waits for
    #   self._asks   dict from uid to Ask: who waits; self.metrics.end(uid, "abort")   counts it
    #   self._send_abort(uid)   tells the engine
    def abort(self, uid: int) -> None:
        """Nobody waits for this request any more. Unknown to the engine if it never was sent, or had ended."""
        raise NotImplementedError("exercise 8.5")
