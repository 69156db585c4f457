"""The table of speeds on a GPU: `python tests/gpu/bench_engine.py OUT [name ...]`.

Runs `headrace bench batch` (or `latency`), one configuration a process, with random weights of the
published shapes. The JSON of each goes to the folder OUT as printed; a line a row is printed here.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

COMMON = "--load-format dummy --device cuda --skip-tokenizer -o json"
DECODE = "-npp 1024 -ntg 64 -npl 1,2,4,8 --repeat 2"
CONTEXT_64K = "-npp 65536 -ntg 32 -npl 8 --repeat 1 --max-batch-tokens 8192"
RUNS = {
    "8b": f"batch --model qwen3-8b {DECODE}",
    "0.6b": f"batch --model qwen3-0.6b {DECODE}",
    "27b-fp8": f"batch --model qwen3.5-27b-fp8 {DECODE}",
    "27b-fp8-prefill": "batch --model qwen3.5-27b-fp8 -npp 8192 -ntg 16 -npl 1 --repeat 3",
    "8b-eager": f"batch --model qwen3-8b {DECODE} --no-cuda-graphs",
    "8b-off": f"batch --model qwen3-8b {DECODE} --deterministic off",
    "8b-lone": "latency --model qwen3-8b -npp 1024 -ntg 64 --repeat 3",
    **{
        f"27b-64k-{name}": f"batch --model qwen3.5-27b-fp8 {CONTEXT_64K} --kv-dtype {dtype}"
        for name, dtype in (
            ("bf16", "auto"),
            ("fp8", "fp8_e4m3"),
            ("int8", "int8_per_token_head"),
            ("k8v4", "turboquant_k8v4"),
        )
    },
}
SHOWN = (
    "b", "pp", "step_ms_median", "device_ms_median", "step_ms_floor", "floor_ratio", "s_tg_tps",
    "speedup_vs_b1", "s_pp_tps", "prefill_device_s", "lone_ratio", "parity",
)  # fmt: skip


def main() -> int:
    out, *names = sys.argv[1:]
    failed = 0
    for name in names or RUNS:
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "headrace.cli", "bench", *RUNS[name].split(), *COMMON.split()],
            capture_output=True,
            text=True,
            check=False,
        )
        print(f"{name}: exit {done.returncode}, {time.perf_counter() - start:.0f} s", flush=True)
        failed |= done.returncode
        if not done.stdout.startswith("{"):
            print(done.stderr[-3000:], flush=True)
            continue
        (Path(out) / f"{name}.json").write_text(done.stdout, encoding="utf-8")
        report = json.loads(done.stdout)
        print("  copy", report["env"].get("copy_gb_per_s"), "GB/s", flush=True)
        for row in report["rows"]:
            cells = (
                f"{key} {row[key]:.4g}" if isinstance(row[key], float) else f"{key} {row[key]}"
                for key in SHOWN
                if row.get(key) is not None
            )
            print("  " + ", ".join(cells), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
