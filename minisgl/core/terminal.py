"""Standard output of an encoding that lacks some characters, such as ASCII. Knows no command."""

from __future__ import annotations

import io
import json
import sys
from typing import Any


def show_any_text() -> None:
    """A character that standard output cannot show comes out as its escape, as on standard error, where Python's
    default would end the command. Call this first in a command; escapes and not `?`, which would all look alike."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook's is none, and shows all
        sys.stdout.reconfigure(errors="backslashreplace")


def json_line(value: Any) -> str:
    """For standard output: characters as they are where it has them, else as JSON's own escapes."""
    encoding = sys.stdout.encoding or "utf-8"
    return json.dumps(value, ensure_ascii=not encoding.lower().startswith("utf"))
