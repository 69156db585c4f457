"""Fixtures shared by the suite: tiny random models and the one real model."""

import json
import os
from pathlib import Path

import hypothesis
import pytest

from headrace.errors import DownloadError
from headrace.loading.pull import fetch_gguf, pull
from tiny_models import build_tiny

_NO_HEALTH = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("dev", max_examples=50, **_NO_HEALTH)
hypothesis.settings.register_profile("ci", max_examples=200, derandomize=True, **_NO_HEALTH)
hypothesis.settings.register_profile("soak", max_examples=5000, **_NO_HEALTH)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

SOAK = os.environ.get("HEADRACE_SOAK") == "1"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("soak") and not SOAK:
            item.add_marker(pytest.mark.skip(reason="soak run: make soak"))


def _no_weights(error):
    """Tests of the real weights fail without them, unless the developer says to be offline."""
    if os.environ.get("HEADRACE_TEST_OFFLINE") == "1":
        pytest.skip(f"no weights: {error}")
    pytest.fail(f"no weights ({error}); HEADRACE_TEST_OFFLINE=1 skips these tests")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Build a tiny model by name, once a session."""
    built = {}
    folder = tmp_path_factory.mktemp("tiny")

    def get(name):
        if name not in built:
            built[name] = build_tiny(name, folder)
        return built[name]

    return get


@pytest.fixture(scope="session")
def tiny_llama(tiny):
    return tiny("tiny_llama")


@pytest.fixture(scope="session")
def tiny_qwen3(tiny):
    return tiny("tiny_qwen3")


@pytest.fixture(scope="session")
def cache_dir():
    cache = os.environ.get("HEADRACE_CACHE")
    return Path(cache) if cache else None


@pytest.fixture(scope="session")
def smollm2_dir(cache_dir):
    """Folder of the converted SmolLM2: HEADRACE_SMOLLM2, or fetched; else visibly skipped."""
    given = os.environ.get("HEADRACE_SMOLLM2")
    if given:
        return Path(given)
    try:
        return pull("smollm2", cache_dir)
    except DownloadError as error:
        _no_weights(error)


@pytest.fixture(scope="session")
def smollm2_gguf(tmp_path_factory):
    """The GGUF file that SmolLM2 is converted from."""
    try:
        return fetch_gguf(tmp_path_factory.mktemp("gguf"))
    except DownloadError as error:
        _no_weights(error)


@pytest.fixture(scope="session")
def smollm2_fixture():
    path = Path(__file__).parent / "fixtures" / "smollm2_greedy.json"
    return json.loads(path.read_text(encoding="utf-8"))
