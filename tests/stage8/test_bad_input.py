"""Bytes, fields and numbers that no well-behaved client would send: each has its 4xx, and harms nobody else.

The app runs behind a real port with an engine that answers at once; raw sockets, since an HTTP library would refuse to
send most of this. What the real processes do with it is in e2e/test_bad_input.py.
"""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from fake_ring import FakeRing
from live_app import answer, live

from minisgl.stage8 import api
from minisgl.stage8.api import MAX_BODY, MAX_VALUES
from minisgl.stage8.errors import MAX_MESSAGE
from minisgl.stage8.messages import Tokenize
from minisgl.stage8.openapi import ENDPOINTS

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    TEXT: {"prompt": "Hi"},
    NATIVE: {"text": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
}


class Live(NamedTuple):
    url: str
    ring: FakeRing
    http: httpx.Client

    def raw(self, data: bytes, half_close: bool = False) -> bytes:
        """All that comes back for these bytes."""
        address = httpx.URL(self.url)
        received = b""
        with socket.create_connection((address.host, address.port), timeout=20) as connection:
            try:
                connection.sendall(data)
                if half_close:
                    connection.shutdown(socket.SHUT_WR)
                while piece := connection.recv(1 << 16):
                    received += piece
            except (ConnectionResetError, BrokenPipeError):
                pass  # it answers and closes without reading the rest
        return received


@pytest.fixture(scope="module")
def running() -> Iterator[Live]:
    ring = FakeRing(answer)
    with live(ring) as (url, service), httpx.Client(base_url=url, timeout=20) as http:
        yield Live(url, ring, http)
        assert service.frontend is not None
        assert service.frontend.num_open == 0
        assert service.frontend.late == service.frontend.malformed == 0


@pytest.fixture
def app(running: Live) -> Iterator[Live]:
    """After the test the server is well, answers as before, and holds nothing."""
    yield running
    assert running.http.get("/health").status_code == 200
    assert running.http.post(CHAT, json=GOOD[CHAT]).json()["choices"][0]["message"]["content"] == "Hello"
    assert running.http.get("/server_info").json()["requests_open"] == 0


def check_refused(response: httpx.Response, param: str | None = None, status: int = 400) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) <= MAX_MESSAGE
    assert len(response.content) < 3 * MAX_MESSAGE, "it repeats its input"
    if param is not None:
        assert str(error["param"]).split("[")[0].split(".")[0] == param, error


# Numbers: of each field, what is allowed. A number's edges are tried, and what is no number

INTEGERS = {
    "max_tokens": (1, 2**31 - 1),
    "top_k": (-1, 2**31 - 1),
    "seed": (0, 2**63 - 1),
    "n": (1, 128),
    "min_tokens": (0, 16),
}
NUMBERS = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, 100),
}
NEVER = [
    *('"1"', '""', "true", "false", "[]", "[1]", "{}", '{"a":1}'),
    *(
        "-1e308",
        "1e308",
        "1e400",
        "-1e400",
        "NaN",
        "Infinity",
        "-Infinity",
        "nan",
        "0x10",
        "01",
        "1_000",
        "+1",
        "1.",
        "1" * 5000,
    ),
]
HUGE = [sign + "1" + "0" * zeros for zeros in (20, 40, 400) for sign in ("", "-")]
ENDS = {("top_p", 0): False, ("repetition_penalty", 0): False}  # not what the range says


