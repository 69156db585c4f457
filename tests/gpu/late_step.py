"""One engine with a step that is late, in a process of its own; prints what came of it as JSON.

Run by `test_cuda_deadline`: `late_step.py MODEL how host_bytes`. The step is late because its
stream sleeps before it. Everything runs once before, so that no kernel is loaded behind the sleep.
"""

import gc
import json
import sys
import threading
import time

import torch

from headrace import LLM, BatchedRequest, Engine, EngineConfig, SamplingParams
from headrace.backends.cuda_ops import CudaBackend
from headrace.errors import StepTimeout

STUCK_S = 10.0
SLOW_S = 0.3
COPY_TIMEOUT_S = 1.0
STEP_TIMEOUT_S = 2.1
PROMPT = list(range(3, 140))
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=1, logprobs=2)


def cycles_a_second():
    for cycles in (10**9, 10**9):  # the first raises the clock
        torch.cuda.synchronize()
        began = time.monotonic()
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        seconds = time.monotonic() - began
    return cycles / seconds


RATE = cycles_a_second()


def sleep(engine, seconds):
    with torch.cuda.stream(engine.runner.stream):
        torch.cuda._sleep(int(RATE * seconds))


def options_of(model, host_bytes, step_timeout_s=STEP_TIMEOUT_S):
    tier = {"kv_layout": "paged", "host_bytes": host_bytes, "slot_widths": 1} if host_bytes else {}
    return {
        "model": model,
        "device": "cuda",
        "dtype": "bfloat16",
        "max_batch_size": 2,
        "max_context": 512,
        "skip_tokenizer": True,
        "copy_timeout_s": COPY_TIMEOUT_S,
        "step_timeout_s": step_timeout_s,
        **tier,
    }


def closed(owner, engine):
    """Close; seconds it took, and whether the sleep outlasted it."""
    stream = engine.runner.stream
    began = time.monotonic()
    owner.close()
    return {"close_s": time.monotonic() - began, "still_runs": not stream.query()}


def answer(llm, params):
    [output] = llm.generate([PROMPT], params)
    return output.token_ids if output.error is None else output.error


def generate(options, params):
    """A late step of an LLM: launched and waited for later if greedy, else in the launch."""
    llm = LLM(**options)
    right = [answer(llm, params) for _ in range(3)]  # the later ones may find a prefix
    sleep(llm.engine, SLOW_S)
    slow = answer(llm, params)
    sleep(llm.engine, STUCK_S)
    late = answer(llm, params)
    began = time.monotonic()
    after = answer(llm, params)
    refused_s = time.monotonic() - began
    found = {"right": right, "slow": slow, "late": late, "after": after, "refused_s": refused_s}
    return found | closed(llm, llm.engine)


def batch(options):
    """A late step of the batch API."""
    engine = Engine(EngineConfig(**options))
    request = BatchedRequest(request_id=0, prompt_tokens=PROMPT, sampling=SAMPLED)
    engine.allocate_slot(0)

    def step():
        try:
            return engine.batch_decode_step([request]).token_ids
        except StepTimeout as error:
            return f"StepTimeout: {error}"

    engine.batch_prefill([request])
    step()
    sleep(engine, SLOW_S)
    slow = step()
    sleep(engine, STUCK_S)
    late = step()
    reason = request.finish_reason
    other = BatchedRequest(request_id=1, prompt_tokens=PROMPT)
    engine.allocate_slot(1)
    began = time.monotonic()
    try:
        engine.batch_prefill([other])
        after = None
    except StepTimeout as error:
        after = f"StepTimeout: {error}"
    refused_s = time.monotonic() - began
    found = {"slow": slow, "late": late, "reason": reason, "after": after, "refused_s": refused_s}
    return found | closed(engine, engine)


def closing(options, params):
    """Close an LLM while its thread waits for a step: without the engine's lock if greedy."""
    llm = LLM(**options)
    answer(llm, params)
    sleep(llm.engine, STUCK_S)
    thread = threading.Thread(target=answer, args=(llm, params))
    thread.start()
    while not llm.loop.live_ids():
        time.sleep(0.01)
    time.sleep(0.5)
    found = closed(llm, llm.engine)
    thread.join()
    return found | {"alive": llm.loop.alive}


def making(options):
    """An engine whose first step, before any graph is captured, is late."""
    Engine(EngineConfig(**options)).close()
    embed, slept = CudaBackend.embed, torch.cuda.Event()

    def late_embed(self, *args):
        CudaBackend.embed = embed
        torch.cuda._sleep(int(RATE * STUCK_S))
        slept.record()
        return embed(self, *args)

    CudaBackend.embed = late_embed
    late = again(options)
    began = time.monotonic()
    gc.collect()
    close_s = time.monotonic() - began
    return {"late": f"StepTimeout: {late}", "close_s": close_s, "still_runs": not slept.query()}


def again(options):
    """Whether an engine can be made on the same GPU."""
    try:
        Engine(EngineConfig(**options)).close()
    except StepTimeout as error:
        return str(error)
    return None


def main():
    model, how, host_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    api, _, kind = how.partition("-")
    params = SAMPLED if kind == "sampled" else GREEDY
    if api == "closing":
        found = closing(options_of(model, host_bytes, 60.0), params)
    else:
        options = options_of(model, host_bytes)
        cases = {"batch": batch, "making": making, "llm": lambda some: generate(some, params)}
        found = cases[api](options) | {"again": again(options)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
