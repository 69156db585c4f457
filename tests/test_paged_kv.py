"""Block tables: slots, pages in any order and LOW windows give the same bits, for every KV format.

The test plays allocator and copy queue: it hands out pages, moves full pages of a request to the
host, and fills its LOW windows layer by layer while the forward runs. The pool is poisoned wherever
nothing has been stored.
"""

import functools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace import runner
from headrace._core import SamplingSpec, build_plan
from headrace.bench.kv import every_format
from headrace.errors import ConfigError
from headrace.kv.cache import KVCache
from headrace.kv.tables import LOW_BIT, Window, entries_of, flat_pages
from headrace.models.hybrid_config import FULL_ATTENTION
from headrace.plan import plan_pages
from tiny_models import make_batch, make_kv, make_state, random_prompt

FORMATS = {entry.label: entry for entry in every_format(torch.float32)}
MODELS = ("tiny_qwen3", "tiny_qwen3_d128", "tiny_hybrid")  # 4, 3 and 2 layers with KV
LOW = 1 << LOW_BIT
PROMPTS = {0: random_prompt(318), 1: random_prompt(126, 1)}  # both grow over the edge of a page
PADDING = (1, -1, 0)


@pytest.fixture(scope="module")
def loaded(tiny):
    return functools.cache(lambda name: tiny(name).load(deterministic=True))


def steps():
    """(decode rows, prefill runs) of each step: request 0 long, request 1 beside it."""
    long, short = PROMPTS[0], PROMPTS[1]
    yield [], [(long[:128], 0, 0)]
    yield [], [(long[128:192], 0, 128), (short, 1, 0)]
    yield [(7, 1, 126)], [(long[192:], 0, 192)]
    for step in range(6):
        yield [(9 + step, 0, 318 + step), PADDING, (5 + step, 1, 127 + step)], []


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8)


