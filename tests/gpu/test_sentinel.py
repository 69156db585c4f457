"""Runs everywhere: the other tests of this folder are skipped where there is no GPU."""

from conftest import REQUIRED, missing


def test_kernels_were_tested_or_the_reason_is_printed(record_property, capsys):
    reason = missing()
    record_property("gpu", reason or "tested")
    with capsys.disabled():
        print(f"\nkernel tests: {'run' if reason is None else f'SKIPPED ({reason})'}")
    assert reason is None or not REQUIRED, f"HEADRACE_REQUIRE_GPU=1, but there is {reason}"
