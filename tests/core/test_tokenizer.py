"""The tokenizer gives what transformers' gives, without it; and whatever a folder holds, errors are clear."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from transformers import AutoTokenizer

from minisgl.core.chat_template import MAX_MESSAGE_CHARS, MAX_RENDERED_CHARS
from minisgl.core.tokenizer import ChatTemplateError, Tokenizer

TEXTS = [
    "",
    "Hello, world!",
    "  two  spaces , and a comma . it 's n't  ",
    "你好，世界！ 日本語 한국어",
    "I love 🍕 and 👩‍🚀",
    "def f(x):\n\treturn x ** 2  # 12345\n",
    "e\u0301 \u00a0 \ufffd \x00 \r\n",
    "<|im_start|>user\nhi<|im_end|> <s>the</s>",
]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hé 🍕"}]


def change(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **changes}))


def both(folder: Path) -> tuple[Tokenizer, Any]:
    return Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def pair(model_folder: Path) -> tuple[Tokenizer, Any]:
    """The built-in model's tokenizer, ours and transformers'."""
    return both(model_folder)


def assert_same(ours: Tokenizer, theirs: Any, texts: list[str] = TEXTS) -> None:
    """encode and decode are transformers'."""
    for text in texts:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special).input_ids
            assert ours.encode(text, add_special_tokens=special) == ids
            decoded = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert ours.decode(ids) == decoded
        assert ours.encode_batch([text, "the"]) == [ours.encode(text), ours.encode("the")]


def chat_tokenizer(folder: Path, template: str) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.from_folder(folder)


def assert_same_chat(ours: Tokenizer, theirs: Any, messages: list[dict[str, Any]], **kwargs: Any) -> None:
    for prompt in (True, False):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False, **kwargs)
        assert ours.apply_chat_template(messages, prompt, **kwargs) == expected
        assert ours.encode_chat(messages, prompt, **kwargs) == theirs(expected, add_special_tokens=False).input_ids


def test_needs_neither_torch_nor_transformers() -> None:
    names = "chat_template detokenizer tokenizer trace"
    code = f"import importlib, sys; [importlib.import_module('minisgl.core.' + m) for m in '{names}'.split()]"
    code += "; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_built_in_model_is_transformers(pair: tuple[Tokenizer, Any]) -> None:
    assert_same(*pair)


def test_byte_fallback_with_bos_is_transformers(spm_folder: Path) -> None:
    assert_same(*both(spm_folder))
    tokenizer = Tokenizer.from_folder(spm_folder)
    assert tokenizer.bos == "<s>"
    assert tokenizer.encode("the")[0] == 1


