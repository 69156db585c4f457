"""Conversations over a device pool of a quarter of their KV: only what is new is computed.

The ideal, for a given trace: a prompt is computed but for its longest whole pages that an earlier
prompt had (for hybrid models: up to the last place at which an earlier prompt saved its state), and
at least its last token. Generated tokens were computed by decode steps, so they are prefilled once
when they come back. PFX-02, BEN-05, LEK-07.
"""

import random

import pytest

from shadow import VOCAB, Shadow, answer
from tier_cases import MODELS, PAGE, Plain, params, settle

CLIENTS, TURNS, ANSWER, TOGETHER = 8, 6, 12, 4
SYSTEM = 2 * PAGE + 10


class Ideal:
    """What a cache without limits would have computed."""

    def __init__(self, hybrid):
        self.hybrid = hybrid
        self.known = set()

    def cached(self, prompt):
        most = (len(prompt) - 1) // PAGE
        hits = [n for n in range(1, most + 1) if tuple(prompt[: n * PAGE]) in self.known]
        return max(hits, default=0) * PAGE

    def add(self, prompt):
        last = (len(prompt) - 1) // PAGE if self.hybrid else len(prompt) // PAGE
        first = last if self.hybrid else 1
        self.known |= {tuple(prompt[: n * PAGE]) for n in range(max(first, 1), last + 1)}


def trace(vocab, seed=0):
    """System prompt, and what each client says in each turn."""
    rng = random.Random(seed)

    def words(n):
        return [rng.randrange(vocab) for _ in range(n)]

    return words(SYSTEM), [[words(rng.randrange(30, 90)) for _ in range(TURNS)] for _ in "x" * 8]


def replay(generate, vocab, hybrid):
    """Play all turns, TOGETHER clients at once. Returns the ideal number of computed tokens."""
    system, says = trace(vocab)
    ideal, computed = Ideal(hybrid), len(system)
    generate([system])
    ideal.add(system)
    talks = [list(system) for _ in range(CLIENTS)]
    for turn in range(TURNS):
        for first in range(0, CLIENTS, TOGETHER):
            clients = range(first, first + TOGETHER)
            for client in clients:
                talks[client] += says[client][turn]
                computed += len(talks[client]) - ideal.cached(talks[client])
            answers = generate([talks[client] for client in clients])
            for client, tokens in zip(clients, answers, strict=True):
                ideal.add(talks[client])
                talks[client] += tokens
    return computed


def check(stats, ideal):
    computed = stats["prompt_tokens"]
    assert ideal <= computed <= 1.02 * ideal
    assert stats["cached_host_tokens"] > 0, "the device pool held everything"
    for source in ("device", "host", "streamed"):
        assert stats[f"cached_{source}_tokens"] % PAGE == 0
    return computed, stats["cached_device_tokens"] + stats["cached_host_tokens"]


@pytest.mark.parametrize("model", MODELS)
def test_only_new_tokens_are_computed(tiny, model):
    """One client of each group is compared with a plain engine in every turn."""
    one = Plain(tiny(model).path)
    with one.tiered(host_pages=120, num_pages=20, snapshot_interval=4096) as llm:

        def generate(prompts):
            outputs = llm.generate(prompts, params(ANSWER))
            one.check(outputs[0], prompts[0], params(ANSWER))
            settle(llm)
            return [output.token_ids for output in outputs]

        ideal = replay(generate, 500, model == "tiny_hybrid")
        check(llm.stats(), ideal)
    one.llm.close()


@pytest.mark.parametrize("layout", ["paged", "slots"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
def test_computed_tokens_meet_the_ideal_in_either_layout(hybrid, layout):
    """And the same trace again has the same hits."""
    seen = []
    for _ in range(2):
        with Shadow(
            pages=20 if layout == "paged" else None,
            host_pages=120,
            hybrid=hybrid,
            snapshots=120,
            staging=4,
            snapshot_interval=4096,
            slots=TOGETHER,
            settled=True,
        ) as shadow:

            def generate(prompts, shadow=shadow):
                for prompt in prompts:
                    shadow.submit(prompt, ANSWER)
                shadow.run()
                shadow.drain()
                return [answer(prompt, ANSWER) for prompt in prompts]

            ideal = replay(generate, VOCAB, hybrid)
            seen.append(check(shadow.stats(), ideal))
    assert seen[0] == seen[1]
