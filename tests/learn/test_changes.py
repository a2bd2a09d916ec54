"""`minisgl changed`: from its lines the new loop can be made of the old one; colour is for terminals only."""

from __future__ import annotations

import sys

import pytest

from minisgl.learn.changes import PACKAGE, changed, definitions, main

STAGES = range(2, 9)


@pytest.mark.parametrize("number", STAGES)
def test_the_difference_makes_the_new_of_the_old(number: int) -> None:
    before, now = (definitions(PACKAGE / f"stage{n}" / "llm.py") for n in (number - 1, number))
    told: dict[str, list[str]] = {}
    name = ""
    for line in changed(str(number)):
        if line.startswith("@@ "):
            name = line.removeprefix("@@ ")
        elif name and line:
            told.setdefault(name, []).append(line)
    for name, lines in told.items():
        assert [line[1:] for line in lines if line[0] in " -"] == before.get(name, [])
        assert [line[1:] for line in lines if line[0] in " +"] == now.get(name, [])
    assert {name: before[name] for name in before if name not in told} == {
        name: now[name] for name in now if name not in told
    }
    assert any("_run" in name or "loop" in name or "serve" in name for name in told), "the loop itself has changed"


def test_it_says_what_is_new_and_what_is_gone() -> None:
    lines = list(changed("2"))
    assert lines[0].startswith("Stage 2: The loop with a cache: prefill the prompt once")
    assert any(line.startswith("  contiguous_cache.py  The KV cache of one sequence") for line in lines)
    assert "-        self.attention = RecomputeAttention()" in lines
    assert "+        self.attention = ContiguousAttention()" in lines
    assert not any("import" in line for line in lines)


@pytest.mark.parametrize("terminal", [False, True])
def test_colour_is_for_terminals(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert main("3") == 0
    assert ("\033[32m+" in capsys.readouterr().out) == terminal


@pytest.mark.parametrize("number", ["1", "9", "x", ""])
def test_what_has_no_stage_before_it_is_refused(number: str) -> None:
    with pytest.raises(ValueError, match="takes a stage that has one before it, 2 to 8, not"):
        changed(number)
