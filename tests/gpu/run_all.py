"""Everything that a GPU has to show of a commit: `python tests/gpu/run_all.py OUT [phase ...]`.

Phases: tests, bench, memcheck; all of them if none is named. The output of each command goes to
`OUT/name.txt`, the JSON of benchmarks to `OUT/*.json` (those that `docs/results` has); a line a
command is printed, with what failed. Every file is complete before the next command starts. Exit
status 1 if anything failed. Needs `headrace`, pytest and, to share the GPU, pytest-xdist.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from bench_engine import MODELS, RUNS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# What measures a time, sleeps on the GPU or takes most of its memory runs alone.
ALONE = ("test_large_arrays.py", "test_cases.py")
SLEEPS = "test_cuda_deadline.py"
TIMED = ("test_cuda_copies.py", "hide")
BENCHES = (
    *MODELS,
    f"{MODELS[-1]}-prefill",
    "qwen3-8b-lone",
    *(name for name in RUNS if "-short" in name),
)
KV_DTYPES = ("auto", "fp8_e4m3", "int8_per_token_head", "turboquant_k8v4")
SHOWN = re.compile(r"^(FAILED|ERROR|SKIPPED|E  )|passed|failed|ERROR SUMMARY")


def pytest(*options: str, processes: int = 1) -> list[str]:
    # Were pytest-benchmark there, its warning about several processes would be an error.
    plugins = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", *plugins, *options]
    if processes > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(min(processes, os.cpu_count() or 1))]
    return command


def tests() -> dict[str, list[str]]:
    apart = [f"--ignore={HERE / name}" for name in (*ALONE, SLEEPS)]
    timed, name = TIMED
    return {
        "tests": pytest(str(HERE), *apart, "-k", f"not {name}", processes=14),
        "tests-timed": pytest(str(HERE / timed), "-k", name),
        "tests-alone": pytest(*(str(HERE / name) for name in ALONE)),
        "tests-deadlines": pytest(str(HERE / SLEEPS), processes=10),
    }


def memcheck() -> dict[str, list[str]]:
    tool = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "1"]
    return {"memcheck": [*tool, sys.executable, str(HERE / "memcheck.py")]}


def bench(out: Path) -> dict[str, list[str]]:
    engine, context = (str(HERE / f"bench_{name}.py") for name in ("engine", "context"))
    return {name: [sys.executable, engine, str(out), name] for name in BENCHES} | {
        f"{MODELS[-1]}-64k-{dtype}": [sys.executable, context, MODELS[-1], dtype]
        for dtype in KV_DTYPES
    }


def run(out: Path, name: str, command: list[str]) -> bool:
    """Whether it succeeded."""
    paths = (str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {
        "HEADRACE_REQUIRE_GPU": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    if name == "memcheck":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    start = time.perf_counter()
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    (out / f"{name}.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    print(f"== {name}: exit {done.returncode}, {time.perf_counter() - start:.0f} s", flush=True)
    if "-64k-" in name and done.returncode == 0:
        report = json.loads(done.stdout)
        (out / f"{name}.json").write_text(done.stdout, encoding="utf-8")
        keys = ("step_ms_median", "device_ms_median", "step_ms_floor", "parity")
        print("  " + ", ".join(f"{key} {report[key]}" for key in keys), flush=True)
    elif name in BENCHES:
        print(done.stdout.rstrip(), flush=True)
    else:
        lines = (done.stdout + done.stderr).splitlines()
        print("\n".join(line[:200] for line in lines if SHOWN.search(line)), flush=True)
    return done.returncode == 0


def main() -> int:
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    phases = {"tests": tests, "bench": lambda: bench(out), "memcheck": memcheck}
    good = True
    for phase in sys.argv[2:] or phases:
        for name, command in phases[phase]().items():
            good &= run(out, name, command)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
