"""The exercise of chapters/stage7_overlap/kernels.md: its answer is right, what is left to write is not."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from pages import ROOT, blocks

VERSION = tuple(map(int, numpy.__version__.split(".")[:2]))
if importlib.util.find_spec("triton") is None or VERSION >= (2, 4):
    pytest.skip("needs the package triton, whose interpreter needs NumPy below 2.4", allow_module_level=True)


def test_the_answer_is_right_and_the_stub_is_not(tmp_path: Path) -> None:
    stub, answer = (b.text for b in blocks(ROOT / "chapters/stage7_overlap/kernels.md") if b.language == "python")
    start, end = stub.index("@triton.jit"), stub.index("torch.manual_seed")
    for text, right in ((stub, 0), (stub[:start] + answer + "\n\n" + stub[end:], 6)):
        script = tmp_path / "add_norm.py"
        script.write_text(text, encoding="utf-8")
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
        done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) == 6
        assert sum(line.endswith(" right") for line in lines) == right, done.stdout
