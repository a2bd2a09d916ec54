"""What every test may ask for. Knows nothing of any one part."""

import signal
from pathlib import Path

import hypothesis
import pytest
import torch

from minisgl.learn.pytest_plugin import learners_code, pytest_addoption, pytest_collection_modifyitems  # noqa: F401
from minisgl.models.builtin import builtin_folder

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background is told to ignore it
torch.set_num_threads(1)  # tests run beside other processes; two threads each crawl on two cores
# A busy machine is no failure; and a learner should see one, not a group of them.
hypothesis.settings.register_profile("minisgl", deadline=None, report_multiple_bugs=False)
hypothesis.settings.load_profile("minisgl")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture asks for what is not there."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A tolerance that holds for one draw of weights shall hold in every run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The built-in model's Hugging Face folder, fetched on the first run."""
    return builtin_folder()