class Pages:
    """Pages of two requests in one pool; `seal` moves full pages of a request to LOW pages."""

    def __init__(self, model, kv_format, *, page_tokens, width, seed):
        self.random = random.Random(seed)
        layers = model.config.kv_layers
        high = {slot: len(prompt) // page_tokens + 2 for slot, prompt in PROMPTS.items()}
        low, guards = high[0], 3
        self.kv = KVCache(
            model.config,
            pages=sum(high.values()) + low + guards,
            page_tokens=page_tokens,
            width=width,
            dtype=model.dtype,
            kv_format=kv_format,
        )
        self.kv.fill_poison()
        ids = self.random.sample(range(self.kv.pages), self.kv.pages)
        self.tables = {
            slot: np.array([ids.pop() for _ in range(count)], np.uint32)
            for slot, count in high.items()
        }
        shared = [ids.pop() for _ in range(low)]
        starts = [(page, first) for page in shared for first in range(0, layers - width + 1, width)]
        self.free_low = self.random.sample(starts, len(starts))
        for plane in self.kv.pool.tensors.values():
            for guard in ids:
                plane[:, guard].view(torch.uint8).fill_(0xA5)
        self.host = {}  # (page, first layer) of a LOW page -> planes [layers, P, heads, row]
        self.k0 = 0

    def seal(self, slot, length):
        """Move some full pages of a request to the host, at least one if there is any."""
        table, tensors = self.tables[slot], self.kv.pool.tensors
        full = [i for i in range(length // self.kv.page_tokens) if not table[i] & LOW]
        for i in self.random.sample(full, -(-len(full) // 2)):
            page, first = self.free_low.pop()
            high = int(table[i])
            self.host[page, first] = {
                name: tensor[:, high].clone() for name, tensor in tensors.items()
            }
            for tensor in tensors.values():
                tensor[:, high].view(torch.uint8).fill_(0xFF)
            table[i] = LOW | (page + first * self.kv.pages)


class Windows:
    """Gates that hold each layer in the window only from its load to the end of its attention."""

    def __init__(self, config, pages):
        self.layers = [
            layer for layer in range(config.num_layers)
            if config.layer_type(layer) == FULL_ATTENTION
        ]  # fmt: skip
        self.pages, self.loaded, self.calls = pages, 0, []

    def cells(self, k):
        """Where streamed layer k of the step lies: (planes on the host, physical layer, page)."""
        width = self.pages.kv.width
        for (page, first), planes in self.pages.host.items():
            yield planes, first + (self.pages.k0 + k) % width, page

    def before_layer(self, layer):
        self.calls.append(("before", layer))
        if layer not in self.layers:
            return
        ahead = self.layers.index(layer) + self.pages.kv.width
        for k in range(self.loaded, min(ahead, len(self.layers))):
            for planes, physical, page in self.cells(k):
                for name, tensor in self.pages.kv.pool.tensors.items():
                    tensor[physical, page] = planes[name][k]
            self.loaded = k + 1

    def after_layer(self, layer):
        self.calls.append(("after", layer))
        if layer in self.layers:
            for _, physical, page in self.cells(self.layers.index(layer)):
                for tensor in self.pages.kv.pool.tensors.values():
                    tensor[physical, page].view(torch.uint8).fill_(0xFF)


def changed_cells(pages, before, batch):
    """Bytes that a step changed outside of its new tokens."""
    live = batch.token_pages >= 0
    new = batch.token_pages[live], batch.token_offsets[live]
    changed = 0
    for name, tensor in pages.kv.pool.tensors.items():
        differs = (bytes_of(tensor) != before[name]).flatten(3).any(-1)  # [layers, pages, P]
        differs[:, *new] = False
        changed += int(differs.sum())
    return changed


@pytest.fixture(scope="module")
def in_slots(loaded):
    """Logits of every step in fixed slots."""

    @functools.cache
    def run(name, label):
        model = loaded(name)
        kv = KVCache(
            model.config, pages=2, page_tokens=512, dtype=model.dtype, kv_format=FORMATS[label]
        )
        kv.fill_poison()
        state = make_state(model, slots=2)
        return [
            model.forward(make_batch(decode=decode, prefill=prefill), kv, state)
            for decode, prefill in steps()
        ]

    return run


WIDTHS = [(name, width) for name, layers in zip(MODELS, (4, 3, 2), strict=True)
          for width in range(1, layers + 1)]  # fmt: skip


@pytest.mark.parametrize("page_tokens", [64, 128])
@pytest.mark.parametrize(("name", "width"), WIDTHS)
@pytest.mark.parametrize("label", FORMATS)
def test_pages_and_windows_give_the_bits_of_slots(
    loaded, in_slots, label, name, width, page_tokens
):
    """HST-03 too: windows and untouched pages are poison until their bytes have arrived."""
    model = loaded(name)
    assert (name, model.config.kv_layers) in WIDTHS
    state = make_state(model, slots=2)
    seed = f"{label} {name} {width} {page_tokens}"
    pages = Pages(model, FORMATS[label], page_tokens=page_tokens, width=width, seed=seed)
    lengths, offsets = {0: 0, 1: 0}, set()
    for (decode, prefill), expected in zip(steps(), in_slots(name, label), strict=True):
        batch = make_batch(
            decode=decode,
            prefill=prefill,
            kv=pages.kv,
            tables=pages.tables,
            window=Window(pages.k0, width),
        )
        before = {name: bytes_of(plane).clone() for name, plane in pages.kv.pool.tensors.items()}
        gates = Windows(model.config, pages)
        logits = model.forward(batch, pages.kv, state, gates)
        real = [row for row in range(len(logits)) if row >= len(decode) or decode[row] != PADDING]
        assert torch.equal(logits[real], expected[real])
        assert torch.isfinite(logits).all()
        # Guards, foreign pages and unused layers; windows are poisoned again by the gates.
        assert changed_cells(pages, before, batch) == 0
        assert gates.loaded == model.config.kv_layers
        if pages.host:
            offsets.add(pages.k0 % width)
            pages.k0 += model.config.kv_layers
        for tokens, slot, start in [*prefill, *(([t], s, at) for t, s, at in decode if s >= 0)]:
            lengths[slot] = start + len(tokens)
        pages.seal(0, lengths[0])
    sealed = pages.tables[0] & LOW != 0
    assert sealed.any()
    assert not sealed.all()
    if model.config.kv_layers % width:
        assert offsets == set(range(width)), "the window started at every layer of a LOW page"


def test_gates_are_called_around_every_layer_in_order(loaded):
    model = loaded("tiny_hybrid")
    pages = Pages(model, None, page_tokens=64, width=1, seed=0)
    gates = Windows(model.config, pages)
    run = [(PROMPTS[1], 1, 0)]
    batch = make_batch(prefill=run, kv=pages.kv, tables=pages.tables)
    model.forward(batch, pages.kv, make_state(model), gates)
    layers = range(model.config.num_layers)
    assert gates.calls == [(when, layer) for layer in layers for when in ("before", "after")]

    class Broken(Windows):
        def before_layer(self, layer):
            if layer == 2:
                raise RuntimeError("no copy")
            super().before_layer(layer)

    gates = Broken(model.config, pages)
    with pytest.raises(RuntimeError, match="no copy"):
        model.forward(batch, pages.kv, make_state(model), gates)
    assert gates.calls == [(when, layer) for layer in (0, 1) for when in ("before", "after")]


@given(
    entries=st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 7)), min_size=1),
    layer=st.integers(0, 15),
    pages=st.integers(10, 2**26),
    k0=st.integers(0, 2**63),
    width=st.integers(1, 8),
)
def test_flat_pages_are_those_of_the_definition(entries, layer, pages, k0, width):
    """architecture.md, "One address for every layout", entry by entry and as an array."""
    expected, table = [], []
    for low, page, start in entries:
        base = page + start * width * pages if low else page
        base %= 2**31
        table.append((LOW if low else 0) | base)
        expected.append(base + ((k0 + layer) % width if low else layer) * pages)
    window = Window(k0, width)
    for kind in (list, np.uint32, torch.uint32):
        made = table
        if kind is np.uint32:
            made = np.array(table, np.uint32)
        elif kind is torch.uint32:
            made = torch.from_numpy(np.array(table, np.uint32))
        assert [flat_pages(int(entry), layer, pages, window) for entry in made] == expected
        count = len(table) - 1
        flats = flat_pages(entries_of(made, count), layer, pages, window)
        assert flats.tolist() == expected[:count]
        assert flats.dtype == np.int64
    with pytest.raises(AssertionError, match="covers"):
        entries_of(table, len(table) + 1)


def test_one_page_is_read_in_place_and_several_as_a_copy(loaded):
    model = loaded("tiny_qwen3")
    kv = KVCache(model.config, pages=5, page_tokens=64, dtype=model.dtype, width=2)
    kv.fill_poison()
    k, v = torch.randn((2, 100, kv.kv_heads, 64), generator=torch.Generator().manual_seed(0))
    at = torch.arange(100)
    table = torch.tensor([3, 1])
    kv.append(2, table[at // 64], at % 64, k, v)
    keys, values = kv.view(2, table, 64)
    assert keys.data_ptr() == kv.k[2, 3].data_ptr()
    assert values.data_ptr() == kv.v[2, 3].data_ptr()
    for length in (1, 63, 64, 65, 99, 100):
        keys, values = kv.view(2, table, length)
        assert torch.equal(keys, k[:length])
        assert torch.equal(values, v[:length])
        assert keys.stride() == k.stride()
    # Layer 2 of the model, k = 3: the second layer of a window that starts at layer 0 or 2.
    for start, physical in ((0, 1), (2, 3)):
        low = [LOW | (4 + start * kv.pages)]
        keys, _ = kv.view(2, low, 64, Window(k0=1, width=2))
        assert keys.data_ptr() == kv.k[physical, 4].data_ptr()
    with pytest.raises(AssertionError, match="padding"):
        kv.view(0, [], 0)


@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_hybrid"])
def test_a_plan_reads_and_writes_where_its_tables_say(loaded, name):
    model = loaded(name)
    slots, state = make_kv(model, slots=3), make_state(model, slots=3)
    paged = KVCache(model.config, pages=9, page_tokens=64, dtype=model.dtype, width=2)
    paged.fill_poison()
    paged_state = make_state(model, slots=3)
    tables = {2: [7, 0, 4], 0: [5, 8, 2]}
    spec = SamplingSpec(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
        presence_penalty=0.0, frequency_penalty=0.0, seed=0, logprobs=None, max_tokens=4,
        min_tokens=0, stop_token_ids=[],
    )  # fmt: skip

    class OnPages:
        """A plan over slots, with pages for its slots."""

        def __init__(self, plan):
            self._plan = plan
            rows = [tables[slot] for slot in plan.slots.tolist()]
            token_rows = [tables[slot] for slot in plan.token_slots.tolist()]
            self.block_tables = np.concatenate(rows).astype(np.uint32)
            self.table_offsets = np.cumsum([0, *map(len, rows)])
            self.token_pages = np.array(
                [row[at // 64] for row, at in zip(token_rows, plan.positions, strict=True)]
            )
            self.stream_k0 = 5

        def __getattr__(self, name):
            return getattr(self._plan, name)

    prompts = {2: random_prompt(127, 3), 0: random_prompt(64, 4)}
    rows = [(slot, slot, 0, prompt, spec, prompt, []) for slot, prompt in prompts.items()]
    following = [
        (slot, slot, len(prompt), [9], spec, prompt, [9]) for slot, prompt in prompts.items()
    ]
    for plan in (build_plan(rows, decode=False), build_plan(following, decode=True)):
        expected = runner.ModelRunner(model, slots, state).forward(plan)
        assert runner.forward_batch(OnPages(plan), paged).window == Window(5, 2)
        logits = runner.ModelRunner(model, paged, paged_state).forward(OnPages(plan))
        assert torch.equal(logits, expected)
    # Slot 0 grew into its second page, slot 2 has filled two of its three.
    assert torch.isfinite(paged.k[:, 8, 0]).all()
    assert paged.k[:, 8, 1:].isnan().all()
    assert paged.k[:, [1, 2, 3, 4, 6]].isnan().all()


@pytest.mark.parametrize("label", FORMATS)
def test_planned_pages_have_the_bytes_of_the_pool(loaded, label):
    config = loaded("tiny_qwen3_d128").config
    for width in (1, 2, 3):
        kv = KVCache(
            config, pages=5, page_tokens=64, dtype=torch.float32, width=width,
            kv_format=FORMATS[label],
        )  # fmt: skip
        planned = plan_pages(kv.pool.layout, pages=5, page_tokens=64, width=width)
        tensors = kv.pool.tensors.values()
        assert planned.pool_bytes == sum(tensor.nbytes for tensor in tensors) == kv.bytes_total
        assert planned.raw_page_bytes == sum(tensor[:, 0].nbytes for tensor in tensors)
        assert planned.low_page_bytes == sum(tensor[:width, 0].nbytes for tensor in tensors)
        assert planned.low_pages_per_raw_page == {1: 3, 2: 1, 3: 1}[width]
        assert planned.low_tokens_per_raw_page == 64 * planned.low_pages_per_raw_page
    for width in (0, 4, -1, True, 1.0):
        for refused in (
            lambda width=width: plan_pages(kv.pool.layout, pages=5, page_tokens=64, width=width),
            lambda width=width: KVCache(
                config, pages=5, page_tokens=64, dtype=torch.float32, width=width
            ),
        ):
            with pytest.raises(ConfigError, match="accepted is 1 to the 3 layers"):
                refused()
