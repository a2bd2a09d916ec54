"""What stands on a page of Markdown: headings, links, blocks of code, commands. Knows nothing of what is right."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("chapters/*.md"), *ROOT.glob("chapters/*/*.md"), *ROOT.glob("solutions/*.md")]
)
RUN = "<!-- run -->"  # above a block of Python: a worked example, which a test runs
_FENCE = re.compile(rf"^(?P<run>{RUN}\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    text: str
    runs: bool


def blocks(page: Path) -> list[Block]:
    found = _FENCE.finditer(page.read_text("utf-8"))
    return [Block(match["language"], match["text"], match["run"] is not None) for match in found]


def prose(page: Path) -> str:
    """All but the blocks of code."""
    return _FENCE.sub("", page.read_text("utf-8"))


def anchors(page: Path) -> set[str]:
    """GitHub makes a heading's anchor of its words: small letters, hyphens for spaces, nothing else; the second of the
    same words gets a -1."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.append(f"{anchor}-{again}" if (again := found.count(anchor)) else anchor)
    return set(found)


def links(page: Path) -> list[tuple[str, str]]:
    """(text, target) of those that stay in the repository."""
    found = re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", prose(page))
    return [(text, target) for text, target in found if not re.match(r"[a-z]+:", target)]


def commands(page: Path) -> Iterator[tuple[list[str], bool]]:
    """Words of each, and whether it is whole: in the text it may be a mention, in a block a variable may hold more."""
    for block in blocks(page):
        if block.language in ("bash", "sh", "console"):
            lines = block.text.replace("\\\n", " ").splitlines()
            if block.language == "console":
                lines = [line[2:] for line in lines if line.startswith("$ ")]
            for line in lines:
                for words in _simple(line):
                    known = [word for word in words if "${" not in word]
                    yield known, known == words
    for code in re.findall(r"`([^`]+)`", prose(page)):
        mentions = _simple(" ".join(code.replace("…", "").split()))
        yield from ((words, False) for words in mentions if _is_ours(words))


def _simple(line: str) -> Iterator[list[str]]:
    """A line of shell as its simple commands, without what stands before their names."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError:  # a lone quotation mark: no command
        return
    words: list[str] = []
    for token in [*tokens, "|"]:
        if token in ("|", "&&", ";", "&", "||"):
            if words:
                yield words
            words = []
        elif words or not re.fullmatch(r"[A-Za-z_]+=[^$(]*|time|nice|do", token):
            words.append("export" if not words and re.search(r"=\$?\(", token) else token)  # NAME=$(…), NAME+=(…)


def _is_ours(words: list[str]) -> bool:
    return bool(words) and (
        (words[0] == "minisgl" and len(words) > 1)
        or (words[0].endswith(("python", "python3")) and any(word.startswith("minisgl") for word in words[2:3]))
        or "dev/setup.py" in words[1:2]
    )
