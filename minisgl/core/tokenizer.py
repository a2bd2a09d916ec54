"""Text to token ids and back, and conversations to text. Knows nothing of models and requests.

Imports neither torch nor transformers: a folder with a tokenizer.json, which nearly all have, needs only the Rust
library `tokenizers` (0.1 s to load instead of 3 s). `encode` and `decode` give what transformers'
AutoTokenizer gives, but for bytes that are no character (`FastBackend`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from minisgl.core.chat_template import ChatTemplate, ChatTemplateError
from minisgl.core.tokenizer_backends import Backend, load_backend

__all__ = ["ChatTemplateError", "Tokenizer"]


class Tokenizer:
    """Immutable, but for what `forget_words` drops, and safe to share between threads.

    vocab_size: every id is below it, added tokens included. longest_token: in characters. eos_ids: each of them ends
    an answer. bos: the text of the token that begins a sequence, or None. special_ids: `decode` skips them.
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
        self._template_source = chat_template
        self.vocab_size, self.longest_token = backend.vocab_size, backend.longest_token
        self.special_ids = backend.special_ids
        self.bos = self._special_tokens.get("bos_token")
        eos = self._special_tokens.get("eos_token")
        eos_id = None if eos is None else backend.token_id(eos)
        self.eos_ids = frozenset(more_eos_ids) | (set() if eos_id is None else {eos_id})

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """The tokenizer of a Hugging Face model folder. Raises ValueError when it has none, or a broken one.

        An EOS in generation_config.json does not replace the tokenizer's: a model ends its turn with either.
        """
        path = Path(path)
        config = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
        backend, special_tokens = load_backend(path, config)
        eos_ids = _eos_ids(path / "config.json") | _eos_ids(path / "generation_config.json")
        return cls(backend, special_tokens, eos_ids, _template_source(path, config))

    @property
    def has_chat_template(self) -> bool:
        return self._template_source is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises ValueError for text that UTF-8 cannot carry. add_special_tokens: begin with BOS if the model does."""
        _check_text(text)
        return self._backend.encode(text, add_special_tokens)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each, on several cores."""
        for text in texts:
            _check_text(text)
        return self._backend.encode_batch(texts, add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids. Special tokens and ids that no token has are skipped; spaces are left as they are."""
        return self._backend.decode(ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token within a text: a part of a character, or the name of a special token. Empty for an
        id that no token has."""
        return self._backend.token_bytes(token_id)

    def forget_words(self) -> None:
        """From now on nothing is remembered of texts: memory does not grow with what clients make up."""
        self._backend.forget_words()

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, /, **kwargs: Any
    ) -> str:
        """The conversation as the model was trained to read it. Raises ChatTemplateError.

        messages: dicts with "role" and "content". kwargs: variables that some templates know (enable_thinking).
        """
        return self._chat_template.render(messages, add_generation_prompt, kwargs)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, /, **kwargs: Any
    ) -> list[int]:
        """`apply_chat_template`, encoded. The template has written BOS where the model wants one: none is added."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt, **kwargs), False)

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        if self._template_source is None:
            raise ChatTemplateError(
                "this model has no chat template: send plain prompts, or put a chat_template.jinja into its folder"
            )
        return ChatTemplate(self._template_source, self._special_tokens)


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
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