@given(text=st.text())
def test_any_text_is_transformers(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = pair
    ids = ours.encode(text)
    assert ids == theirs(text).input_ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@given(ids=st.lists(st.integers(0, 49151)))
def test_any_ids_decode_as_transformers(pair: tuple[Tokenizer, Any], ids: list[int]) -> None:
    ours, theirs = pair
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("flag", ["add_bos_token", "add_eos_token"])
def test_the_post_processor_decides_on_bos(spm_folder: Path, flag: str) -> None:
    change(spm_folder / "tokenizer_config.json", **{flag: flag == "add_bos_token"})
    assert_same(*both(spm_folder), ["the cat"])


def test_tokens_only_the_config_knows(spm_folder: Path) -> None:
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    size = Tokenizer.from_folder(spm_folder).vocab_size
    listed = {
        str(size): {"content": "<|call|>", "special": False, **flags},
        str(size + 1): {"content": "<|end|>", "special": True, **flags},
        str(size + 2): {"content": "<|eot|>", "special": False, **flags},  # special because it is the EOS
    }
    change(spm_folder / "tokenizer_config.json", added_tokens_decoder=listed, eos_token="<|eot|>", pad_token="<pad>")
    change(spm_folder / "tokenizer_config.json", additional_special_tokens=["<|x|>", "cat"])
    assert_same(*both(spm_folder), ["the<|call|>cat<|end|>he <|eot|> <pad>!<|x|>"])
    tokenizer = Tokenizer.from_folder(spm_folder)
    assert tokenizer.vocab_size == size + 6
    assert tokenizer.eos_ids == {size + 2}


def test_truncation_and_padding_of_the_file_are_off(spm_folder: Path) -> None:
    rust = RustTokenizer.from_file(str(spm_folder / "tokenizer.json"))
    rust.enable_truncation(4)
    rust.enable_padding(length=64)
    rust.save(str(spm_folder / "tokenizer.json"))
    assert_same(*both(spm_folder), ["the cat the cat the cat", "he"])


@pytest.mark.parametrize(
    ("token", "config", "generation", "expected"),
    [
        ("</s>", None, None, {2}),
        ({"content": "</s>", "lstrip": False}, None, [2, 5], {2, 5}),
        (None, 7, [8, 9], {7, 8, 9}),
        ("</s>", [7], 0, {0, 2, 7}),
        (None, None, None, set()),
    ],
)
def test_eos_is_the_union(spm_folder: Path, token: Any, config: Any, generation: Any, expected: set[int]) -> None:
    change(spm_folder / "tokenizer_config.json", eos_token=token)
    change(spm_folder / "config.json", eos_token_id=config)
    change(spm_folder / "generation_config.json", eos_token_id=generation)
    assert Tokenizer.from_folder(spm_folder).eos_ids == expected


def test_names_of_special_tokens_may_have_a_file_of_their_own(spm_folder: Path) -> None:
    (spm_folder / "tokenizer_config.json").write_text("{}")
    change(spm_folder / "special_tokens_map.json", bos_token="<s>", eos_token={"content": "</s>"})
    tokenizer = Tokenizer.from_folder(spm_folder)
    assert (tokenizer.bos, tokenizer.eos_ids) == ("<s>", {2})


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"version": "1.0"}'),
        ("tokenizer_config.json", "{,}"),
        ("config.json", "[1]"),
        ("generation_config.json", '{"eos_token_id": "</s>"}'),
        ("generation_config.json", '{"eos_token_id": [-1]}'),
    ],
)
def test_broken_files_are_named(spm_folder: Path, file: str, content: str) -> None:
    (spm_folder / file).write_text(content)
    with pytest.raises(ValueError, match=file.replace(".", r"\.")):
        Tokenizer.from_folder(spm_folder)


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer in .*tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_tokenizer_written_in_python(tmp_path: Path) -> None:
    change(tmp_path / "config.json", model_type="t5")
    change(tmp_path / "tokenizer_config.json", tokenizer_class="ByT5Tokenizer", eos_token="</s>")
    assert_same(*both(tmp_path), ["Hello, 世界 🍕", "a</s>b"])
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert not theirs.is_fast
    assert Tokenizer.from_folder(tmp_path).eos_ids == {theirs.eos_token_id}


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "ok \ud83d"])
def test_half_a_surrogate_pair_is_refused(pair: tuple[Tokenizer, Any], text: str) -> None:
    tokenizer = pair[0]
    with pytest.raises(ValueError, match=r"U\+D[8-F]\w\w at character \d+.*remove it"):
        tokenizer.encode(text)
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode_chat([{"role": "user", "content": text}])


def test_text_must_be_a_string(pair: tuple[Tokenizer, Any]) -> None:
    with pytest.raises(ValueError, match="text must be a string, not 3"):
        pair[0].encode(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"\xe4\xb8\x96", "世"),
        (b"\xe4\xb8\x96\xf0\x9f", "世\ufffd\ufffd"),  # cut within an emoji: what was whole stays whole
        (b"\xff\xe4\xb8\x96\x80a", "\ufffd世\ufffda"),
        (b"\xe4\xb8", "\ufffd\ufffd"),
    ],
)
def test_bad_bytes_do_not_spoil_their_neighbours(spm_folder: Path, raw: bytes, expected: str) -> None:
    tokenizer = Tokenizer.from_folder(spm_folder)
    ids = [1, *(3 + byte for byte in raw), 2]
    assert tokenizer.decode(ids) == expected
    the = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.decode([*the, *ids, *the]) == f"the{expected} the"


# --- conversations


def test_chat_of_the_built_in_model_is_transformers(pair: tuple[Tokenizer, Any]) -> None:
    assert_same_chat(*pair, CHAT)
    assert_same_chat(*pair, CHAT[1:])


RICH = """\
{%- set ns = namespace(count=0, self='x') %}
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- generation %}[{{ message.role }}] {{ message.content | tojson }} {{ message.name is defined }}
    {%- set inner = 1 %}{% endgeneration %}
    {{ inner is defined }}
    {%- if ns.count > 2 %}{% break %}{% endif %}
{%- endfor %}
{{ ns.count }} {{ ns.self }} {{ tools is none }} {{ strftime_now('%Y') }} {{ {'b': '<', 'a': 'é'} | tojson(indent=1) }}
{% if thinking %}think{% endif %}
{% if add_generation_prompt %}go{{ eos_token }}{% endif %}
"""


