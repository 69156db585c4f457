"""Tests of this folder need a GPU: without one they are skipped, unless it is asked for.

`HEADRACE_REQUIRE_GPU=1` turns the skips to failures, so that a run on a GPU machine that finds no
GPU cannot look green.
"""

import os

import pytest
import torch

REQUIRED = os.environ.get("HEADRACE_REQUIRE_GPU") == "1"


def missing():
    """Why the tests of this folder cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        import cupy  # noqa: F401
    except ImportError:
        return "no CuPy"
    return None


def pytest_collection_modifyitems(items):
    reason = missing()
    if reason is None:
        return
    for item in items:
        if "tests/gpu/" in item.path.as_posix() and item.path.name != "test_sentinel.py":
            item.add_marker(_mark(reason))


def _mark(reason):
    return pytest.mark.usefixtures("required_gpu") if REQUIRED else pytest.mark.skip(reason=reason)


@pytest.fixture(scope="session")
def required_gpu():
    pytest.fail(f"HEADRACE_REQUIRE_GPU=1, but there is {missing()}")
