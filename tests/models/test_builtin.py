"""The built-in model: its cache heals itself, and its weights and tokenizer are the original's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from minisgl.models.builtin import MANIFEST, ModelNotFound, builtin_folder, cache_root, damage, fetch_gguf
from minisgl.models.from_gguf import to_bf16, write_bf16

# From llama.cpp's tokenizer on the same GGUF file.
LLAMA_CPP_IDS = {
    "Hello, world!": [19556, 28, 905, 17],
    "In 2024, 3.14159": [788, 216, 34, 32, 34, 36, 28, 216, 35, 30, 33, 36, 33, 37, 41],
    "你好，世界！": [18645, 250, 48392, 138, 12831, 7906, 240, 178, 239, 230, 8083, 219],
    "I love pizza 🍕 and 👩‍🚀!": [
        57,
        2606,
        18501,
        15107,
        231,
        239,
        284,
        15107,
        235,
        119,
        321,
        231,
        10813,
        244,
        218,
        17,
    ],
    "def f(x):\n    return x ** 2 + 10\n": [
        1604,
        275,
        24,
        104,
        727,
        472,
        1003,
        1792,
        1903,
        216,
        34,
        1232,
        216,
        33,
        32,
        198,
    ],
    "  leading and   inner spaces\t\ttabs\n\n\nlines": [
        216,
        2899,
        284,
        256,
        6210,
        5600,
        197,
        197,
        100,
        7366,
        1116,
        198,
        5110,
    ],
    "naïve café Ünïcödé": [3546, 46494, 37366, 5549, 246, 94, 25972, 83, 7466, 84, 2756],
    "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
    "x1y22z333 v1.2.3-rc4": [104, 33, 105, 34, 34, 106, 35, 35, 35, 386, 33, 30, 34, 30, 35, 29, 6506, 36],
}


class TinyBuild:
    """A stand-in for the real build that counts how often it ran."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, folder: Path) -> None:
        self.runs += 1
        (folder / "config.json").write_text('{"tiny": true}')
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * (17 << 12))  # past the limit of small files


def test_a_whole_folder_is_built_once(tmp_path: Path) -> None:
    build = TinyBuild()
    folder = builtin_folder(tmp_path, build)
    assert builtin_folder(tmp_path, build) == folder
    assert build.runs == 1
    assert set(json.loads((folder / MANIFEST).read_text())["files"]) == {"config.json", "model.safetensors"}


def flip_a_byte(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(12345)
        file.write(b"!")


DAMAGES = {
    "weights changed": flip_a_byte,
    "weights cut short": lambda folder: os.truncate(folder / "model.safetensors", 1000),
    "weights missing": lambda folder: (folder / "model.safetensors").unlink(),
    "config changed": lambda folder: (folder / "config.json").write_text('{"tiny": trxe}'),
    "manifest missing": lambda folder: (folder / MANIFEST).unlink(),
    "manifest cut short": lambda folder: os.truncate(folder / MANIFEST, 20),
    "manifest empty": lambda folder: (folder / MANIFEST).write_text("[]"),
    "manifest of nothing": lambda folder: (folder / MANIFEST).write_text('{"files": {}}'),
}


@pytest.mark.parametrize("harm", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_folder_is_built_again(tmp_path: Path, harm, capfd: pytest.CaptureFixture[str]) -> None:
    build = TinyBuild()
    folder = builtin_folder(tmp_path, build)
    harm(folder)
    assert damage(folder) is not None
    builtin_folder(tmp_path, build)
    assert build.runs == 2
    assert damage(folder) is None
    assert "again" in capfd.readouterr().err


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise ModelNotFound("no network")

    with pytest.raises(ModelNotFound, match="no network"):
        builtin_folder(tmp_path, fails)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_killed_build_is_swept_away(tmp_path: Path) -> None:
    folder = builtin_folder(tmp_path, TinyBuild())
    half = tmp_path / f"{folder.name}.part-killed"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    (folder / MANIFEST).unlink()
    builtin_folder(tmp_path, TinyBuild())
    assert not half.exists()


def test_a_cache_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelNotFound, match="XDG_CACHE_HOME") as caught:
        builtin_folder(tmp_path / "file", TinyBuild())
    assert "\n" not in str(caught.value)


TWO_AT_ONCE = """
import os, sys, time
from pathlib import Path
from minisgl.models.builtin import builtin_folder, damage

cache = Path(sys.argv[1])

def slow(folder):
    (folder / "config.json").write_text("{}")
    while len(list(cache.glob("started-*"))) < 2:
        time.sleep(0.01)
    time.sleep(0.5)
    (cache / "builds").open("a").write("x")

(cache / f"started-{os.getpid()}").touch()
folder = builtin_folder(cache, slow)
assert damage(folder) is None
"""


def test_of_two_processes_one_builds_and_one_waits(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TWO_AT_ONCE, str(tmp_path)]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert (tmp_path / "builds").read_text() == "x"
    assert "".join(errors).count("waiting") == 1


def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "minisgl"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/are/ignored")
    assert cache_root() == Path.home() / ".cache" / "minisgl"


def test_finding_the_model_imports_nothing_heavy(model_folder: Path) -> None:
    code = """
import sys, minisgl
from minisgl.models.resolve import resolve_model
resolve_model("smollm2-135m")
print(sorted({"torch", "transformers", "numpy", "gguf", "tokenizers", "huggingface_hub"} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_bf16_rounds_as_torch_does(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(7, 33)).astype(np.float32)
    x[0, :4] = [1.00390625, 1.01171875, 0.0, -0.0]  # two exact ties, to the even neighbour below and above
    write_bf16(tmp_path / "x.safetensors", [("a", to_bf16(x)), ("b", to_bf16(x[:2]))])
    from safetensors.torch import load_file

    read = load_file(tmp_path / "x.safetensors")
    assert torch.equal(read["a"].view(torch.int16), torch.from_numpy(x).bfloat16().view(torch.int16))
    assert torch.equal(read["b"], torch.from_numpy(x[:2]).bfloat16())


@pytest.mark.parametrize("text", LLAMA_CPP_IDS, ids=range(len(LLAMA_CPP_IDS)))
def test_tokens_are_those_of_llama_cpp(model_folder: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert ids == LLAMA_CPP_IDS[text]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_transformers_reads_the_same_tokenizer(model_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    for text, ids in LLAMA_CPP_IDS.items():
        assert tokenizer(text)["input_ids"] == ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert set(tokenizer("x")) == {"input_ids", "attention_mask"}


def test_the_chat_template_in_the_folder_is_the_one_transformers_applies(model_folder: Path) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from transformers import AutoTokenizer

    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "好"},
    ]
    template = json.loads((model_folder / "tokenizer_config.json").read_text())["chat_template"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    ours = environment.from_string(template).render(messages=messages, add_generation_prompt=True)
    theirs = AutoTokenizer.from_pretrained(model_folder).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert ours == theirs
    assert ours.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert ours.endswith("<|im_start|>user\n好<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_the_weights_equal_transformers_own_conversion(model_folder: Path, tmp_path: Path) -> None:
    """Fetches the GGUF file again and compares every bit of every tensor."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, GgufConfig

    gguf = fetch_gguf(tmp_path)
    ours = load_file(model_folder / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    ).state_dict()
    assert set(theirs) - set(ours) == {"lm_head.weight"}  # tied to the embedding
    for name, tensor in ours.items():
        assert torch.equal(tensor.view(torch.int16), theirs[name].view(torch.int16)), name