def body_with(path: str, field: str, value: str) -> bytes:
    """value: JSON, or what looks like it."""
    start = json.dumps({**GOOD[path], "max_tokens": 16} if field != "max_tokens" else GOOD[path])[:-1]
    return f'{start}, "{field}": {value}}}'.encode()


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
@pytest.mark.parametrize("field", [*INTEGERS, *NUMBERS])
def test_numbers(app: Live, path: str, field: str) -> None:
    for value in NEVER + HUGE:
        response = app.http.post(path, content=body_with(path, field, value))
        is_json = value in NEVER[:8] or value in HUGE or value in ("-1e308", "1e308")
        check_refused(response, field if is_json else None)
    low, high = (INTEGERS | NUMBERS)[field]
    step = 1 if field in INTEGERS else 1e-6
    for number in (low, high, low - step, high + step, -(2**63), 2**63, 2**64):
        is_good = ENDS.get((field, number), low <= number <= high)
        response = app.http.post(path, content=body_with(path, field, json.dumps(number)))
        if is_good:
            assert response.status_code == 200, (number, response.text)
        else:
            check_refused(response, field)
    if field in INTEGERS:
        check_refused(app.http.post(path, content=body_with(path, field, "2.5")), field)
    assert app.http.post(path, content=body_with(path, field, "null")).status_code == 200


@pytest.mark.parametrize("field", ["stream", "ignore_eos", "echo", "logprobs", "add_special_tokens"])
def test_truth_values(app: Live, field: str) -> None:
    path = {"echo": TEXT, "logprobs": CHAT, "add_special_tokens": "/tokenize"}.get(field, CHAT)
    for value in ("0", "1", '"true"', '""', "[]", "[true]", "{}", "1.0", "-1"):
        check_refused(app.http.post(path, content=body_with(path, field, value)), field)


# Text, and what stands where text should

STRANGE = [
    *("", " ", "\n" * 1000, "\0", "a\0b", "\x01\x1b[2J\x7f", "\ufeff", "\ufffd", "\u202e", "\U0010ffff", "\ue000"),
    *(
        "e\u0301" * 1000,
        "👩‍👩‍👧‍👦" * 500,
        "中文" * 5000,
        "<|im_start|>system\n<|im_end|>",
        "</s><s>[INST]",
        "{{ 7 * 7 }}",
    ),
    *("{% for i in range(10**9) %}x{% endfor %}", "../../../etc/passwd", "a" * 500_000, "\r\n\r\nHTTP/1.1 200 OK"),
]


@pytest.mark.parametrize("text", STRANGE, ids=lambda text: f"{text!r:.30}")
def test_any_text_reaches_the_tokenizer_as_it_is(app: Live, text: str) -> None:
    before = len(app.ring.sent)
    parts = [{"type": "text", "text": text}, {"type": "text", "text": ""}]
    for path, body in (
        (TEXT, {"prompt": text}),
        (NATIVE, {"text": text}),
        ("/tokenize", {"prompt": text}),
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        (CHAT, {"messages": [{"role": "user", "content": parts, "name": text}]}),
    ):
        assert app.http.post(path, json=body).status_code == 200, path
    of_completion, of_generate, of_tokenize, whole, in_parts = app.ring.sent[before:]
    assert {message.text for message in (of_completion, of_generate, of_tokenize)} == {text}  # type: ignore[attr-defined]
    assert isinstance(whole, Tokenize)
    assert isinstance(in_parts, Tokenize)
    assert whole.chat == [{"role": "user", "content": text}]
    assert in_parts.chat == [{"role": "user", "content": text + "\n", "name": text}]


HALVES = ['"\\ud800"', '"\\udc00"', '"a\\ud83d"', '"\\ud83dx"', '"\\ude00\\ud83d"', '"\\ud800\\ud800"']
NO_TEXT = [
    *HALVES,
    '"\xff"',
    '"\xed\xa0\x80"',
    '"\xc0\x80"',
    '"\xf4\x90\x80\x80"',
    '"\0"',
    '"a\nb"',
    '"\\x41"',
    '"\\u12"',
]


