"""Where the time of a step goes: `python tests/gpu/profile_engine.py MODEL PROMPT_LEN [rows]`.

Prints the kernels of one prefill step and of eight decode steps, longest first, and the time in
which none ran, by the kernel that ended it.
"""

import sys
from collections import defaultdict

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from headrace import Engine, EngineConfig, SamplingParams
from headrace.bench.drive import random_prompts

SHOWN = 14


def kernels(title, steps, call):
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    times, gaps = (defaultdict(lambda: [0, 0.0]) for _ in range(2))
    on_device = (e for e in recorded.events() if e.device_type == DeviceType.CUDA)
    events = sorted(on_device, key=lambda event: event.time_range.start)
    ended = events[0].time_range.start
    for event in events:
        for table, time in (
            (times, event.device_time),
            (gaps, max(0.0, event.time_range.start - ended)),
        ):
            entry = table[event.name[:70]]
            entry[0] += 1
            entry[1] += time
        ended = max(ended, event.time_range.end)
    for what, table in (("in kernels", times), ("between them, before", gaps)):
        total = sum(time for _, time in table.values())
        print(f"{title}: {total / steps / 1e3:.3f} ms a step {what}")
        for name, (count, time) in sorted(table.items(), key=lambda item: -item[1][1])[:SHOWN]:
            print(f"  {time / steps:9.1f} us {count / steps:6.1f} x  {name}")


def main():
    model, length = sys.argv[1], int(sys.argv[2])
    rows = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    config = EngineConfig(
        model=model, load_format="dummy", device="cuda", skip_tokenizer=True, max_batch_size=rows,
        max_context=length + 64, max_batch_tokens=-(-rows * length // 64) * 64,
    )  # fmt: skip
    with Engine(config) as engine:
        spec = engine.sampling_spec(SamplingParams(max_tokens=32, ignore_eos=True))
        prompts = random_prompts(engine, rows, length, seed=0)
        for turn in range(2):
            scheduler = engine.make_scheduler()
            for prompt in prompts:
                scheduler.submit(prompt, spec)

            def step(scheduler=scheduler):
                plan = scheduler.next_plan(0.0)
                scheduler.commit(plan, engine.execute(plan).token_ids)

            if turn:
                kernels(f"{model} prefill {rows} x {length}", 1, step)
            else:
                step()
            step()
            if turn:
                kernels(f"{model} decode {rows}", 8, lambda: [step() for _ in range(8)])
            scheduler.close()


if __name__ == "__main__":
    main()
