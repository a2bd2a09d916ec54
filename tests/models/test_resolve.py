"""What a `--model` value may be, and what the user reads when it is none of that."""

from pathlib import Path

import pytest

from minisgl.models.resolve import ModelNotFound, resolve_model


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_the_built_in_name(model_folder: Path) -> None:
    assert resolve_model("smollm2-135m") == model_folder


def test_a_local_folder_even_if_it_looks_like_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name", download=pytest.fail) == folder
    assert resolve_model(str(folder), download=pytest.fail) == folder


def test_a_hub_id_is_downloaded(tmp_path: Path) -> None:
    asked = []

    def download(name: str) -> str:
        asked.append(name)
        return str(made(tmp_path))

    assert resolve_model("Qwen/Qwen2.5-0.5B", download) == tmp_path
    assert asked == ["Qwen/Qwen2.5-0.5B"]


def test_a_hub_failure_is_one_line_with_its_cause(tmp_path: Path) -> None:
    def download(name: str) -> str:
        raise OSError("401 Client Error\n\nRepository is gated")

    with pytest.raises(ModelNotFound, match=r"'org/name'.*Repository is gated.*hf auth login") as caught:
        resolve_model("org/name", download)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "smollm", "./nowhere", "/no/such/folder", "a/b/c", "../nowhere", "org/"])
def test_anything_else_names_what_is_allowed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=r"smollm2-135m, a folder with a config.json, or a hub id") as caught:
        resolve_model(name, download=pytest.fail)
    assert repr(name) in str(caught.value)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
