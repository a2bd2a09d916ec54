"""Tokenizer and detokenizer as roles: messages in, messages out, and no request takes another one down."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from minisgl.core.sampling_params import SamplingParams
from minisgl.core.tokenizer import Tokenizer
from minisgl.stage8.child import EngineInfo
from minisgl.stage8.detokenizer import DetokenizerRole
from minisgl.stage8.messages import (
    Abort,
    Answered,
    Decode,
    Encode,
    Flush,
    Generate,
    Heartbeat,
    Message,
    Rejected,
    Replies,
    Reply,
    Step,
    Tokenize,
)
from minisgl.stage8.tokenizer import MAX_ERROR_CHARS, TokenizerRole

INFO = EngineInfo(max_seq_len=200, page_size=16, num_pages=8)  # 128 slots: the pool is what limits
PARAMS = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)


@pytest.fixture
def role(tokenizer: Tokenizer) -> TokenizerRole:
    return TokenizerRole(tokenizer, vocab_size=49152, info=INFO, seed=0)


def test_text_ids_and_chat_become_ids_in_order(role: TokenizerRole, tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    messages: list[Message] = [
        Tokenize(0, PARAMS, text="one"),
        Abort(0),
        Tokenize(1, PARAMS, chat=chat),
        Tokenize(2, PARAMS, token_ids=[5, 6]),
        Tokenize(3, PARAMS, text="two 🙂"),
        Heartbeat(0, {}),  # for the other role of a shared process
    ]
    expected = [
        Generate.of(0, tokenizer.encode("one"), PARAMS),
        Abort(0),
        Generate.of(1, tokenizer.encode_chat(chat), PARAMS),
        Generate.of(2, [5, 6], PARAMS),
        Generate.of(3, tokenizer.encode("two 🙂"), PARAMS),
    ]
    assert role.handle(messages) == expected


BAD: dict[str, dict[str, Any]] = {
    "empty text": {"text": ""},
    "no ids": {"token_ids": []},
    "a negative id": {"token_ids": [-1]},
    "an id past the vocabulary": {"token_ids": [49152]},
    "nothing at all": {},
    "two prompts": {"text": "a", "token_ids": [1]},
    "half a surrogate pair": {"text": "\ud800"},
    "no messages": {"chat": []},
    "a message without a role": {"chat": [{"content": "x"}]},
    "content that is no text": {"chat": [{"role": "user", "content": {"a": 1}}]},
    "more than a context": {"text": "word " * 300},
    "more than the pool holds": {"token_ids": [1] * 150},
    "a huge prompt": {"text": "x y " * 100_000},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_hazard_19_one_bad_request_is_refused_alone(role: TokenizerRole, bad: dict[str, Any]) -> None:
    good = [Tokenize(1, PARAMS, text="before"), Tokenize(3, PARAMS, text="after")]
    before, refused, after = role.handle([good[0], Tokenize(2, PARAMS, **bad), good[1]])
    assert isinstance(refused, Rejected)
    assert refused.uid == 2
    assert 0 < len(refused.message) <= MAX_ERROR_CHARS
    assert "\n" not in refused.message
    assert [before, after] == role.handle(good)


NEW_WORDS = """
import random, sys
from pathlib import Path
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.tokenizer import Tokenizer
from minisgl.stage8.child import EngineInfo
from minisgl.stage8.messages import Generate, Tokenize
from minisgl.stage8.tokenizer import TokenizerRole

chance, info = random.Random(0), EngineInfo(100_000, 1, 100_000)
role = TokenizerRole(Tokenizer.from_folder(Path(sys.argv[1])), 49152, info, seed=0)

def encode():
    text = " ".join("".join(chance.choices("abcdefgh", k=200)) for _ in range(100))
    assert all(isinstance(one, Generate) for one in role.handle([Tokenize(i, SamplingParams(), text) for i in (0, 1)]))

def resident():
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])

encode()
before = resident()
for _ in range(60):
    encode()
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for its memory")
def test_words_that_clients_make_up_take_no_memory(model_folder: Path) -> None:
    """6,000 of 200 letters would take 35 MB and more, if the library remembered them."""
    command = [sys.executable, "-c", NEW_WORDS, str(model_folder)]
    env = {**os.environ, "RAYON_NUM_THREADS": "2"}
    grown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env).stdout
    assert int(grown) < 16_000, f"{int(grown)} KiB more"