@pytest.mark.parametrize("value", NO_TEXT, ids=ascii)
def test_what_is_no_text_is_no_json(app: Live, value: str) -> None:
    data = value.encode("latin-1")
    for path, before, after in (
        (TEXT, b'{"prompt": ', b"}"),
        (TEXT, b'{"prompt": "a", "stop": [', b"]}"),
        (TEXT, b'{"prompt": "a", "unknown": ', b"}"),
        (CHAT, b'{"messages": [{"role": "user", "content": ', b"}]}"),
        (NATIVE, b'{"text": ', b"}"),
        ("/tokenize", b'{"prompt": ', b"}"),
    ):
        check_refused(app.http.post(path, content=before + data + after))


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
def test_stop_strings_and_their_bounds(app: Live, path: str) -> None:
    for good in (None, [], "x", ["x"] * 16, "x" * 1000, "\0", "\n"):
        assert app.http.post(path, json={**GOOD[path], "stop": good}).status_code == 200, good
    for bad in ("", [""], ["x"] * 17, "x" * 1001, [1], [None], {}, 1, True, [["x"]], "x" * 10**6, ["x"] * 10**5):
        check_refused(app.http.post(path, json={**GOOD[path], "stop": bad}), "stop")


IDS: list[Any] = [
    [-1],
    [2**31],
    [2**63],
    [2**64],
    [10**30],
    [1.5],
    ["1"],
    [True],
    [None],
    [[[1]]],
    [{}],
    "1",
    1,
    {},
    True,
]


@pytest.mark.parametrize(
    ("path", "field"), [(TEXT, "stop_token_ids"), (NATIVE, "input_ids"), ("/detokenize", "tokens")]
)
def test_token_ids_and_their_bounds(app: Live, path: str, field: str) -> None:
    good = {} if path == NATIVE else GOOD[path]
    for bad in IDS:
        check_refused(app.http.post(path, json={**good, field: bad}), field)
    for bad in ("[1, 2", "[1,]", "[1 2]", "[0x1]", "[1e400]", "[-]", "[NaN]"):
        check_refused(app.http.post(path, content=json.dumps(good)[:-1].encode() + f'"{field}": {bad}}}'.encode()))


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
def test_maps_and_lists_and_their_bounds(app: Live, path: str) -> None:
    for bad in (
        [],
        "x",
        1,
        {"a": 1},
        {"1": "x"},
        {"1": 101},
        {"-1": 1},
        {str(2**31): 1},
        {"1.5": 1},
        {"1": None},
        {"": 1},
    ):
        check_refused(app.http.post(path, json={**GOOD[path], "logit_bias": bad}), "logit_bias")
    for bad in ({str(i): 1 for i in range(1025)}, {str(i): 1 for i in range(10**5)}):
        check_refused(app.http.post(path, json={**GOOD[path], "logit_bias": bad}), "logit_bias")
    check_refused(app.http.post(path, json={**GOOD[path], "stop_token_ids": [1] * 129}), "stop_token_ids")
    check_refused(app.http.post(path, json={**GOOD[path], "model": "x" * 10**6}), "model", 404)
    check_refused(app.http.post(path, json={**GOOD[path], "model": "../../etc/passwd"}), "model", 404)
    check_refused(app.http.post(path, json={**GOOD[path], "stream_options": {}}), "stream_options")
    for bad in ([], "x", 1, {"include_usage": 1}, {"include_usage": "x"}):
        check_refused(app.http.post(path, json={**GOOD[path], "stream": True, "stream_options": bad}), "stream_options")


def test_logprobs_and_template_variables_and_their_bounds(app: Live) -> None:
    for bad in (-1, 21, 10**30, 1.5, "1", True, []):
        check_refused(app.http.post(TEXT, json={**GOOD[TEXT], "logprobs": bad}), "logprobs")
        top = {"logprobs": True, "top_logprobs": bad}
        check_refused(app.http.post(CHAT, json={**GOOD[CHAT], **top}), "top_logprobs")
    for bad in ([], "x", {"a": []}, {"a": {}}, {f"v{i}": 1 for i in range(65)}):
        check_refused(app.http.post(CHAT, json={**GOOD[CHAT], "chat_template_kwargs": bad}), "chat_template_kwargs")
    check_refused(app.http.post(CHAT, json={**GOOD[CHAT], "chat_template": "{{ 1 }}"}), "chat_template")
    message = {"role": "user", "content": "a"}
    check_refused(app.http.post(CHAT, json={"messages": [message] * 10_001}), "messages")
    check_refused(app.http.post(TEXT, json={"prompt": ["a"] * 10**5}), "prompt")
    image = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/secret"}}]
    check_refused(app.http.post(CHAT, json={"messages": [{"role": "user", "content": image}]}), "messages")


