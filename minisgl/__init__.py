"""The package's front door: names LLM and SamplingParams. Knows nothing of models or devices, and imports neither.

Both names are looked up on first use, so that `import minisgl` (and with it the start of every child process) costs
nothing, and so that running an early stage never loads a later one.
"""

import importlib
import os
from typing import Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if "MINISGL_MINE" in os.environ:  # a learner's methods go in the place of the package's, in every process
    from minisgl.learn.install import follow

    follow()

_LAZY = {"LLM": "minisgl.stage7.llm", "SamplingParams": "minisgl.core.sampling_params"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'minisgl' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