@pytest.mark.parametrize("question", [Tokenize, Encode], ids=lambda kind: kind.__name__)
def test_other_threads_run_while_a_long_text_is_encoded(question: type, tokenizer: Tokenizer) -> None:
    """One of them answers the parent, to which this process would seem to have stopped."""
    role = TokenizerRole(tokenizer, 49152, EngineInfo(500_000, 1, 500_000), seed=0)
    text = "The quick brown fox. " * 50_000
    begun, ended, turns = threading.Event(), threading.Event(), 0

    def other() -> None:
        nonlocal turns
        begun.set()
        while not ended.is_set():
            turns += 1
            time.sleep(0.001)

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    before = turns
    (result,) = role.handle([question(0, text=text, **({"params": PARAMS} if question is Tokenize else {}))])
    during = turns - before
    ended.set()
    thread.join()
    assert isinstance(result, Generate | Answered)
    assert during > 20, f"{during} turns"


def test_a_panic_of_the_tokenizer_costs_one_request(role: TokenizerRole, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As PyO3's is."""

    encode = Tokenizer.encode

    def panic(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        if "boom" in text:
            raise Panic("boom")
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", panic)
    monkeypatch.setattr(
        Tokenizer, "encode_batch", lambda self, texts, special: [panic(self, t, special) for t in texts]
    )
    results = role.handle([Tokenize(1, PARAMS, text="boom"), Tokenize(2, PARAMS, text="fine")])
    assert [type(result) for result in results] == [Rejected, Generate]


def test_a_template_that_takes_for_ever_costs_one_request(
    tokenizer: Tokenizer, role: TokenizerRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    slow = Tokenizer(tokenizer._backend, chat_template=source)
    monkeypatch.setattr("minisgl.stage8.tokenizer.TEMPLATE_SECONDS", 0.2)
    role = TokenizerRole(slow, vocab_size=49152, info=INFO, seed=0)
    chat = Tokenize(1, PARAMS, chat=[{"role": "user", "content": "x"}])
    refused, good = role.handle([chat, Tokenize(2, PARAMS, text="x")])
    assert isinstance(refused, Rejected)
    assert "took over 0.2 s" in refused.message
    assert not refused.is_bug
    assert isinstance(good, Generate)


@pytest.mark.parametrize("prompt", ["text", "chat"])
def test_a_prompt_that_cannot_fit_is_refused_before_the_work_of_encoding_it(
    tokenizer: Tokenizer, role: TokenizerRole, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    encoded: list[str] = []
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda self, texts, special: encoded.extend(texts) or [])
    text = "x" * (INFO.max_seq_len * tokenizer.longest_token + 1)
    given: dict[str, Any] = {"text": text} if prompt == "text" else {"chat": [{"role": "user", "content": text}]}
    (refused,) = role.handle([Tokenize(1, PARAMS, **given)])
    assert isinstance(refused, Rejected)
    assert "characters" in refused.message
    assert not refused.is_bug
    assert encoded == []


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ({"text": "word " * 300}, "context_length_exceeded"),
        ({"text": "x" * 10**6}, "context_length_exceeded"),
        ({"token_ids": [1] * 197}, "context_length_exceeded"),
        ({"token_ids": [1] * 150}, "context_length_exceeded"),  # the pool's limit
        ({"token_ids": [10**6] * 201}, "context_length_exceeded"),  # of so many none is looked at
        ({"chat": [{"role": "user", "content": "word " * 300}], "fill_context": True}, "context_length_exceeded"),
        ({"text": ""}, None),
        ({"token_ids": [10**6]}, None),
        ({"chat": []}, None),
    ],
    ids=lambda value: f"{value!r:.40}",
)
def test_what_is_too_long_has_openais_code_and_its_field(role: TokenizerRole, prompt: dict, code: str | None) -> None:
    (refused,) = role.handle([Tokenize(1, PARAMS, field="its name", **prompt)])
    assert isinstance(refused, Rejected)
    assert (refused.code, refused.param) == (code, code and "its name")
    [replies] = DetokenizerRole(role._tokenizer).handle([refused])
    assert isinstance(replies, Replies)
    assert (replies.replies[0].code, replies.replies[0].param) == (code, code and "its name")


def test_variables_of_the_template(tokenizer: Tokenizer) -> None:
    source = "{{ messages[0].content }}{% if shout %}!{% endif %}"
    role = TokenizerRole(Tokenizer(tokenizer._backend, chat_template=source), vocab_size=49152, info=INFO, seed=0)
    chat = [{"role": "user", "content": "x"}]
    asked: list[dict[str, Any]] = [{"shout": True}, {"other": 1, "self": None}, {"messages": "x"}]
    loud, quiet, refused = role.handle([Tokenize(1, PARAMS, chat=chat, template_kwargs=kwargs) for kwargs in asked])
    assert isinstance(loud, Generate)
    assert isinstance(quiet, Generate)
    assert (loud.prompt_ids, quiet.prompt_ids) == (tokenizer.encode("x!"), tokenizer.encode("x"))
    assert isinstance(refused, Rejected)
    assert "messages cannot be set" in refused.message


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("stop_token_ids", SamplingParams(max_tokens=4, stop_token_ids=(49152,))),
        ("logit_bias", SamplingParams(max_tokens=4, logit_bias={1: 1.0, 49152: 2.0})),
    ],
)
def test_ids_past_the_vocabulary_are_refused_by_their_field(
    role: TokenizerRole, field: str, params: SamplingParams
) -> None:
    (refused,) = role.handle([Tokenize(1, params, text="a")])
    assert isinstance(refused, Rejected)
    assert refused.param == field
    assert "49152" in refused.message