# Bodies

DEEP = {kind: (start * 10**5, end * 10**5) for kind, start, end in (("lists", "[", "]"), ("maps", '{"a":', "}"))}
BODIES = {
    "nothing": b"",
    "a blank": b" \r\n\t",
    "half an object": b'{"prompt": "a"',
    "half a text": b'{"prompt": "a',
    "half an escape": b'{"prompt": "\\u00',
    "two objects": b'{"prompt": "a"}{"prompt": "b"}',
    "a rest": b'{"prompt": "a"} x',
    "a comma too many": b'{"prompt": "a",}',
    "a comment": b'{"prompt": "a"} // b',
    "single quotes": b"{'prompt': 'a'}",
    "a key that is no text": b'{1: "a"}',
    "UTF-8 with its mark": '\ufeff{"prompt": "a"}'.encode(),
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "UTF-32": '{"prompt": "a"}'.encode("utf-32"),
    "a form": b"prompt=a&max_tokens=1",
    "multipart": b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na\r\n--x--',
    "XML": b"<prompt>a</prompt>",
    "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00",
    "MessagePack": b"\x81\xa6prompt\xa1a",
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03",
    "zeros": bytes(1000),
    "a list": b'["prompt"]',
    "a text": b'"prompt"',
    "a number": b"1",
    "a huge number": b"1" * 10**6,
    "null": b"null",
    **{f"deep {kind}": b'{"prompt": "a", "x": ' + (start + end).encode() + b"}" for kind, (start, end) in DEEP.items()},
    **{f"deep {kind} cut off": b'{"prompt": ' + start.encode() for kind, (start, _) in DEEP.items()},
}


@pytest.mark.parametrize("data", BODIES.values(), ids=BODIES)
def test_bodies_that_are_no_request(app: Live, data: bytes) -> None:
    for path in GOOD:
        check_refused(app.http.post(path, content=data))
        chunked = app.http.post(path, content=(data[i : i + 999] for i in range(0, len(data), 999)))
        check_refused(chunked)


def test_unknown_fields_are_ignored_and_of_double_ones_the_last_counts(app: Live) -> None:
    strange = {"": 1, "\0": 2, "a" * 10**5: 3, "__class__": "x", "self": 1, "constructor": {"prototype": 1}, "uid": -1}
    for path, good in GOOD.items():
        many = {**good, **strange, **{f"unknown{i}": [] for i in range(10_000)}}
        assert app.http.post(path, json=many).status_code == 200, path
    data = b'{"prompt": 1, "prompt": "a", "max_tokens": "x", "max_tokens": 3, "max_tokens": 5}'
    assert app.http.post(TEXT, content=data).status_code == 200
    last = app.ring.requests[-1]
    assert (last.text, last.params.max_tokens) == ("a", 5)


def test_bodies_over_the_limit(app: Live) -> None:
    for path in GOOD:
        check_refused(app.http.post(path, content=b" " * (MAX_BODY + 1)), status=413)
    pieces = (b" " * (1 << 20) for _ in range((MAX_BODY >> 20) + 1))
    check_refused(app.http.post(TEXT, content=pieces), status=413)
    largest = json.dumps(GOOD[TEXT]).encode().ljust(MAX_BODY)
    assert app.http.post(TEXT, content=largest).status_code == 200


@pytest.mark.parametrize("path", GOOD)
def test_bodies_of_too_many_values_are_refused_unread(app: Live, path: str) -> None:
    """Eight million ids fit in 16 MiB, and took 0.6 s to read: everybody's streams waited."""
    refused = app.http.post(path, content=b'{"prompt": [' + b"1," * 8_000_000 + b"1]}")
    check_refused(refused, status=413)
    assert f"8000000 values, as its commas tell, over the limit of {MAX_VALUES}" in refused.text
    check_refused(app.http.post(path, content=b"," * (MAX_VALUES + 1)), status=413)
    check_refused(app.http.post(path, content=b"," * MAX_VALUES))


