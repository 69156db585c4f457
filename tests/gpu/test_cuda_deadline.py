"""Steps on a GPU that are late: they fail in time, nothing runs after them, and close returns.

A GPU with such a step serves no further engine of its process, so every case is one of its own.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CLOSE_S = 6.0  # the sleep goes on for longer
HOST_BYTES = (0, 32 << 20)


def run(tiny, how, host_bytes):
    """What `late_step` found."""
    path = Path(__file__).parent / "late_step.py"
    model = tiny("tiny_qwen3").path
    command = [sys.executable, str(path), str(model), how, str(host_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["still_runs"], "the step has ended: nothing was late"
    assert found["close_s"] < CLOSE_S
    return found


def check_refusals(found):
    for name in ("late", "after"):
        assert found[name].startswith("StepTimeout: a step has not ended within step_timeout_s=2.1")
    assert found["refused_s"] < 1.0
    assert "start over in a new process" in found["again"]


@pytest.mark.parametrize("host_bytes", HOST_BYTES)
@pytest.mark.parametrize("how", ["llm-greedy", "llm-sampled"])
def test_late_steps_of_an_llm(tiny, how, host_bytes):
    found = run(tiny, how, host_bytes)
    assert found["right"] == [found["slow"]] * 3, "a slow step is none that is late"
    check_refusals(found)


def test_late_steps_of_the_batch_api(tiny):
    found = run(tiny, "batch", 0)
    assert len(found["slow"]) == 1
    assert found["reason"] == "error"
    check_refusals(found)


def test_an_engine_whose_first_step_is_late_is_refused(tiny):
    found = run(tiny, "making", 0)
    assert found["late"].startswith("StepTimeout: a step has not ended within step_timeout_s=2.1")
    assert "start over in a new process" in found["again"]


@pytest.mark.parametrize("host_bytes", HOST_BYTES)
@pytest.mark.parametrize("how", ["closing-greedy", "closing-sampled"])
def test_close_does_not_wait_for_a_step(tiny, how, host_bytes):
    found = run(tiny, how, host_bytes)
    assert not found["alive"]