def test_a_minimum_that_the_context_does_not_leave(role: TokenizerRole) -> None:
    endless = SamplingParams(max_tokens=2**31 - 1, min_tokens=28)
    requests = [Tokenize(uid, endless, token_ids=[7] * (100 + uid), fill_context=True) for uid in (1, 2)]
    good, refused = role.handle(requests)
    assert isinstance(good, Generate)
    assert (good.params.max_tokens, good.params.min_tokens) == (28, 28)
    assert isinstance(refused, Rejected)
    assert refused.param == "min_tokens"


def test_what_only_the_detokenizer_needs_goes_along(role: TokenizerRole) -> None:
    wishes: dict[str, Any] = {"stop": ["x"], "echo": "before"}
    text, ids = role.handle([Tokenize(1, PARAMS, text="a", **wishes), Tokenize(2, PARAMS, token_ids=[7], **wishes)])
    assert isinstance(text, Generate)
    assert isinstance(ids, Generate)
    assert (text.stop, text.echo, text.text) == (["x"], "before", "a")
    assert (ids.stop, ids.echo, ids.text) == (["x"], "before", None)


def test_what_the_context_leaves_is_what_the_pool_leaves_too(role: TokenizerRole) -> None:
    (filled,) = role.handle([Tokenize(1, PARAMS, token_ids=[7] * 100, fill_context=True)])
    assert isinstance(filled, Generate)
    assert filled.params.max_tokens == 29  # 128 slots, and the last token needs none
    (refused,) = role.handle([Tokenize(2, PARAMS, token_ids=[7] * 129, fill_context=True)])
    assert isinstance(refused, Rejected)
    assert "129 prompt tokens" in refused.message


def test_requests_that_are_sampled_get_a_seed(role: TokenizerRole) -> None:
    sampled = SamplingParams(temperature=1.0, max_tokens=4)
    results = role.handle([Tokenize(uid, sampled, text="a") for uid in range(3)])
    seeds = [result.params.seed for result in results if isinstance(result, Generate)]
    assert None not in seeds
    assert len(set(seeds)) == 3
    given = SamplingParams(temperature=1.0, seed=5)
    assert role.handle([Tokenize(9, given, token_ids=[1], fill_context=True)])[0].params.seed == 5  # type: ignore[attr-defined]


def step(*rows: tuple[int, int | None, Any]) -> Step:
    uids, token_ids, reasons = (list(column) for column in zip(*rows, strict=True))
    return Step(uids, token_ids, reasons, [0] * len(rows), [3] * len(rows))


def texts(messages: list[Message]) -> dict[int, str]:
    joined: dict[int, str] = {}
    for message in messages:
        for reply in message.replies if isinstance(message, Replies) else []:
            joined[reply.uid] = joined.get(reply.uid, "") + reply.text
    return joined


