"""Engines with pages and a host tier, and what a plain slot engine answers to the same prompts."""

import time

from headrace import SamplingParams
from headrace.errors import OutOfPages
from headrace.llm import LLM
from shadow import assert_conserved

PAGE = 64
FORMATS = {
    "auto": {},
    "fp8": {"kv_dtype": "fp8_e4m3"},
    "int8": {"kv_dtype": "int8_per_token_head", "int8_rotate": True},
    "k8v4": {"kv_dtype": "turboquant_k8v4"},
}
MODELS = ("tiny_qwen3", "tiny_hybrid")
POLICIES = ("write_through", "write_through_selective", "write_back", "none")


def prompt(length, seed=0):
    return [(7 * i * (seed + 3) + 11 * seed + i * i) % 500 for i in range(length)]


def params(max_tokens, **options):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=1, **options)


# A prompt of five whole pages and a part, others that push it out, and a few tokens of an answer.
LONG = prompt(5 * PAGE + 10)
NOISE = [prompt(4 * PAGE + 3, seed) for seed in (1, 2)]
SHORT = params(4)


class Plain:
    """The model with fixed slots and no cache, one request at a time; remembers its answers."""

    def __init__(self, path, **options):
        fixed = {"max_context": 1024, "deterministic": "on", "skip_tokenizer": True}
        self.options = fixed | options
        self.llm = LLM(str(path), max_batch_size=1, **self.options)
        self.path = path
        self.answers = {}
        self.page_bytes = self.llm.engine.kv.bytes_per_token * PAGE
        state = self.llm.engine.state
        self.state_bytes = 0 if state is None else state.bytes_total

    def answer(self, tokens, options):
        key = (tuple(tokens), options)
        if key not in self.answers:
            [self.answers[key]] = self.llm.generate([tokens], options)
            assert self.answers[key].finish_reason == "length"
        return self.answers[key]

    def tiered(self, *, host_pages=0, **options):
        """The model with pages and `host_pages` host pages (and, if hybrid, a state for each)."""
        nbytes = host_pages * (self.page_bytes + self.state_bytes) + 4096
        options = self.options | {
            "max_batch_size": 4,
            "kv_layout": "paged",
            "host_bytes": nbytes if host_pages else 0,
            "snapshot_interval": PAGE,
            **options,
        }
        return LLM(str(self.path), **options)

    def check(self, output, tokens, options):
        """Tokens and log-probabilities, to the bit."""
        right = self.answer(tokens, options)
        assert output.finish_reason == "length", output.error
        assert output.token_ids == right.token_ids
        assert output.logprobs == right.logprobs
        cached = output.cached_tokens
        assert cached.device % PAGE == cached.host % PAGE == cached.host_streamed % PAGE == 0
        assert cached.device + cached.host + cached.host_streamed < len(tokens)


def run(llm, plain, prompts, options, priority="high"):
    """Generate for all prompts at once, compare each with the plain engine; returns the outputs."""
    outputs = llm.generate(prompts, options, priority=priority)
    for output, tokens in zip(outputs, prompts, strict=True):
        plain.check(output, tokens, options)
    return outputs


def settle(llm, timeout=30.0):
    """Wait until no copy is under way and every page is free or the tree's."""
    end = time.monotonic() + timeout
    while True:
        llm.engine.tier and llm.engine.tier.queue.drain()
        try:
            assert_conserved(llm.stats())
            return
        except AssertionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def wait_for(condition, timeout=30.0):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.001)


def refused(call):
    try:
        call()
    except OutOfPages as error:
        return str(error)
    raise AssertionError("not refused")


def plain_engines(tiny, **options):
    """What a fixture yields: a function that gives the `Plain` of a model and format, made once."""
    made = {}

    def get(model="tiny_qwen3", name="auto"):
        if (model, name) not in made:
            made[model, name] = Plain(tiny(model).path, **options, **FORMATS[name])
        return made[model, name]

    yield get
    for one in made.values():
        one.llm.close()