def test_everything_templates_use_is_there(spm_folder: Path) -> None:
    (spm_folder / "chat_template.jinja").write_text(RICH)
    messages = [*CHAT, {"role": "tool", "content": "skipped"}, {"role": "user", "content": "'<&>'"}, *CHAT]
    assert_same_chat(*both(spm_folder), messages, thinking=True)


def test_no_second_bos(spm_folder: Path) -> None:
    tokenizer = chat_tokenizer(spm_folder, "{{ bos_token }}{{ messages[0].content }}")
    assert tokenizer.encode_chat([{"role": "user", "content": "the"}]).count(1) == 1


def test_where_the_template_is_found(spm_folder: Path) -> None:
    config = spm_folder / "tokenizer_config.json"
    assert not Tokenizer.from_folder(spm_folder).has_chat_template
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "from the list"}]
    for template, expected in (("from the config", "from the config"), (named, "from the list")):
        change(config, chat_template=template)
        tokenizer = Tokenizer.from_folder(spm_folder)
        assert tokenizer.has_chat_template
        assert tokenizer.apply_chat_template(CHAT) == expected
    assert chat_tokenizer(spm_folder, "from the file").apply_chat_template(CHAT) == "from the file"


def test_fields_that_are_none_count_as_absent(spm_folder: Path) -> None:
    tokenizer = chat_tokenizer(spm_folder, "{{ messages[0].name is defined }} {{ messages[0].content }}")
    assert tokenizer.apply_chat_template([{"role": "user", "content": None, "name": None}]) == "False "


def test_no_template_says_what_to_do(spm_folder: Path) -> None:
    with pytest.raises(ChatTemplateError, match=r"no chat template.*chat_template\.jinja"):
        Tokenizer.from_folder(spm_folder).encode_chat(CHAT)


def test_error_messages_are_bounded(spm_folder: Path) -> None:
    tokenizer = chat_tokenizer(spm_folder, "{{ raise_exception('no such role: ' + messages[0].content) }}")
    with pytest.raises(ChatTemplateError, match="no such role: x") as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "x" * 10**6}])
    assert len(str(caught.value)) < MAX_MESSAGE_CHARS + 100


@pytest.mark.parametrize(
    "template",
    [
        "{% if %}",
        "{{ messages[0].content.missing.more }}",
        "{{ 1 // 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{% set ns = namespace(__html__=1) %}",
        "{% set ns = namespace() %}{% set ns.__call__ = 1 %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ ('x' * 10 ** 9) | length }}",
        "{{ (10 ** 9 * [1]) | length }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set ns = namespace(n=99) %}{% for i in range(40) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{{ 2.0 ** 'x' }}",
        "{{ 10 ** 30 ** 30 }}",
        "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_templates_that_fail_or_attack(spm_folder: Path, template: str) -> None:
    with pytest.raises(ChatTemplateError, match="the model's chat template"):
        chat_tokenizer(spm_folder, template).apply_chat_template(CHAT)


def test_runaway_output_is_stopped(spm_folder: Path) -> None:
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    with pytest.raises(ChatTemplateError, match=f"over {MAX_RENDERED_CHARS} characters"):
        chat_tokenizer(spm_folder, template).apply_chat_template([{"role": "user", "content": "x" * 10**4}])


def test_operations_within_bounds_are_python_s(spm_folder: Path) -> None:
    template = "{{ 2 ** 10 }} {{ 3 * 4 }} {{ 'ab' * 2 }} {{ [1] + [2] }} {{ 'a' + 'b' }} {{ 1.5 + 2 }} {{ 4 ** 0.5 }}"
    assert chat_tokenizer(spm_folder, template).apply_chat_template(CHAT) == "1024 12 abab [1, 2] ab 3.5 2.0"


NAMES = ["bos_token", "eos_token", "messages", "add_generation_prompt", "tools", "documents", "chat_template"]


@pytest.mark.parametrize("name", NAMES)
def test_requests_cannot_set_what_the_server_sets(pair: tuple[Tokenizer, Any], name: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"{name} cannot be set"):
        pair[0].apply_chat_template(CHAT, **{name: "x"})


def test_any_other_name_is_just_a_variable(spm_folder: Path) -> None:
    tokenizer = chat_tokenizer(spm_folder, "{{ self is defined }} {{ token_ids }} {{ namespace }}")
    assert tokenizer.apply_chat_template(CHAT, **{"self": 1, "token_ids": 2, "namespace": None}) == "True 2 None"


def test_no_messages(pair: tuple[Tokenizer, Any]) -> None:
    with pytest.raises(ChatTemplateError, match="give at least one"):
        pair[0].apply_chat_template([])
