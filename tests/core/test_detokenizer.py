"""Pieces of text, put together, are the whole text; no piece has half a character; a token's cost does not grow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from minisgl.core.detokenizer import IncrementalDetokenizer
from minisgl.core.tokenizer import Tokenizer
from minisgl.core.tokenizer_backends import FastBackend


class CountingBackend(FastBackend):
    """Counts the tokens it is asked to decode."""

    decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return super().decode(ids)


def word_pieces() -> RustTokenizer:
    """BERT's way: a piece's text depends on whether it is the first."""
    words = ["[UNK]", "[SEP]", "un", "##able", "##s", "do", "n", "'", "t", ".", "世"]
    tokenizer = RustTokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return tokenizer


def metaspaces() -> RustTokenizer:
    """T5's way: the decoder drops the spaces of whatever comes first."""
    words = [("<unk>", 0.0), ("▁", -1.0), ("▁▁", -1.0), ("a", -1.0), ("▁a", -1.0), ("</s>", 0.0), ("世", -1.0)]
    tokenizer = RustTokenizer(models.Unigram(words, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def silent_letters(file: Path) -> RustTokenizer:
    """A decoder that prints nothing for some tokens, and drops the first space."""
    tokenizer = RustTokenizer.from_file(str(file))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("z", ""), tokenizer.decoder])
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers(model_folder: Path, spm_file: Path) -> dict[str, Tokenizer]:
    """One of each way of decoding."""
    rust = {
        "byte level": RustTokenizer.from_file(str(model_folder / "tokenizer.json")),
        "byte fallback": RustTokenizer.from_file(str(spm_file)),
        "silent letters": silent_letters(spm_file),
        "word pieces": word_pieces(),
        "metaspaces": metaspaces(),
        "words": RustTokenizer(models.WordLevel({word: i for i, word in enumerate("abcd")}, unk_token="a")),
    }
    return {kind: Tokenizer(CountingBackend(tokenizer)) for kind, tokenizer in rust.items()}


KINDS = ["byte level", "byte fallback", "silent letters", "word pieces", "metaspaces", "words"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("🍕👩‍🚀世界é \n�"))


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_pieces_make_the_text_whatever_the_ids(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    few = st.sampled_from(data.draw(st.lists(st.integers(0, min(400, tokenizer.vocab_size - 1)), min_size=1)))
    ids = data.draw(st.lists(few | st.integers(0, tokenizer.vocab_size + 3), max_size=150))
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(
    raw=st.lists(
        st.sampled_from([0x80, 0x9F, 0xBF, 0xBD, 0xC3, 0xE4, 0xED, 0xEF, 0xF0, 0xF4, 0xFF, 0x41]), max_size=120
    )
)
def test_pieces_make_the_text_whatever_the_bytes(tokenizers: dict[str, Tokenizer], raw: list[int]) -> None:
    fallback, level = tokenizers["byte fallback"], tokenizers["byte level"]
    ids = [3 + byte for byte in raw]
    assert "".join(pieces(fallback, ids)) == fallback.decode(ids)
    alphabet = [level.encode(character)[-1] for character in "é世🍕Aÿ\ufffd"]
    ids = [alphabet[byte % len(alphabet)] for byte in raw]
    assert "".join(pieces(level, ids)) == level.decode(ids)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@given(text=TEXTS, end=st.integers(0, 3))
def test_no_piece_has_half_a_character(tokenizers: dict[str, Tokenizer], kind: str, text: str, end: int) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    cut = ids[: len(ids) - end]
    out = pieces(tokenizer, cut)
    assert "".join(out) == tokenizer.decode(cut)
    assert whole.startswith("".join(out[:-1])), "what was streamed must stand, whatever the rest of the answer is"


def test_tokens_without_text_leave_the_next_space(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["silent letters"]
    ids = tokenizer.encode("the" + "z" * 100 + " cat", add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "the cat"


def test_a_character_comes_with_its_last_token(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in ("byte level", "byte fallback"):
        tokenizer = tokenizers[kind]
        pizza = tokenizer.encode("a🍕", add_special_tokens=False)[-3 if kind == "byte level" else -4 :]
        expected = [""] * (len(pizza) - 1) + ["🍕"]
        assert pieces(tokenizer, pizza * 20) == [*(expected * 20), ""]


def test_an_answer_may_end_within_a_character(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte fallback"]
    raw = "世🍕".encode()[:-2]
    assert pieces(tokenizer, [3 + byte for byte in raw]) == ["", "", "世", "", "", "\ufffd\ufffd"]


def test_a_real_replacement_character_is_text(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in ("byte level", "byte fallback"):
        tokenizer = tokenizers[kind]
        ids = tokenizer.encode("a\ufffdb", add_special_tokens=False)
        assert "".join(pieces(tokenizer, ids)[:-1]).strip() == "a\ufffdb"


@pytest.mark.parametrize("text", ["the cat ", "🍕", "世", "  ", "\x00", "\ufffd", "a</s>"])
@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_cost_of_a_token_does_not_grow(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    self_contained = tokenizer.encode(text * 8, add_special_tokens=False)
    assert_constant_cost(tokenizer, self_contained)


@pytest.mark.parametrize("token_ids", [[2], [3 + 0x80], [3 + 0xE4, 3 + 0xB8], [3 + 0xF0, 3 + 0x9F, 2], [10**6]])
def test_cost_of_nonsense_does_not_grow(tokenizers: dict[str, Tokenizer], token_ids: list[int]) -> None:
    assert_constant_cost(tokenizers["byte fallback"], token_ids)


def assert_constant_cost(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    backend = tokenizer._backend
    assert isinstance(backend, CountingBackend)
    ids = (token_ids * 4000)[:4000]
    backend.decoded = 0
    out = pieces(tokenizer, ids)
    assert backend.decoded < 60 * len(ids)
    assert "".join(out) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_an_answer_goes_on_where_its_prompt_ended(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    """Within a character too, and with the space that the decoder drops from what comes first."""
    tokenizer = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, min(400, tokenizer.vocab_size + 3)), max_size=120))
    at = data.draw(st.integers(0, len(ids)))
    text, one_by_one = IncrementalDetokenizer(tokenizer), IncrementalDetokenizer(tokenizer)
    before = text.begin_after(ids[:at])
    assert before == "".join(map(one_by_one.add, ids[:at]))
    assert before + "".join(map(text.add, ids[at:])) + text.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "metaspaces", "words"])
@given(text=TEXTS)
def test_a_text_is_the_bytes_of_its_tokens(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    data = b"".join(map(tokenizer.token_bytes, ids))
    decoded = tokenizer.decode(ids)
    # some decoders drop the space that their encoder has put in front
    assert data.decode(errors="replace") in (decoded, " " + decoded) or "\ufffd" in decoded


def test_bytes_of_single_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    fallback, level = tokenizers["byte fallback"], tokenizers["byte level"]
    assert fallback.token_bytes(3 + 0xE4) == b"\xe4"
    the = fallback.encode("the", add_special_tokens=False)[0]
    assert fallback.token_bytes(the) == b" the", "within a text"
    assert b"".join(map(level.token_bytes, level.encode(" \u4e16"))) == " \u4e16".encode()
    assert level.token_bytes(2) == b"<|im_end|>"
    for tokenizer in tokenizers.values():
        assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
