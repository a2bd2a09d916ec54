"""What an answer's text needs beside its tokens: stop strings, echo, logprobs. Steps made by hand, real tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.core.detokenizer import IncrementalDetokenizer
from minisgl.core.outputs import TokenLogprob
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.tokenizer import Tokenizer
from minisgl.stage8.answer_text import TokenTexts
from minisgl.stage8.detokenizer import DetokenizerRole
from minisgl.stage8.messages import Begin, Generate, Message, Replies, Reply, Step, StopMatched
from minisgl.stage8.text_logprob import TextLogprob

TEXT = "One, two, three. 世界 👩‍🚀 é STOP five"
CHARACTERS = st.characters(exclude_categories=["Cs"]) | st.sampled_from("世🙂👩‍🚀é \n")


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)


def begin(uid: int = 1, prompt: list[int] | None = None, **more: Any) -> Begin:
    """As the scheduler makes it."""
    params = SamplingParams(max_tokens=1000, min_tokens=more.pop("min_tokens", 0))
    generate = Generate.of(uid, prompt or [5], params, more.get("stop", []), more.get("echo", "no"), more.get("text"))
    found = Begin.of(generate)
    assert found is not None
    return found


def steps(ids: list[int], reason: str | None = "length", uid: int = 1) -> list[Message]:
    """One token each; the last has the reason."""
    ends = [None] * (len(ids) - 1) + [reason]
    return [Step([uid], [token_id], [end], [2], [5]) for token_id, end in zip(ids, ends, strict=True)]


def give(role: DetokenizerRole, messages: list[Message], together: bool = False) -> tuple[list[Reply], list[int]]:
    """The replies, and the uids that the scheduler is told of."""
    out = [m for batch in ([messages] if together else [[m] for m in messages]) for m in role.handle(batch)]
    replies = [reply for message in out if isinstance(message, Replies) for reply in message.replies]
    return replies, [message.uid for message in out if isinstance(message, StopMatched)]


def text_of(replies: list[Reply]) -> str:
    return "".join(reply.text for reply in replies)


def ends(replies: list[Reply]) -> list[str]:
    return [reply.finish_reason for reply in replies if reply.finish_reason]


# Stop strings


@pytest.mark.parametrize("stop", ["two", "wo, th", " ", "世", "\u200d", "🚀", "STOP", "OP f", "🚀 é ST"])
@pytest.mark.parametrize("together", [False, True])
def test_a_stop_string_cuts_exactly(tokenizer: Tokenizer, stop: str, together: bool) -> None:
    role = DetokenizerRole(tokenizer)
    ids = tokenizer.encode(TEXT)
    replies, told = give(role, [begin(stop=["nothing", stop]), *steps(ids)], together)
    assert text_of(replies) == TEXT[: TEXT.index(stop)]
    assert ends(replies) == ["stop"]
    assert replies[-1].finish_reason == "stop"
    counted = sum(len(reply.token_ids) for reply in replies)
    assert stop in tokenizer.decode(ids[:counted])
    assert stop not in tokenizer.decode(ids[: counted - 1]), "counted are the tokens up to the one that completed it"
    assert told == ([] if together or counted == len(ids) else [1])
    assert role.num_open == 0


def test_what_comes_after_the_end_is_dropped_until_the_scheduler_has_heard(tokenizer: Tokenizer) -> None:
    role = DetokenizerRole(tokenizer)
    ids = tokenizer.encode("a STOP b c d")
    replies, told = give(role, [begin(stop=["STOP"]), *steps(ids, None)])
    assert (text_of(replies), ends(replies), told) == ("a ", ["stop"], [1])
    assert role.num_open == 1, "the scheduler's own end is still to come"
    assert give(role, [Step([1], [None], ["abort"], [0], [5])]) == ([], [])
    assert role.num_open == 0


def test_text_that_may_begin_a_stop_string_waits(tokenizer: Tokenizer) -> None:
    role = DetokenizerRole(tokenizer)
    ids = [tokenizer.encode(text)[0] for text in ("a", "\n", "b", "\n", "\n")]
    replies, _ = give(role, [begin(stop=["\n\n"]), *steps(ids, None)])
    assert [reply.text for reply in replies] == ["a", "", "\nb", "", ""]
    assert all(reply.token_ids for reply in replies)
    role = DetokenizerRole(tokenizer)
    replies, _ = give(role, [begin(stop=["\n\n"]), *steps(ids[:2])])
    assert [reply.text for reply in replies] == ["a", "\n"], "flushed at the end"


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_the_last_token_may_complete_it(tokenizer: Tokenizer, reason: str) -> None:
    """A stop string and max_tokens at once: "stop". An end-of-sequence token has no text, and so completes nothing."""
    ids = tokenizer.encode("a b STOP")
    replies, told = give(DetokenizerRole(tokenizer), [begin(stop=["STOP"]), *steps(ids, reason)])
    held = "a b " if reason == "length" else "a b" + tokenizer.decode(ids[2:-1])
    assert (text_of(replies), ends(replies), told) == (held, ["stop"], [])


@pytest.mark.parametrize(
    ("min_tokens", "expected"), [(0, "a"), (1, "a"), (2, "a b a"), (3, "a b a"), (6, "a b a b a b")]
)
def test_before_min_tokens_no_stop_string_counts(tokenizer: Tokenizer, min_tokens: int, expected: str) -> None:
    ids = tokenizer.encode("a b a b a b")
    assert len(ids) == 6
    replies, _ = give(DetokenizerRole(tokenizer), [begin(stop=[" b"], min_tokens=min_tokens), *steps(ids)])
    assert text_of(replies) == expected


@given(data=st.data(), stop=st.lists(st.text(CHARACTERS, min_size=1, max_size=3), min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_any_text_is_cut_at_the_first_stop_string(tokenizer: Tokenizer, data: st.DataObject, stop: list[str]) -> None:
    text = data.draw(st.lists(st.text(CHARACTERS, max_size=4) | st.sampled_from(stop), min_size=1).map("".join))
    ids = tokenizer.encode(text + "x")
    whole = tokenizer.decode(ids)
    found = [(end, [len(s) for s in stop if whole[:end].endswith(s)]) for end in range(len(whole) + 1)]
    cuts = [end - max(lengths) for end, lengths in found if lengths]
    replies, _ = give(DetokenizerRole(tokenizer), [begin(stop=stop), *steps(ids)])
    assert text_of(replies) == (whole[: cuts[0]] if cuts else whole)
    assert ends(replies) == ["stop" if cuts else "length"]


# The same text, streamed or not


@given(text=st.text(CHARACTERS, min_size=100, max_size=400), cut=st.integers(0, 3), data=st.data())
@settings(max_examples=30, deadline=None)
def test_streamed_text_is_the_whole_text(tokenizer: Tokenizer, text: str, cut: int, data: st.DataObject) -> None:
    """Also when max_tokens ends it within a character, and of ids that no text has."""
    ids = tokenizer.encode(text)
    ids = ids[: len(ids) - cut]
    noise = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    for row in (ids, ids + noise, noise + ids):
        replies, _ = give(DetokenizerRole(tokenizer), steps(row))
        assert text_of(replies) == tokenizer.decode(row)
        waiting = IncrementalDetokenizer(tokenizer)
        assert [reply.text for reply in replies[:-1]] == [waiting.add(token_id) for token_id in row[:-1]]


# Echo


@pytest.mark.parametrize("text", ["The cat", "世界 👩‍🚀", "<|im_start|>user\nHi<|im_end|>", "  two  spaces "])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_given_text_is_echoed_as_it_was_given(tokenizer: Tokenizer, text: str, logprobs: bool) -> None:
    prompt, answer = tokenizer.encode(text), tokenizer.encode(" sat 🙂")
    first = echo_step(prompt, answer[0], logprobs)
    messages = [begin(prompt=prompt, echo="before", text=text), first, *steps(answer[1:])]
    replies, _ = give(DetokenizerRole(tokenizer), messages)
    assert text_of(replies) == text + " sat 🙂"
    assert [reply.token_ids for reply in replies] == [[], *([i] for i in answer)], "the prompt's tokens are not counted"
    if logprobs:
        assert_offsets(replies[0].logprobs, text)


def assert_offsets(entries: list[TextLogprob], text: str) -> None:
    """A token begins after the characters that were complete before it."""
    assert b"".join(entry.token.data for entry in entries) == text.encode()
    done = b""
    for entry in entries:
        assert entry.offset == len(done.decode(errors="ignore"))
        done += entry.token.data


def echo_step(prompt: list[int], token_id: int, logprobs: bool, reason: Any = None) -> Step:
    step = Step([1], [token_id], [reason], [0], [len(prompt)])
    if logprobs:
        step.prompt_logprobs[0] = [None] + [TokenLogprob(-float(i), [(7, -0.5)]) for i in range(1, len(prompt))]
        step.logprobs[0] = TokenLogprob(-0.25, [(8, -0.125)])
    return step


@given(text=st.text(CHARACTERS, min_size=1, max_size=40), at=st.integers(0, 60), logprobs=st.booleans())
@settings(max_examples=150, deadline=None)
def test_echoed_ids_and_the_answer_are_one_text(tokenizer: Tokenizer, text: str, at: int, logprobs: bool) -> None:
    """Also when the border is within a character."""
    ids = tokenizer.encode("x" + text + "y")
    at = 1 + at % (len(ids) - 1)
    messages = [begin(prompt=ids[:at], echo="before"), echo_step(ids[:at], ids[at], logprobs, None)]
    messages = [*messages, *steps([*ids[at + 1 :], 2], "stop")]
    replies, _ = give(DetokenizerRole(tokenizer), messages)
    assert text_of(replies) == tokenizer.decode(ids)


@pytest.mark.parametrize("logprobs", [False, True])
def test_the_prompt_alone(tokenizer: Tokenizer, logprobs: bool) -> None:
    role = DetokenizerRole(tokenizer)
    prompt = tokenizer.encode("The cat 🙂")[:-1]
    replies, told = give(role, [begin(prompt=prompt, echo="alone"), echo_step(prompt, 99, logprobs, "length")])
    assert [(r.text, r.token_ids, r.finish_reason) for r in replies] == [(tokenizer.decode(prompt), [], "length")]
    assert len(replies[0].logprobs) == (len(prompt) if logprobs else 0)
    assert (told, role.num_open) == ([], 0)


def test_stop_strings_are_not_sought_in_the_prompt(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("a STOP b")
    messages = [begin(prompt=prompt, echo="before", text="a STOP b", stop=["STOP"]), *steps(tokenizer.encode(" STOP"))]
    replies, _ = give(DetokenizerRole(tokenizer), messages)
    assert text_of(replies) == "a STOP b "


def test_an_abort_before_the_first_token_echoes_nothing(tokenizer: Tokenizer) -> None:
    role = DetokenizerRole(tokenizer)
    replies, _ = give(role, [begin(echo="before"), Step([1], [None], ["abort"], [0], [5])])
    assert [(r.text, r.finish_reason) for r in replies] == [("", "abort")]
    assert role.num_open == 0


# Logprobs


def test_each_token_has_its_logprob_and_place(tokenizer: Tokenizer) -> None:
    text = "世👩‍🚀é!"
    ids = tokenizer.encode(text)
    messages = steps(ids)
    for number, step in enumerate(messages):
        assert isinstance(step, Step)
        step.logprobs[0] = TokenLogprob(-float(number), [(ids[0], -0.5)])
    replies, _ = give(DetokenizerRole(tokenizer), [begin(stop=["!"]), *messages])
    entries = [entry for reply in replies for entry in reply.logprobs]
    assert [len(reply.logprobs) for reply in replies] == [1] * len(ids), "one a token, when it comes"
    assert [entry.logprob for entry in entries] == [-float(number) for number in range(len(ids))]
    assert entries[0].top == [(TokenTexts(tokenizer).name(ids[0]), -0.5)]
    assert_offsets(entries, text)


def test_names_of_tokens(tokenizer: Tokenizer) -> None:
    names = TokenTexts(tokenizer)
    assert (names.name(2).text, names.name(2).data) == ("<|im_end|>", b"<|im_end|>")
    assert names.name(49151).token_id == 49151
    assert names.name(10**6).data == b"", "a model may have more ids than its tokenizer"
    cat = tokenizer.encode(" cat")
    assert (len(cat), names.name(cat[0]).text) == (1, " cat")
    third = tokenizer.encode("世")[0]
    assert "世".encode().startswith(names.name(third).data)
