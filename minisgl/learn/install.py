"""A learner's methods in the place of the package's, in every process. Knows nothing of exercises but their numbers.

An environment variable says which methods, so that child processes have them too: the import of `minisgl` reads it
(`follow`). A method is put on its class as soon as the class exists, and looks for the learner's code when it is first
called: by then every module is whole, and nothing was imported that the process would not have imported anyway.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import sys
import threading
from array import array
from collections.abc import Callable, MutableSequence, Sequence
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

VARIABLE = "MINISGL_MINE"
PREFIX = "My"  # of the learner's subclasses


class Method(NamedTuple):
    exercise: str  # its number; "" for a helper that the learner added, whose calls are not counted
    place: str  # "module:Class.method"
    file: str  # where the learner's is, an absolute path

    @property
    def module(self) -> str:
        return self.place.split(":")[0]


def follow() -> None:
    """Install what the environment asks for. Called by the import of `minisgl`, when it asks for anything."""
    order = json.loads(os.environ[VARIABLE])
    install([Method(*fields) for fields in order["methods"]], order["calls"])


def install(methods: Sequence[Method], calls: str | None = None) -> Installer:
    """In this process, also into modules that are imported later. calls: the folder for the counts of calls."""
    installer = Installer(methods, calls)
    sys.meta_path.insert(0, installer)
    for name in {method.module for method in methods} & set(sys.modules):
        installer.install_into(sys.modules[name])
    return installer


def publish(methods: Sequence[Method], calls: str) -> Installer:
    """In this process and in those it will start."""
    os.environ[VARIABLE] = json.dumps({"methods": methods, "calls": calls})
    return install(methods, calls)


class Installer(MetaPathFinder):
    """Sees modules as they are imported, and puts the learner's methods on their classes."""

    counts: MutableSequence[int] | memoryview

    def __init__(self, methods: Sequence[Method], calls: str | None) -> None:
        self.methods = methods
        self.numbers = sorted({method.exercise for method in methods if method.exercise})
        self.counts = _counters(calls, len(self.numbers))
        self._replaced: list[tuple[type, str, Any]] = []
        self._files: dict[str, ModuleType] = {}
        self._lock = threading.RLock()

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if all(fullname != method.module for method in self.methods):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path, self)
        return spec

    def install_into(self, module: ModuleType) -> None:
        for method in self.methods:
            if method.module == module.__name__:
                class_name, name = method.place.split(":")[1].split(".")
                owner = getattr(module, class_name)
                old = vars(owner).get(name)
                new = self._stand_in(method, class_name, name)
                setattr(owner, name, staticmethod(new) if isinstance(old, staticmethod) else new)
                self._replaced.append((owner, name, old))

    def remove(self) -> None:
        """The package's own methods again, in this process."""
        sys.meta_path.remove(self)
        for owner, name, old in reversed(self._replaced):
            delattr(owner, name) if old is None else setattr(owner, name, old)
        self._replaced.clear()

    def calls(self) -> dict[str, int]:
        """Of this process, by exercise."""
        return dict(zip(self.numbers, self.counts, strict=True))

    def _stand_in(self, method: Method, class_name: str, name: str) -> Callable:
        """Counts the call and hands it on."""
        index = self.numbers.index(method.exercise) if method.exercise else None
        function: Callable | None = None

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal function
            if function is None:
                function = self._load(method.file, class_name, name)
            if index is not None:
                self.counts[index] += 1
            return function(*args, **kwargs)

        call.__name__ = name
        return call

    def _load(self, file: str, class_name: str, name: str) -> Callable:
        with self._lock:  # two threads may be the first to call
            if file not in self._files:
                unique = f"minisgl_mine_{sha256(file.encode()).hexdigest()[:8]}"
                spec = importlib.util.spec_from_file_location(unique, file)
                assert spec is not None
                assert spec.loader is not None
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                self._files[file] = module
            found = vars(getattr(self._files[file], PREFIX + class_name))[name]
            return found.__func__ if isinstance(found, staticmethod) else found


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, installer: Installer) -> None:
        super().__init__(fullname, path)
        self._installer = installer

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self._installer.install_into(module)


def _counters(folder: str | None, count: int) -> MutableSequence[int] | memoryview:
    """In a file that is memory: what was counted is there however the process ends."""
    if folder is None or not count:
        return array("Q", [0] * count)
    with (Path(folder) / f"{os.getpid()}.calls").open("w+b") as file:
        file.truncate(8 * count)
        return memoryview(mmap.mmap(file.fileno(), 8 * count)).cast("Q")


def read_calls(folder: Path, numbers: Sequence[str]) -> dict[str, int]:
    """Of all processes. numbers: as `Installer.numbers`."""
    totals = dict.fromkeys(numbers, 0)
    for file in folder.glob("*.calls"):
        for number, count in zip(numbers, array("Q", file.read_bytes()), strict=True):
            totals[number] += count
    return totals
