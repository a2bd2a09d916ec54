"""The two libraries that do a tokenizer's work, behind one interface. Knows nothing of chats or of when answers end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import AddedToken

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character


class Backend(Protocol):
    """What a tokenizer library must do for us."""

    vocab_size: int
    longest_token: int  # characters
    special_ids: frozenset[int]  # decode skips them

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_id(self, token: str) -> int | None: ...

    def token_bytes(self, token_id: int) -> bytes:
        """What this token stands for within a text, special tokens too. Empty for an id that no token has."""

    def forget_words(self) -> None:
        """Keep nothing of what is encoded, from now on."""


class FastBackend:
    """The Rust library."""

    def __init__(self, rust: tokenizers.Tokenizer) -> None:
        rust.no_truncation()
        rust.no_padding()
        self._rust = rust
        self.vocab_size, self.longest_token = _sizes(rust.get_vocab(with_added_tokens=True))
        self.special_ids = frozenset(filter(self._is_skipped, rust.get_added_tokens_decoder()))
        self._byte_fallback = rust.decoder is not None and rust.decoder.decode(["<0x41>"]) == "A"
        byte_level = rust.decoder is not None and rust.decoder.decode(["\u0120"]) == " "
        self._alphabet = _byte_alphabet() if byte_level else {}
        self._added = {key: token.content for key, token in rust.get_added_tokens_decoder().items()}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._rust.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        encodings = self._rust.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        text = self._rust.decode(list(ids), skip_special_tokens=True)
        return self._decode_broken(ids) if self._byte_fallback and REPLACEMENT in text else text

    def token_id(self, token: str) -> int | None:
        return self._rust.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        token = self._rust.id_to_token(token_id)
        if token is None or token_id in self._added:
            return (token or "").encode()
        if self._alphabet:
            known = [self._alphabet.get(character) for character in token]
            return token.encode() if None in known else bytes(known)  # type: ignore[arg-type]
        if self._byte_fallback and _is_byte(token):
            return bytes([int(token[3:5], 16)])
        return _text_within(self.decode, token_id).encode()

    def forget_words(self) -> None:
        """The library keeps 10,000 words with their tokens, since 0.23 for each thread of its pool: 5 MB a thread for
        words of 8 letters, 100 MB for what a client makes up of 250, and for text as it is written no time is saved."""
        model: Any = self._rust.model
        if hasattr(model, "_resize_cache"):  # BPE's and Unigram's
            model._resize_cache(0)

    def _is_skipped(self, token_id: int) -> bool:
        """Asked of `decode`: a token's own flag does not know that the configuration made it special."""
        return not self._rust.decode([token_id]) and bool(self._rust.decode([token_id], skip_special_tokens=False))

    def _decode_broken(self, ids: Sequence[int]) -> str:
        """`decode` where one bad byte does not spoil its neighbours.

        The Rust decoder turns a whole run of byte tokens into U+FFFD when any of them is bad, so an answer cut
        inside a character would take back characters that were already streamed. Here only bad bytes are lost.
        """
        known = (self._rust.id_to_token(token_id) for token_id in ids if token_id not in self.special_ids)
        fixed: list[str] = []
        run: list[str] = []
        for token in known:
            if token is not None and _is_byte(token):
                run.append(token)
            elif token is not None:
                fixed += [*_mark_bad_bytes(run), token]
                run = []
        return self._rust.decoder.decode(fixed + _mark_bad_bytes(run))


class SlowBackend:
    """A tokenizer of transformers that is written in Python."""

    def __init__(self, slow: Any) -> None:
        self._slow = slow
        self.vocab_size, self.longest_token = _sizes(slow.get_vocab())
        self.special_ids = frozenset(slow.all_special_ids)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._slow.encode(text, add_special_tokens=add_special_tokens)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._slow.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def token_id(self, token: str) -> int | None:
        return self._slow.get_vocab().get(token)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self.special_ids:
            return self._slow.convert_ids_to_tokens(token_id).encode()
        return _text_within(self.decode, token_id).encode() if token_id < self.vocab_size else b""

    def forget_words(self) -> None:
        """It remembers none."""


def load_backend(folder: Path, config: Mapping[str, Any]) -> tuple[Backend, dict[str, str]]:
    """The tokenizer in a folder, and the text of its named special tokens ("bos_token", …).

    As in transformers, tokenizer_config.json (`config`) may add tokens and make some special, but whether BOS begins
    a text is the post-processor's to say, not add_bos_token's. Raises ValueError for no tokenizer, or a broken one.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return _load_with_transformers(folder)
    try:
        rust = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file} is not a tokenizer ({error!s:.200}): fetch the model again") from error
    named = {key: _added_token(value) for key, value in config.items() if key.endswith("_token") and _is_token(value)}
    listed = config.get("added_tokens_decoder") or {}
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    rust.add_tokens([_added_token(listed[key]) for key in sorted(listed, key=int)])
    rust.add_special_tokens([*named.values(), *(_added_token(value) for value in more if _is_token(value))])
    special_tokens = {key: token.content for key, token in named.items()}
    return FastBackend(rust), special_tokens


def _load_with_transformers(folder: Path) -> tuple[Backend, dict[str, str]]:
    from transformers import AutoTokenizer  # 3 s: only for folders without a tokenizer.json

    try:
        auto = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, ImportError, KeyError and others
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"no tokenizer in {folder} ({why}): fetch the model again, tokenizer.json included") from error
    special_tokens = {key: text for key, text in auto.special_tokens_map.items() if isinstance(text, str)}
    return FastBackend(auto.backend_tokenizer) if auto.is_fast else SlowBackend(auto), special_tokens


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _added_token(value: str | Mapping[str, Any]) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, normalized=False)
    return AddedToken(**{key: field for key, field in value.items() if key != "__type"})


def _sizes(vocab: Mapping[str, int]) -> tuple[int, int]:
    """Ids are below the first; no token has more characters than the second."""
    return max(vocab.values(), default=-1) + 1, max(map(len, vocab), default=0)


def _text_within(decode: Callable[[Sequence[int]], str], token_id: int) -> str:
    """The text of a token that is not the first: some decoders drop the space that a text begins with."""
    return decode([token_id, token_id])[len(decode([token_id])) :]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: each byte as a character that can be printed."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _mark_bad_bytes(run: list[str]) -> list[str]:
    """Byte tokens with those replaced that are part of no character."""
    fixed: list[str] = []
    raw = bytes(int(token[3:5], 16) for token in run)
    while raw:
        try:
            raw.decode("utf-8")
        except UnicodeDecodeError as error:
            good, bad = error.start, error.end
        else:
            good = bad = len(raw)
        fixed += run[:good] + [REPLACEMENT] * (bad - good)
        run, raw = run[bad:], raw[bad:]
    return fixed
