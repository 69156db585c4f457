"""`EventWaiter` over a driver made for this test: a library in C that knows three events.

The core opens `libcuda.so.1` by name, so every case is a process of its own that finds this one.
"""

import os
import shutil
import subprocess
import sys

import pytest

DRIVER = r"""
#include <stdint.h>
#include <string.h>

static int done(void) { return 0; }
static int device_get(int *device, int index) { *device = index; return index < 2 ? 0 : 101; }
static int retain(uintptr_t *context, int device) { *context = device + 1; return 0; }
static int pop(uintptr_t *context) { *context = 1; return 0; }
static int text(int status, const char **out) { (void)status; *out = "made up"; return 0; }
/* 7 is over, 8 never, 9 is a fault. */
static int query(uintptr_t event) { return event == 7 ? 0 : event == 8 ? 600 : 700; }

static const struct { const char *name; void *call; } CALLS[] = {
    {"cuDeviceGet", device_get},  {"cuDevicePrimaryCtxRetain", retain},
    {"cuCtxPopCurrent", pop},     {"cuGetErrorString", text},
    {"cuEventQuery", query},
};

int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *found) {
    (void)version, (void)flags;
    *out = done;
    *found = 0;
    for (unsigned i = 0; i < sizeof CALLS / sizeof *CALLS; i++)
        if (!strcmp(name, CALLS[i].name)) *out = CALLS[i].call;
    return 0;
}
"""

START = """
import atexit, math, os, signal, threading, time
began = time.monotonic()
def late():
    try:
        waiter.wait(8, 60.0)
    except EngineClosed as error:
        print(error, time.monotonic() - began < 30)
if EXIT:
    atexit.register(late)  # runs after what is registered from here on
from headrace._core import EventWaiter
from headrace.errors import ConfigError, DeviceError, EngineClosed, ForkedProcess
waiter = EventWaiter(0)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(DRIVER, encoding="utf-8")
    build = [compiler, "-shared", "-fPIC", "-w", str(source), "-o", str(library)]
    subprocess.run(build, check=True)

    def run(code, *, at_exit=False):
        """Output of code in a process of its own that has the driver."""
        done = subprocess.run(
            [sys.executable, "-c", f"EXIT = {at_exit}\n{START}{code}"],
            env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_timeouts(run):
    """Over is over whatever the limit; none at all or a negative one is one look."""
    code = """
for timeout in (math.inf, 1e300, 60, 0.1, 0.0, -0.0, -1.0, -math.inf):
    print(waiter.wait(7, timeout))
for timeout in (0.1, 0, -0.0, -1.0, -math.inf):
    print(waiter.wait(8, timeout))
    assert time.monotonic() - began < 30
for event in (7, 8):
    try:
        waiter.wait(event, math.nan)
    except ConfigError as error:
        print(error)
"""
    nan = "timeout = NaN: a number of seconds"
    assert run(code) == ["True"] * 8 + ["False"] * 5 + [nan] * 2


def test_a_wait_takes_its_time(run):
    code = """
for timeout in (0.02, 0.3):
    began = time.monotonic()
    assert not waiter.wait(8, timeout)
    print(timeout <= time.monotonic() - began < 30)
"""
    assert run(code) == ["True", "True"]


def test_numbers_that_are_no_handles_or_indexes_are_refused_by_name(run):
    code = """
for call in (
    lambda value: EventWaiter(value),
    lambda value: waiter.wait(value, 0.0),
):
    for value in (-1, 2**33, 2**64, True, 7.0, None):
        try:
            call(value)
        except (ConfigError, DeviceError) as error:
            print(type(error).__name__, error)
"""
    values = ["-1", str(2**33), str(2**64), "True", "7.0", "None"]
    lines = run(code)
    assert lines[:6] == [
        f"ConfigError ordinal = {value}: the index of a GPU in [0, 2^32)" for value in values
    ]
    for value, line in zip(values, lines[6:], strict=True):
        if value == str(2**33):  # a handle like any other
            assert line.startswith("DeviceError cuEventQuery: made up")
        else:
            expected = f"event_handle = {value}: a handle in [0, 2^64)"
            assert line == f"ConfigError {expected}"
    [line] = run("""
try:
    EventWaiter(2)
except ConfigError as error:
    print(error)
""")
    assert line.startswith("ordinal = 2: the index of a GPU (made up")


@pytest.mark.parametrize("timeout", ["60.0", "math.inf"])
def test_close_ends_a_wait_of_another_thread(run, timeout):
    code = f"""
threading.Timer(0.2, waiter.close).start()
for _ in range(2):
    try:
        waiter.wait(8, {timeout})
    except EngineClosed as error:
        print(error, time.monotonic() - began < 30)
print(waiter.wait(7, {timeout}))
"""
    line = "engine is closed: closed while a step was on the GPU True"
    assert run(code) == [line, line, "True"]


def test_ctrl_c_ends_a_wait_and_others_go_on(run):
    code = """
# Whoever starts the tests in the background has them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    waiter.wait(8, math.inf)
except KeyboardInterrupt:
    print(time.monotonic() - began < 30, waiter.wait(7, 0.0))
"""
    assert run(code) == ["True True"]


def test_a_forked_child_is_refused(run):
    code = """
if os.fork() == 0:
    try:
        waiter.wait(7, 0.0)
    except ForkedProcess:
        os._exit(5)
    os._exit(6)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    assert run(code) == ["5"]


def test_at_exit_a_wait_is_not_reported_as_a_timeout(run):
    """Neither on a daemon thread nor in an exit hook."""
    code = """
def wait():
    try:
        waiter.wait(8, 60.0)
    except EngineClosed as error:
        os.write(1, f"{error}\\n".encode())

thread = threading.Thread(target=wait, daemon=True)
thread.start()
time.sleep(0.2)
"""
    lines = run(code, at_exit=True)
    closed = "engine is closed: the interpreter exits"
    assert sorted(lines) == [closed, f"{closed} True"]
