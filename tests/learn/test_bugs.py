"""`minisgl bug`: each bug shows its symptom, in the answers or in the trace, and a run without it does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from minisgl import viz
from minisgl.core.trace import Event, read_events
from minisgl.learn import bugs
from minisgl.learn.course import Course
from minisgl.viz.__main__ import FIGURES

COURSE = Course()
BUGS = bugs.bugs(COURSE)


class Run(NamedTuple):
    outcome: bugs.Outcome
    events: Sequence[Event]

    @property
    def texts(self) -> list[str]:
        return [completion.text for completion in self.outcome.completions]

    @property
    def tokens(self) -> list[int]:
        """Of the steps of request 0, which stages 1 and 2 run alone."""
        return viz.step_tokens(self.events, 0)


def same_count_in_every_step(run: Run) -> bool:
    return len(run.tokens) > 2 and len(set(run.tokens)) == 1


def computes_all_again(run: Run) -> bool:
    return len(run.tokens) > 2 and all(b == a + 1 for a, b in zip(run.tokens, run.tokens[1:], strict=False))


def repeats_itself(run: Run) -> bool:
    (completion,) = run.outcome.completions
    return len(set(completion.token_ids)) < len(completion.token_ids) / 2


def loses_pages(run: Run) -> bool:
    last = viz.page_snapshots(run.events)[-1]
    return run.outcome.stats["pages_free"] < run.outcome.stats["pages_total"] and bool(last.cached)


def shares_pages(run: Run) -> bool:
    return max(snapshot.num_shared for snapshot in viz.page_snapshots(run.events)) > 0


def forgets_the_system_prompt(run: Run) -> bool:
    return run.outcome.completions[4].cached_tokens < 16


def keeps_locks(run: Run) -> bool:
    counters = [event.args for event in run.events if event.phase == "C" and event.name == "pages"]
    return counters[-1]["protected"] > 0


def exceeds_the_budget(run: Run) -> bool:
    return max(step.tokens for step in viz.steps(run.events)) > 16


def waits_until_all_are_gone(run: Run) -> bool:
    starts = {span.uid: span.start for span in viz.request_spans(run.events) if span.state == "prefill"}
    ends = {span.uid: span.end for span in viz.request_spans(run.events)}
    return starts[2] >= ends[0]


def depends_on_its_company(run: Run) -> bool:
    """Requests 0 and 1 are the same prompt, alone and beside another."""
    return run.texts[0] != run.texts[1]


def knows_no_capital(run: Run) -> bool:
    return not run.texts[0].startswith(" Paris")


def retracts(run: Run) -> bool:
    return run.outcome.stats["retractions"] > 0


def stammers(run: Run) -> bool:
    (completion,) = run.outcome.completions
    ids = completion.token_ids
    return any(a == b == c for a, b, c in zip(ids, ids[1:], ids[2:], strict=False))


def is_stopped_by_the_cache(run: Run) -> bool:
    return "is freed while 1 launched batches still use its pages" in run.outcome.error


def wakes_up_in_every_step(run: Run) -> bool:
    return run.outcome.stats["scheduler_wakeups"] > len(viz.steps(run.events))


def sends_nothing_before_the_end(run: Run) -> bool:
    """Of the first answer to end: when the clients' requests come in two steps, another ends in a later one."""
    first = min(event.ts for event in run.events if event.name == "Step")
    forwards = [event for event in run.events if event.name == "forward"]
    computed = sum(event.ts + (event.duration or 0) <= first for event in forwards)
    return computed >= BUGS["16"].params["max_tokens"]


SYMPTOMS: dict[str, tuple[Callable[[Run], bool], bool]] = {  # and whether the answers stay right
    "1": (same_count_in_every_step, False),
    "2": (computes_all_again, True),
    "3": (repeats_itself, False),
    "4": (loses_pages, True),
    "5": (shares_pages, False),
    "6": (forgets_the_system_prompt, True),
    "7": (keeps_locks, True),
    "8": (exceeds_the_budget, True),
    "9": (waits_until_all_are_gone, True),
    "10": (depends_on_its_company, False),
    "11": (knows_no_capital, False),
    "12": (retracts, True),
    "13": (stammers, False),
    "14": (is_stopped_by_the_cache, False),
    "15": (wakes_up_in_every_step, True),
    "16": (sends_nothing_before_the_end, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("number", BUGS)
def test_a_bug_shows_and_its_absence_does_not(
    number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    outcomes: list[bugs.Outcome] = []
    run = bugs.run
    monkeypatch.setattr(bugs, "run", lambda *args: outcomes.append(run(*args)) or outcomes[-1])
    assert bugs.main(number) == 0
    told = capsys.readouterr().out
    names = [f"trace-bug{number}-expected.json", f"trace-bug{number}.json"]
    expected, came = (Run(o, read_events(Path(name))) for o, name in zip(outcomes, names, strict=True))
    shows, right = SYMPTOMS[number]
    assert not expected.outcome.error
    assert shows(came), "the bug does not show"
    assert not shows(expected), "what is said to be the bug shows without it too"
    assert (came.texts == expected.texts) == right
    assert all(f"{name} --figure {figure}" in told for name in names for figure in BUGS[number].figures)
    assert BUGS[number].file.removesuffix(".py") not in told, "that would give it away"


def test_each_bug_has_a_file_figures_and_a_place_in_the_key() -> None:
    assert list(BUGS) == list(SYMPTOMS)
    assert {bug.stage for bug in BUGS.values()} == set(range(1, 9))
    key = (COURSE.root / "solutions" / "bug_hunts.md").read_text("utf-8")
    sections = dict(re.findall(r"^## Bug (\d+)\n(.*?)(?=^## |\Z)", key, re.MULTILINE | re.DOTALL))
    assert list(sections) == list(BUGS)
    for number, bug in BUGS.items():
        assert set(bug.figures) <= set(FIGURES)
        (method,) = bugs.changed_methods(bugs.folder(COURSE) / bug.file)
        assert f"`{method.place.split(':')[1]}`" in sections[number], "the key names the method"
        assert bug.file.removesuffix(".py") in sections[number]


def test_they_are_listed_and_others_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bugs.main(None) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BUGS)
    with pytest.raises(ValueError, match="there is no bug '99': there are 1, 2, 3"):
        bugs.main("99")


def test_what_differs_is_told() -> None:
    right = bugs.Outcome(stats={"pages_free": 4})
    assert list(bugs.differences(right, right)) == ["pages free   as expected: 4"]
    told = "\n".join(bugs.differences(right, bugs.Outcome(error="RuntimeError: twice")))
    assert told == "the run      ended with RuntimeError: twice"
