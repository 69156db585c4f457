"""headrace beside transformers on the same SmolLM2 folder, run by hand.

    python tests/bench/peer_transformers.py -o json

Both engines serve the same random prompts greedily, in fp32 on the CPU, with the same threads, in
turns within one process. transformers runs as it is best used for equal lengths: sdpa attention,
inference mode, a dynamic cache, logits of the last position only, no padding, no `generate` around
the loop. A decode step is timed from its input tokens to its output tokens on both sides.
"""

import argparse
import statistics
import sys
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from headrace.bench.drive import drive, random_prompts
from headrace.bench.env import describe
from headrace.bench.output import Report, emit
from headrace.config import EngineConfig
from headrace.engine import Engine
from headrace.loading.pull import pull

BATCHES = (1, 4, 8)
COLUMNS = (
    "b",
    "headrace_ms_median",
    "transformers_ms_median",
    "ratio_of_medians",
    "headrace_ms_min",
    "transformers_ms_min",
    "ratio_of_minima",
    "throughput_vs_b1",
    "tokens_equal",
)


def headrace_run(engine, prompts, gen_len):
    """Return milliseconds of every decode step, and the tokens of every row."""
    run = drive(engine, prompts, gen_len)
    return run.step_ms(len(prompts)), run.tokens


@torch.inference_mode()
def transformers_run(model, prompts, gen_len):
    """Return milliseconds of every decode step, and the tokens of every row."""
    out = model(torch.from_numpy(np.stack(prompts)), use_cache=True, logits_to_keep=1)
    tokens = out.logits[:, -1].argmax(-1)  # [rows]
    columns, step_ms = [tokens], []
    for _ in range(gen_len - 1):
        start = time.perf_counter()
        out = model(
            tokens.unsqueeze(1),
            past_key_values=out.past_key_values,
            use_cache=True,
            logits_to_keep=1,
        )
        tokens = out.logits[:, -1].argmax(-1)
        step_ms.append((time.perf_counter() - start) * 1e3)
        columns.append(tokens)
    return step_ms, torch.stack(columns, 1).tolist()


def compare(engine, model, *, prompt_len, gen_len, rounds, seed):
    """Run all batch sizes in turns, both sides in each turn; the first turn warms up."""
    prompts = random_prompts(engine, max(BATCHES), prompt_len, seed=seed)
    sides = {
        "headrace": lambda batch: headrace_run(engine, prompts[:batch], gen_len),
        "transformers": lambda batch: transformers_run(model, prompts[:batch], gen_len),
    }
    step_ms = {(name, batch): [] for name in sides for batch in BATCHES}
    equal = dict.fromkeys(BATCHES, True)
    for turn in range(rounds + 1):
        for batch in BATCHES:
            tokens = {}
            # Each side goes first in every other turn.
            for name in list(sides)[:: 1 if turn % 2 else -1]:
                samples, tokens[name] = sides[name](batch)
                if turn:
                    step_ms[name, batch] += samples
            equal[batch] &= tokens["headrace"] == tokens["transformers"]
    return [row(batch, step_ms, equal[batch], gen_len, rounds) for batch in BATCHES]


def row(batch, step_ms, tokens_equal, gen_len, rounds):
    """Medians, minima and ratios of one batch size; a ratio above 1 is for headrace."""
    ours, theirs = step_ms["headrace", batch], step_ms["transformers", batch]
    lone = step_ms["headrace", 1]
    return {
        "b": batch,
        "headrace_ms_median": statistics.median(ours),
        "transformers_ms_median": statistics.median(theirs),
        "ratio_of_medians": statistics.median(theirs) / statistics.median(ours),
        "headrace_ms_min": min(ours),
        "transformers_ms_min": min(theirs),
        "ratio_of_minima": min(theirs) / min(ours),
        "throughput_vs_b1": batch * statistics.median(lone) / statistics.median(ours),
        "throughput_vs_b1_of_minima": batch * min(lone) / min(ours),
        "steps_a_run": gen_len - 1,
        "runs": rounds,
        "tokens_equal": tokens_equal,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--gen-len", type=int, default=33, help="one more than decode steps")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, help="of both sides; fewer than cores steadies a busy machine"
    )
    parser.add_argument("-o", "--output", default="table")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    folder = pull("smollm2")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        max_batch_size=max(BATCHES),
        max_context=args.prompt_len + args.gen_len,
        # All prompts in one step, as on the other side.
        max_batch_tokens=-(-max(BATCHES) * args.prompt_len // 64) * 64,
    )
    with Engine(config) as engine:
        rows = compare(
            engine,
            model,
            prompt_len=args.prompt_len,
            gen_len=args.gen_len,
            rounds=args.rounds,
            seed=args.seed,
        )
        report = Report(describe(engine, engines_in_process=2), rows, COLUMNS)
    emit(report, args.output)
    return 0 if all(row["tokens_equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
