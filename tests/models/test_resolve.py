"""What a `--model` value may be, and what the user reads when it is none of that."""

import sys
from pathlib import Path
from types import ModuleType

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

    assert resolve_model("Qwen/Qwen2.5-0.5B", download=download) == tmp_path
    assert asked == ["Qwen/Qwen2.5-0.5B"]


def test_a_hub_failure_is_one_line_with_its_cause(tmp_path: Path) -> None:
    def download(name: str) -> str:
        raise OSError("401 Client Error\n\nRepository is gated")

    with pytest.raises(ModelNotFound, match=r"'org/name'.*Repository is gated.*hf auth login") as caught:
        resolve_model("org/name", download=download)
    assert "\n" not in str(caught.value)


@pytest.fixture
def modelscope(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package of that name, in the place of the one that may or may not be installed."""
    module = ModuleType("modelscope")
    monkeypatch.setitem(sys.modules, "modelscope", module)
    return module


def test_modelscope_fetches_the_same_files(tmp_path: Path, modelscope: ModuleType) -> None:
    asked = {}

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        return str(made(tmp_path))

    modelscope.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    assert resolve_model("Qwen/Qwen2.5-0.5B", "modelscope") == tmp_path
    [patterns] = asked.values()
    assert "*.safetensors" in patterns
    assert not any("bin" in pattern or "py" in pattern for pattern in patterns), "no pickles, no code"


def test_modelscopes_own_errors_are_one_line_too(modelscope: ModuleType) -> None:
    class NotExistError(Exception):
        pass

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        raise NotExistError("no such\nmodel")

    modelscope.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    with pytest.raises(
        ModelNotFound, match="modelscope fails .NotExistError: no such model.: check the name"
    ) as caught:
        resolve_model("org/name", "modelscope")
    assert "hf auth" not in str(caught.value)


def test_modelscope_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ModelNotFound, match=r"org/name.*pip install modelscope.*local folder"):
        resolve_model("org/name", "modelscope")


def test_no_network_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"'org/name'.*hf fails.*check the name, the network") as caught:
        resolve_model("org/name")
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