def test_interleaved_answers_are_those_decoded_alone(tokenizer: Tokenizer) -> None:
    answers = ["Grüße 🙂 世界", "def f(x):\n    return x", "🙂🙃"]
    ids = [tokenizer.encode(answer) for answer in answers]
    role = DetokenizerRole(tokenizer)
    out: list[Message] = []
    for position in range(max(map(len, ids))):
        rows = [
            (uid, row[position], "length" if position == len(row) - 1 else None)
            for uid, row in enumerate(ids)
            if position < len(row)
        ]
        out += role.handle([step(*rows)])
        assert all("\ufffd" not in text for text in texts(out).values())
    assert texts(out) == dict(enumerate(answers))
    assert role.num_open == 0


def test_all_that_has_arrived_becomes_one_message(tokenizer: Tokenizer) -> None:
    role = DetokenizerRole(tokenizer)
    refused, heartbeat = Rejected(3, "too long", "prompt"), Heartbeat(1, {"pages_free": 2})
    beat, replies = role.handle([step((1, 504, None), (2, 314, None)), refused, heartbeat, step((1, 2, "stop"))])
    assert beat == heartbeat, "first: who has an answer shall see what it says"
    assert isinstance(replies, Replies)
    assert [(r.uid, r.token_ids, r.finish_reason, r.error) for r in replies.replies] == [
        (1, [504], None, None),
        (2, [314], None, None),
        (3, [], None, "too long"),
        (1, [2], "stop", None),
    ]
    assert replies.replies[-1].text == ""  # an end-of-sequence token is in the ids and not in the text
    assert role.num_open == 1


def test_hazard_21_an_abort_ends_what_is_remembered_and_gives_out_the_rest(tokenizer: Tokenizer) -> None:
    role = DetokenizerRole(tokenizer)
    first_third = tokenizer.encode("🙂")[0]
    (replies,) = role.handle([step((1, first_third, None))])
    assert texts([replies]) == {1: ""}
    (replies,) = role.handle([step((1, None, "abort"))])
    assert isinstance(replies, Replies)
    assert replies.replies == [Reply(1, "\ufffd", [], "abort", 3, 0)]
    assert role.num_open == 0


def test_a_request_that_fails_ends_once_and_alone(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: 1 // 0 if 504 in ids else decode(self, ids))
    role = DetokenizerRole(tokenizer)
    out = role.handle(
        [step((1, 504, None), (2, 314, None)), step((1, 314, None), (2, 314, None)), step((1, 2, "stop"))]
    )
    assert isinstance(out[0], Replies)
    (end,) = [reply for reply in out[0].replies if reply.uid == 1]
    assert end.error
    assert end.is_bug
    assert texts(out)[2] == tokenizer.decode([314, 314])
    assert role.num_open == 1


def test_the_tokenizers_work_by_itself(role: TokenizerRole, tokenizer: Tokenizer) -> None:
    """Ids of a text and text of ids, answered or refused; what empties the cache goes by."""
    ids = tokenizer.encode("Hi 🙂 <|im_end|>")
    questions: list[Message] = [
        Encode(0, "Hi 🙂 <|im_end|>"),
        Flush(1),
        Decode(2, ids),
        Encode(3, ""),
        Decode(4, []),
        Decode(5, [49152]),
        Decode(6, [-1]),
        Encode(7, "\ud800"),
    ]
    *good, past, negative, half = role.handle(questions)
    assert good == [Answered(0, token_ids=ids), Flush(1), Answered(2, "Hi 🙂 "), Answered(3), Answered(4)]
    for refusal, word in ((past, "49152"), (negative, "-1"), (half, "U\\+D800")):
        assert isinstance(refusal, Rejected)
        assert re.search(word, refusal.message)


def test_an_answer_of_the_tokenizer_becomes_one_reply(tokenizer: Tokenizer) -> None:
    detokenizer = DetokenizerRole(tokenizer)
    [replies] = detokenizer.handle([Answered(3, "a", [1, 2])])
    assert replies == Replies([Reply(3, "a", [1, 2], "stop", 0, 0)])
    assert detokenizer.num_open == 0
