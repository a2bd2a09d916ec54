"""What a learner was shown: hints and results, in a file beside their code. Knows nothing of how either is found.

A result is remembered with the text it was a result of: when the code has changed since, it is no longer known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from minisgl.learn.answers import Answers
from minisgl.learn.course import Chapter, Exercise

if TYPE_CHECKING:
    from minisgl.learn.checking import Result


def remember(chapter: Chapter, results: Iterable[Result]) -> None:
    memory, answers = _read(chapter), Answers(chapter.mine)
    for result in results:
        number = result.exercise.number
        memory.setdefault("results", {})[number] = [result.status, _fingerprint(answers, result.exercise)]
    _write(chapter, memory)


def remembered(chapter: Chapter, exercise: Exercise, answers: Answers) -> str | None:
    """The last result, if it is of the code as it is now."""
    status, fingerprint = _read(chapter).get("results", {}).get(exercise.number, (None, ""))
    return status if fingerprint == _fingerprint(answers, exercise) else None


def next_hint(chapter: Chapter, exercise: Exercise) -> int:
    """The index of the hint to show now; after the last it is the last again."""
    memory = _read(chapter)
    shown = memory.setdefault("hints", {})
    index = min(shown.get(exercise.number, 0), len(exercise.hints) - 1)
    shown[exercise.number] = index + 1
    _write(chapter, memory)
    return index


def _fingerprint(answers: Answers, exercise: Exercise) -> str:
    text = "".join(answers.source(place) for place in exercise.places)
    return sha256(text.encode()).hexdigest()[:16]


def _read(chapter: Chapter) -> dict[str, Any]:
    try:
        return json.loads((chapter.folder / ".mine.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}  # nothing yet, or no longer readable: it is only a memory


def _write(chapter: Chapter, memory: dict[str, Any]) -> None:
    (chapter.folder / ".mine.json").write_text(json.dumps(memory, indent=1), encoding="utf-8")
