"""The `llm` command line as its users have it: one entry in its list of models, and nothing changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from server_process import ServerProcess

QUESTION = "Name three planets."


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--no-stream"], []], ids=["whole", "streamed"])
def test_a_chat(server: ServerProcess, client: openai.OpenAI, tmp_path: Path, flags: list[str]) -> None:
    pytest.importorskip("llm")
    model = {"model_id": "mine", "model_name": client.models.list().data[0].id, "api_base": f"{server.url}/v1"}
    entry = "\n  ".join(f"{key}: {value}" for key, value in model.items())
    (tmp_path / "extra-openai-models.yaml").write_text(f"- {entry}\n")
    command = [sys.executable, "-m", "llm", "prompt", "-m", "mine", *flags, "--no-log", QUESTION]
    settings = ["-o", "temperature", "0", "-o", "max_tokens", "12"]
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    ran = subprocess.run([*command, *settings], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    asked = [{"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(model=model["model_name"], messages=asked, temperature=0, max_tokens=12)
    assert ran.stdout.strip() == (answer.choices[0].message.content or "").strip()