def test_the_values_of_a_prompt_as_long_as_the_context_are_read() -> None:
    with live(FakeRing(answer)) as (url, service):
        prompt = [1] * (MAX_VALUES + 2)
        assert httpx.post(url + TEXT, json={"prompt": prompt}, timeout=20).status_code == 413
        service.max_model_len = len(prompt)
        assert httpx.post(url + TEXT, json={"prompt": prompt}, timeout=20).status_code == 200


@pytest.mark.parametrize("path", GOOD)
def test_a_body_of_many_parts_is_not_searched_for_garbage(app: Live, path: str) -> None:
    """It would be, again and again as it grows, ten times as long as it is read; and all streams wait meanwhile."""
    collections: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(info["generation"])

    body = json.dumps(GOOD[path])[:-1].encode() + b', "x": [' + b",".join([b"[]"] * 500_000) + b"]}"
    gc.callbacks.append(note)
    try:
        assert app.http.post(path, content=body).status_code == 200
    finally:
        gc.callbacks.remove(note)
    assert len(collections) < 100
    assert gc.isenabled()


def test_large_bodies_at_once_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many connections each send one: it is kept until it is whole."""
    monkeypatch.setattr(api, "MAX_BODIES", 1 << 20)
    large = json.dumps(GOOD[TEXT]).encode().ljust(600_000)
    with live(FakeRing(answer)) as (url, service), httpx.Client(base_url=url, timeout=20) as http:
        address = httpx.URL(url)
        with socket.create_connection((address.host, address.port), timeout=20) as connection:
            connection.sendall(head(f"Content-Length: {len(large)}") + large[:-1])
            while service.body_bytes < len(large) - 1:
                assert http.get("/health").status_code == 200
            refused = http.post(TEXT, content=large)
            check_refused(refused, status=429)
            assert refused.headers["retry-after"] == "1"
            assert http.post(TEXT, content=BODY.ljust(api.SMALL_BODY)).status_code == 200
            connection.sendall(large[-1:])
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
        assert service.body_bytes == 0
        assert http.post(TEXT, content=large).status_code == 200


# Bytes on the wire


def head(*lines: str, path: str = TEXT, method: str = "POST", version: str = "HTTP/1.1") -> bytes:
    return "\r\n".join([f"{method} {path} {version}", "Host: a", *lines, "", ""]).encode("latin-1")


BODY = json.dumps(GOOD[TEXT]).encode()
LENGTH = f"Content-Length: {len(BODY)}"
CHUNKED = "Transfer-Encoding: chunked"
WIRE = {
    "no HTTP": b"hello\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    "zeros": bytes(5000),
    "a method that is none": head(LENGTH, method="P(ST") + BODY,
    "a path with a blank": head(LENGTH, path="/v1 /x") + BODY,
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "a header without a colon": head("Nothing") + BODY,
    "a header with a zero": head("A: b\0c") + BODY,
    "a header's name with a blank": head("A b: c") + BODY,
    "a negative length": head("Content-Length: -1") + BODY,
    "a length that is none": head("Content-Length: ten") + BODY,
    "a length of many digits": head("Content-Length: " + "9" * 100) + BODY,
    "two lengths": head("Content-Length: 1", LENGTH) + BODY,
    "a length with a sign": head(f"Content-Length: +{len(BODY)}") + BODY,
    "an unknown coding": head("Transfer-Encoding: gzip") + BODY,
    "chunks of no length": head(CHUNKED) + b"x\r\n" + BODY,
    "chunks of a negative length": head(CHUNKED) + b"-1\r\n" + BODY,
    "chunks of a huge length": head(CHUNKED) + b"f" * 40 + b"\r\n" + BODY,
    "chunks longer than they say": head(CHUNKED) + b"2\r\n" + BODY + b"\r\n0\r\n\r\n",
}
LONG = {
    "a long path": head(LENGTH, path="/" + "a" * 10**6) + BODY,
    "a long query": head(LENGTH, path=TEXT + "?" + "a" * 10**6) + BODY,
    "a long method": head(LENGTH, method="A" * 10**6) + BODY,
    "a long header": head("A: " + "b" * 10**6, LENGTH) + BODY,
    "many headers": head(*(f"A{i}: b" for i in range(10**5)), LENGTH) + BODY,
    "a header that does not end": head()[:-2] + b"A: " + b"b" * 10**6,
}


@pytest.mark.parametrize("data", WIRE.values(), ids=WIRE)
def test_bytes_that_are_no_request(app: Live, data: bytes) -> None:
    received = app.raw(data)
    assert received.startswith(b"HTTP/1.1 4"), received[:300]
    last = received[received.rindex(b"HTTP/1.1 400 Bad Request") :]
    start, _, body = last.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in start
    assert f"content-length: {len(body)}".encode() in start
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("data", LONG.values(), ids=LONG)
def test_a_head_over_the_limit_is_not_read_to_its_end(app: Live, data: bytes) -> None:
    """The answer may be lost: the connection is closed while we still send."""
    assert b"HTTP/1.1 400 Bad Request".startswith(app.raw(data)[:24])


ODD = {
    "HTTP/1.0": head(LENGTH, version="HTTP/1.0") + BODY,
    "names in capitals": head(LENGTH.upper(), "CONNECTION: CLOSE") + BODY,
    "one byte a chunk": head(CHUNKED, "Connection: close")
    + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
    + b"0\r\nTrailer: x\r\n\r\n",
    "an extension of a chunk": head(CHUNKED, "Connection: close") + b"%x;a=b\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
    "another content type": head(LENGTH, "Content-Type: image/png", "Connection: close") + BODY,
    "a charset": head(LENGTH, "Content-Type: application/json; charset=latin-1", "Connection: close") + BODY,
    "twice authorized": head(LENGTH, "Authorization: x", "Authorization: \xff", "Connection: close") + BODY,
    "a query": head(LENGTH, "Connection: close", path=TEXT + "?stream=true&%00=%ff") + BODY,
    "60 kilobytes of headers": head(*(f"A{i}: {'b' * 1000}" for i in range(60)), LENGTH, "Connection: close") + BODY,
    "two requests at once": head(LENGTH) + BODY + head(LENGTH, "Connection: close") + BODY,
}


@pytest.mark.parametrize("data", ODD.values(), ids=ODD)
def test_bytes_that_are_odd_and_right(app: Live, data: bytes) -> None:
    received = app.raw(data)
    assert b"HTTP/1.1 200 OK" in received, received[:300]
    assert b'"text":"Hello"' in received


CUT = {
    "in the method": b"PO",
    "in a header": head(LENGTH)[:-6],
    "before the body": head(LENGTH),
    "in the body": head(LENGTH) + BODY[:-3],
    "in a chunk": head(CHUNKED) + b"ff\r\n" + BODY,
    "before the last chunk": head(CHUNKED) + b"%x\r\n" % len(BODY) + BODY + b"\r\n",
}


@pytest.mark.parametrize("data", CUT.values(), ids=CUT)
def test_a_client_that_ends_in_the_middle_asks_nothing(app: Live, data: bytes) -> None:
    before = len(app.ring.sent)
    assert not app.raw(data, half_close=True).startswith(b"HTTP/1.1 200")
    assert len(app.ring.sent) == before


def test_half_a_request_does_not_hold_up_the_end_of_the_server() -> None:
    with live(FakeRing(answer)) as (url, _):
        address = httpx.URL(url)
        connection = socket.create_connection((address.host, address.port), timeout=20)
        connection.sendall(head(LENGTH, "Expect: 100-continue"))
        assert b"100 Continue" in connection.recv(1 << 16)  # it waits for the body
        connection.sendall(BODY[:-3])
    with connection:
        start, _, body = connection.recv(1 << 16).partition(b"\r\n\r\n")
        assert connection.recv(1) == b""
    assert start.startswith(b"HTTP/1.1 503"), start
    assert json.loads(body)["error"]["code"] == "unavailable"


# Methods and paths

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "PROPFIND", "FOO")


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda one: one.path)
def test_other_methods_are_405(app: Live, endpoint: Any) -> None:
    path = endpoint.path.replace("{name}", "m")
    allowed = {"POST"} if endpoint.method == "post" else {"GET", "HEAD"}
    for method in METHODS:
        if method in allowed:
            continue
        response = app.http.request(method, path)
        assert response.status_code == 405, (method, response.text)
        assert set(response.headers["allow"].split(", ")) == allowed
        if method != "HEAD":
            check_refused(response, status=405)


@pytest.mark.parametrize("path", [one.path for one in ENDPOINTS if one.method == "get"] + ["/v1/models/x"])
def test_head_is_get_without_the_body(app: Live, path: str) -> None:
    path = path.replace("{name}", "m")
    got, headed = app.http.get(path), app.http.head(path)
    assert headed.status_code == got.status_code
    assert {**headed.headers, "date": ""} == {**got.headers, "date": ""}
    both = f"HEAD {path} HTTP/1.1\r\nHost: a\r\n\r\nGET /nowhere HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    _, _, after = app.raw(both.encode()).partition(b"\r\n\r\n")
    assert after.startswith(b"HTTP/1.1 404"), "the next answer, and no body before it"


LOST = [
    "/",
    "//",
    "/v1",
    "/v1/",
    TEXT + "/",
    "/V1/COMPLETIONS",
    "/v1//completions",
    "/v1/../health",
    "/%2e%2e/etc/passwd",
]
LOST += [
    "/%00",
    "/%ff%fe",
    "/v1/completions%00",
    "/docs",
    "/redoc",
    "/admin",
    "/favicon.ico",
    "/v1/embeddings",
    "/" + "x/" * 5000,
]


@pytest.mark.parametrize("path", LOST, ids=lambda path: path[:30])
def test_other_paths_are_404(app: Live, path: str) -> None:
    for method in ("GET", "POST"):
        received = app.raw(head("Content-Length: 0", "Connection: close", path=path, method=method))
        assert received.startswith(b"HTTP/1.1 404"), received[:200]
        error = json.loads(received.partition(b"\r\n\r\n")[2])["error"]
        assert len(error["message"]) <= MAX_MESSAGE


@pytest.mark.parametrize("name", ["x", "", "m/", "../m", "m\0", "x" * 10**4, "%", "ü", "{name}", "m?"])
def test_models_that_are_not_there(app: Live, name: str) -> None:
    quoted = "".join(f"%{byte:02x}" for byte in name.encode())
    check_refused(app.http.get(f"/v1/models/{quoted}"), status=404)


def test_keys_of_all_kinds() -> None:
    with live(FakeRing(answer), key="sésame") as (url, _), httpx.Client(base_url=url, timeout=20) as http:
        right = "Bearer sésame".encode()
        wrong = [
            b"",
            b"Bearer",
            right[:-1],
            right + b"x",
            right.upper(),
            b"Basic c8Opc2FtZQ==",
            b"s\xc3\xa9same",
        ]
        for path in (*GOOD, "/server_info", "/metrics", "/v1/models", "/openapi.json", "/nothing", "/flush_cache"):
            for header in [*wrong, b"x" * 50_000]:
                response = http.request("POST" if path in GOOD else "GET", path, headers=[(b"authorization", header)])
                check_refused(response, status=401)
                assert response.headers["www-authenticate"] == "Bearer"
        twice = [(b"authorization", right), (b"authorization", b"Bearer x")]
        assert http.post(TEXT, json=GOOD[TEXT], headers=twice).status_code == 401, "which one is meant is unclear"
        for scheme in (b"Bearer ", b"bearer ", b"BEARER ", b"Bearer   "):  # RFC 9110, 11.1 and 11.4
            header = right.replace(b"Bearer ", scheme)
            assert http.post(TEXT, json=GOOD[TEXT], headers=[(b"authorization", header)]).status_code == 200, header
