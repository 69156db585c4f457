"""Decode steps at a long context: `python tests/gpu/bench_context.py MODEL KV_DTYPE [TOKENS ROWS]`.

The cache and the states of all rows are filled with noise through the codecs instead of computed,
which would take minutes; what a step reads and does is the same. One configuration a process.
Prints a JSON object: medians of `STEPS` steps by the wall and by the device, the floor, and whether
every row gives the tokens it gives alone.
"""

import json
import statistics
import sys
import time

import torch

from headrace import Engine, EngineConfig, SamplingParams
from headrace._core import build_plan
from headrace.bench.env import describe
from headrace.bench.floor import Floor

STEPS = 32
CHUNK = 8192


def fill(engine, tokens):
    """Noise in every slot; the state of a row is small, as gates keep it in a model."""
    generator = torch.Generator(engine.device).manual_seed(0)
    layout = engine.kv.pool.layout
    shape = (CHUNK, layout.kv_heads, layout.head_dim)
    for layer in range(layout.layers):
        for slot in range(engine.kv.pages):
            for first in range(0, tokens, CHUNK):
                k, v = (
                    torch.randn(shape, generator=generator, device=engine.device).to(
                        engine.kv.dtype
                    )
                    for _ in range(2)
                )
                offsets = torch.arange(first, first + CHUNK, device=engine.device)
                engine.backend.kv_append(
                    layer, engine.kv, torch.full_like(offsets, slot), offsets, k, v
                )
    if engine.state is not None:
        for tensor in engine.state.tensors.values():
            tensor.normal_(std=0.02, generator=generator)


def decode(engine, tokens, slots):
    """Tokens of each row, and the times of the steps by the wall and by the device."""
    spec = engine.sampling_spec(SamplingParams(max_tokens=STEPS + 1, ignore_eos=True))
    generated = [[slot + 1] for slot in slots]
    walls, devices = [], []
    for step in range(STEPS):
        rows = [
            (row, slot, tokens + step, own[-1:], spec, [0], own)
            for row, (slot, own) in enumerate(zip(slots, generated, strict=True))
        ]
        plan = build_plan(rows, decode=True)
        start = time.perf_counter()
        sampled = engine.execute(plan)
        walls.append(time.perf_counter() - start)
        devices.append(engine.runner.device_s)
        for own, token in zip(generated, sampled.token_ids.tolist(), strict=True):
            own.append(token)
    return generated, walls[2:], devices[2:]


def main():
    model, kv_dtype = sys.argv[1:3]
    tokens, rows = (int(x) for x in sys.argv[3:5]) if len(sys.argv) > 3 else (65536, 8)
    config = EngineConfig(
        model=model, load_format="dummy", device="cuda", skip_tokenizer=True, kv_dtype=kv_dtype,
        max_batch_size=rows, max_context=tokens + 64,
    )  # fmt: skip
    with Engine(config) as engine:
        fill(engine, tokens)
        engine.runner.timed = True
        states = {} if engine.state is None else engine.state.tensors
        saved = {name: tensor.clone() for name, tensor in states.items()}

        def run(slots):
            for name, tensor in states.items():
                tensor.copy_(saved[name])
            return decode(engine, tokens, slots)

        together, walls, devices = run(range(rows))
        alone = [run([slot])[0][0] for slot in range(rows)]
        wall, device = (statistics.median(times) * 1e3 for times in (walls, devices))
        floor = Floor.of(engine).step_ms(rows, tokens + STEPS / 2)
        result = {
            "env": describe(engine),
            "context": tokens,
            "b": rows,
            "step_ms_median": wall,
            "device_ms_median": device,
            "step_ms_floor": floor,
            "floor_ratio": wall / floor,
            "parity": together == alone,
        }
    print(json.dumps(result))
    return 0 if result["parity"] else 1


if __name__ == "__main__":
    sys.exit(main())
