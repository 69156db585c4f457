"""The table of speeds on a GPU: `python tests/gpu/bench_engine.py OUT [name ...]`.

Runs `headrace bench batch` (or `latency`, or `kv`), one configuration a process, with random
weights of the published shapes. The JSON of each goes to `OUT/name.json` as printed; a line a row
is printed here. A name of a model is its main table: docs/results and the names in MODELS make the
files that are committed.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

COMMON = "--device cuda -o json"
DUMMY = "--load-format dummy --skip-tokenizer"
DECODE = "-npp 1024 -ntg 64 -npl 1,2,4,8 --repeat 2"
SHORT = "-npp 64,256,512 -ntg 16 -npl 1 --repeat 9"
CONTEXT_64K = "-npp 65536 -ntg 32 -npl 8 --repeat 1 --max-batch-tokens 8192"
MODELS = ("qwen3-8b", "qwen3-0.6b", "qwen3.5-27b-fp8")
RUNS = {
    **{model: f"batch --model {model} {DECODE}" for model in MODELS},
    **{
        f"{model}-short{name}": f"batch --model {model} {SHORT} {option}"
        for model in MODELS
        for name, option in (("", ""), ("-eager", "--no-cuda-graphs"))
    },
    "qwen3.5-27b-fp8-prefill": "batch --model qwen3.5-27b-fp8 -npp 8192 -ntg 16 -npl 1 --repeat 3",
    "qwen3-8b-eager": f"batch --model qwen3-8b {DECODE} --no-cuda-graphs",
    "qwen3-8b-off": f"batch --model qwen3-8b {DECODE} --deterministic off",
    "qwen3-8b-lone": "latency --model qwen3-8b -npp 1024 -ntg 64 --repeat 3",
    "kv-8b": "kv --context 1024,8192,65536 --kv-heads 8 --group 4 --head-dim 128",
    "kv-27b": "kv --context 1024,8192,65536 --kv-heads 4 --group 6 --head-dim 256",
    **{
        f"{MODELS[-1]}-64k-{name}": f"batch --model {MODELS[-1]} {CONTEXT_64K} --kv-dtype {dtype}"
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
    "speedup_vs_b1", "t_pp_s", "s_pp_tps", "prefill_device_s", "prefill_floor_ratio", "lone_ratio",
    "kv_dtype", "context", "attention_ms_median", "attention_device_ms_median", "parity",
)  # fmt: skip


def main() -> int:
    out, *names = sys.argv[1:]
    failed = 0
    for name in names or RUNS:
        start = time.perf_counter()
        options = f"{RUNS[name]} {COMMON} {'' if name.startswith('kv') else DUMMY}"
        done = subprocess.run(
            [sys.executable, "-m", "headrace.cli", "bench", *options.split()],
            capture_output=True,
            text=True,
            check=False,
        )
        print(f"{name}: exit {done.returncode}, {time.perf_counter() - start:.0f} s", flush=True)
        failed |= done.returncode
        if not done.stdout.startswith("{"):
            print(done.stderr[-3000:], flush=True)
            continue
        Path(out).mkdir(parents=True, exist_ok=True)
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
