"""Reading a configuration so that no key goes unread. Knows nothing of what the keys mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_REQUIRED = object()


class UnsupportedModel(ValueError):
    """A checkpoint asks for something this library does not do, or does not say what it must."""


class Keys:
    """A dict that remembers which of its keys were taken, and refuses the others by name.

    defaults: values of absent keys. harmless: keys that may stay untaken. neutral: the same, at this value only.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        where: str,
        defaults: Mapping[str, Any],
        harmless: frozenset[str],
        neutral: Mapping[str, Any],
    ) -> None:
        self._data = data
        self._where = where
        self._defaults = defaults
        self._harmless = harmless
        self._neutral = neutral
        self._taken: set[str] = set()

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value; if it is absent or null, the default given, else the one the keys were made with."""
        self._taken.add(name)
        value = self._data.get(name)
        if value is None:
            value = self._defaults.get(name, _REQUIRED) if default is _REQUIRED else default
        if value is _REQUIRED:
            raise UnsupportedModel(f"{name} is missing in {self._where}")
        return value

    def integer(self, name: str, default: Any = _REQUIRED) -> int:
        value = self.take(name, default)
        if type(value) is not int or value < 1:
            raise UnsupportedModel(f"{name} must be a positive integer, not {value!r:.80}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        value = self.take(name, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise UnsupportedModel(f"{name} must be a positive number, not {value!r:.80}")
        return float(value)

    def boolean(self, name: str, default: Any = _REQUIRED) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise UnsupportedModel(f"{name} must be true or false, not {value!r:.80}")
        return value

    def choice(self, name: str, choices: Sequence[str]) -> str:
        value = self.take(name)
        if value not in choices:
            raise UnsupportedModel(f"{name} {value!r:.80} is not supported, only {', '.join(choices)}")
        return str(value)

    def refuse_the_rest(self) -> None:
        """Raise UnsupportedModel naming every key that nobody took and that may change what is computed."""
        left = {name: value for name, value in self._data.items() if name not in self._taken | self._harmless}
        asks = [f"{name}={value!r:.80}" for name, value in sorted(left.items()) if not self._is_neutral(name, value)]
        if asks:
            raise UnsupportedModel(
                f"{self._where} asks for {', '.join(asks)}, which is not supported; delete a key only if you know "
                "that the model computes the same without it"
            )

    def _is_neutral(self, name: str, value: Any) -> bool:
        return value is None or value in ([], {}) or (name in self._neutral and value == self._neutral[name])
