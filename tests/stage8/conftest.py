"""What the server's tests share."""

from pathlib import Path

import pytest
from tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of a few kilobytes, with 9 heads and 3 KV heads: they do not divide by 2."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))
