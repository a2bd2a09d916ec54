"""Text to token ids and back, and conversations to text. Knows nothing of models and requests.

Imports neither torch nor transformers: a folder with a tokenizer.json, which nearly all have, needs only the Rust
library `tokenizers` (0.1 s to load instead of 3 s). `encode` and `decode` give what transformers' AutoTokenizer gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from minisgl.core.chat_template import ChatTemplate, ChatTemplateError

__all__ = ["ChatTemplateError", "Tokenizer"]


class Backend(Protocol):
    """What a tokenizer library must do for us."""

    vocab_size: int
    special_ids: frozenset[int]  # decode skips them

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_id(self, token: str) -> int | None: ...


class Tokenizer:
    """Immutable, and safe to share between threads.

    vocab_size: every id is below it, added tokens included. eos_ids: each of them ends an answer. bos: the text of
    the token that begins a sequence, or None. special_ids: printed as nothing.
    """

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str] | None = None,
        more_eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        """special_tokens: "bos_token", "eos_token" and their like with their text. more_eos_ids: those that the
        model's configuration adds. chat_template: Jinja source."""
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._chat_template_source = chat_template
        self.vocab_size = backend.vocab_size
        self.special_ids = backend.special_ids
        self.bos = self._special_tokens.get("bos_token")
        eos = self._special_tokens.get("eos_token")
        eos_id = None if eos is None else backend.token_id(eos)
        self.eos_ids = frozenset(more_eos_ids) | (frozenset() if eos_id is None else {eos_id})

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """The tokenizer of a Hugging Face model folder. Raises ValueError when it has none, or a broken one."""
        path = Path(path)
        config = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
        eos_ids = _eos_ids(path / "config.json") | _eos_ids(path / "generation_config.json")
        named = {key: value for key, value in config.items() if key.endswith("_token")}
        special_tokens = {key: text for key, value in named.items() if (text := _content(value)) is not None}
        if (path / "tokenizer.json").is_file():
            backend: Backend = FastBackend(_load_fast(path / "tokenizer.json", config, special_tokens))
        else:
            backend, special_tokens = _load_with_transformers(path)
        return cls(backend, special_tokens, eos_ids, _chat_template(path, config))

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template_source is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises ValueError for text that UTF-8 cannot carry. add_special_tokens: begin with BOS, if the model does."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each, on several cores."""
        for text in texts:
            _check_text(text)
        return self._backend.encode_batch(texts, add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens and ids that no token has are skipped, spaces are left as they are."""
        return self._backend.decode(ids)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The conversation as the model was trained to read it. Raises ChatTemplateError.

        messages: dicts with "role" and "content". kwargs: variables that some templates know (enable_thinking).
        """
        return self._chat_template.render(messages, add_generation_prompt, **kwargs)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """`apply_chat_template`, encoded. The template has written BOS where the model wants one: none is added."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt, **kwargs), False)

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        if self._chat_template_source is None:
            raise ChatTemplateError(
                "this model has no chat template: send plain prompts (/v1/completions), or put a chat_template.jinja "
                "into the model's folder"
            )
        return ChatTemplate(self._chat_template_source, self._special_tokens)


class FastBackend:
    """The Rust library."""

    def __init__(self, rust: tokenizers.Tokenizer) -> None:
        rust.no_truncation()
        rust.no_padding()
        self._rust = rust
        self.vocab_size = max(rust.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = rust.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_fallback = rust.decoder is not None and rust.decoder.decode(["<0x41>"]) == "A"

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        encodings = self._rust.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        text = self._rust.decode(list(ids), skip_special_tokens=True)
        return self._decode_broken(ids) if self._byte_fallback and "\ufffd" in text else text

    def token_id(self, token: str) -> int | None:
        return self._rust.token_to_id(token)

    def _decode_broken(self, ids: Sequence[int]) -> str:
        """`decode` where one bad byte does not spoil its neighbours.

        The Rust decoder turns a whole run of byte tokens into U+FFFD when any of them is bad, so an answer cut
        inside a character would take back characters that were already streamed. Here only bad bytes are lost.
        """
        tokens = [self._rust.id_to_token(token_id) for token_id in ids if token_id not in self.special_ids]
        fixed: list[str] = []
        run: list[str] = []
        for token in [*tokens, None]:
            if token is not None and _is_byte(token):
                run.append(token)
                continue
            fixed += _mark_bad_bytes(run) + ([] if token is None else [token])
            run = []
        return self._rust.decoder.decode(fixed)


class SlowBackend:
    """A tokenizer of transformers that is written in Python."""

    def __init__(self, slow: Any) -> None:
        self._slow = slow
        self.vocab_size = max(slow.get_vocab().values(), default=-1) + 1
        self.special_ids = frozenset(slow.all_special_ids)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [self._slow.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._slow.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def token_id(self, token: str) -> int | None:
        return self._slow.get_vocab().get(token)


def _load_fast(file: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    """tokenizer.json, and what tokenizer_config.json says otherwise, as transformers reads them."""
    try:
        rust = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file} is not a tokenizer ({error!s:.200}): fetch the model again") from error
    listed = config.get("added_tokens_decoder") or {}
    tokens = [_added_token(listed[key], special_tokens) for key in sorted(listed, key=int)]
    known = {token.content for token in rust.get_added_tokens_decoder().values()} | {token.content for token in tokens}
    tokens += [_added_token(config[key], special_tokens) for key, text in special_tokens.items() if text not in known]
    rust.add_tokens(tokens)
    if "add_bos_token" in config or "add_eos_token" in config:
        before = [special_tokens["bos_token"]] if config.get("add_bos_token") and "bos_token" in special_tokens else []
        after = [special_tokens["eos_token"]] if config.get("add_eos_token") and "eos_token" in special_tokens else []
        ids = [(token, rust.token_to_id(token)) for token in {*before, *after}]
        rust.post_processor = TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)
    return rust


def _added_token(value: str | Mapping[str, Any], special_tokens: Mapping[str, str]) -> AddedToken:
    fields = {"content": value} if isinstance(value, str) else {k: v for k, v in value.items() if k != "__type"}
    fields["special"] = fields.get("special", False) or fields["content"] in special_tokens.values()
    return AddedToken(**fields)


def _load_with_transformers(folder: Path) -> tuple[Backend, dict[str, str]]:
    from transformers import AutoTokenizer  # 3 s: only for folders without a tokenizer.json

    try:
        auto = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises OSError, ValueError, ImportError, KeyError, … for this
        raise ValueError(
            f"no tokenizer could be loaded from {folder} ({error!s:.200}): give it a tokenizer.json"
        ) from error
    special_tokens = {key: text for key, text in auto.special_tokens_map.items() if isinstance(text, str)}
    return (FastBackend(auto.backend_tokenizer) if auto.is_fast else SlowBackend(auto)), special_tokens


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _eos_ids(file: Path) -> set[int]:
    ids = _read_json(file).get("eos_token_id")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(token_id, int) and token_id >= 0 for token_id in listed):
        raise ValueError(f"eos_token_id in {file} must be a token id or a list of them, not {ids!r:.80}")
    return set(listed)


def _content(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    """{} when there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error!s:.200}): fetch the model again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, not {content!r:.80}")
    return content


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"text must be a string, not {text!r:.80}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        lone = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise ValueError(f"the text has half a surrogate pair ({lone}), which is no character: remove it") from None


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _mark_bad_bytes(run: list[str]) -> list[str]:
    """Byte tokens with those replaced that are part of no character."""
    fixed: list[str] = []
    raw = bytes(int(token[3:5], 16) for token in run)
    while raw:
        try:
            raw.decode("utf-8")
            bad = range(len(raw), len(raw))
        except UnicodeDecodeError as error:
            bad = range(error.start, error.end)
        fixed += run[: bad.start] + ["\ufffd"] * len(bad)
        run, raw = run[bad.stop :], raw[bad.stop :]
    return fixed
