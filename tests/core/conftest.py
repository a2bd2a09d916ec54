"""A tokenizer of the other kind: SentencePiece as Llama 2 has it, with byte tokens and a BOS."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors


def byte_fallback_tokenizer() -> Tokenizer:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz.,!'",
    ]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "he"), ("▁", "▁"), ("e", "r"), ("▁the", "r"), ("c", "a")]
    pieces += ["世", *(left + right for left, right in merges)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer


@pytest.fixture(scope="session")
def spm_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("spm") / "tokenizer.json"
    byte_fallback_tokenizer().save(str(file))
    return file


@pytest.fixture
def spm_folder(tmp_path: Path) -> Path:
    """A folder that tests may write to."""
    byte_fallback_tokenizer().save(str(tmp_path / "tokenizer.json"))
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path
