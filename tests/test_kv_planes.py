"""The KV pool: every byte where the layout says, none elsewhere, for every format."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kv_reference as reference
from headrace.bench.kv import bench_kv
from headrace.errors import ConfigError, NonFiniteKV
from headrace.kv.codecs import encode
from headrace.kv.formats import KVLayout, parse_kv_format, row_offset_bytes
from headrace.kv.planes import PlanePool
from kv_cases import AUTO, FORMATS, FP8_64, HEAD_DIMS, K8V4, distribution, every_format

LAYERS, KV_HEADS, HEAD_DIM = 2, 3, 64
GUARD = 0xA5


def layout_of(kv_format, *, layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM):
    return KVLayout(kv_format=kv_format, layers=layers, kv_heads=kv_heads, head_dim=head_dim)


def pool_of(kv_format, *, pages=4, page_tokens=16, **options):
    return PlanePool.allocate(layout_of(kv_format), pages=pages, page_tokens=page_tokens, **options)


def vectors(tokens, seed=0, kv_heads=KV_HEADS, head_dim=HEAD_DIM):
    """K and V in bf16, `[tokens, kv_heads, head_dim]`."""
    rows = distribution("t3", 2 * tokens * kv_heads, head_dim, seed).bfloat16()
    return rows.view(2, tokens, kv_heads, head_dim).unbind()


def index(*values):
    return torch.tensor(values, dtype=torch.int64)


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8)


def strided(layout, *, pages, page_tokens):
    """Planes with gaps after each head row, position and page, inside guarded memory.

    The pages of all layers are evenly spaced, since a flat page number is an address.
    """
    memory, tensors = {}, {}
    for plane in layout.planes:
        shape = layout.plane_shape(plane, pages, page_tokens)
        strides = [1]
        for extent in reversed(shape[2:]):
            strides.insert(0, strides[0] * extent + 32)
        strides.insert(0, strides[0] * pages)
        size = sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True)) + 1
        raw = torch.full((size * plane.dtype.itemsize + 512,), GUARD, dtype=torch.uint8)
        start = -raw.data_ptr() % 256
        memory[plane.name] = raw
        whole = raw[start : start + size * plane.dtype.itemsize].view(plane.dtype)
        tensors[plane.name] = whole.as_strided(shape, strides)
    return memory, PlanePool(layout, tensors, pages=pages, page_tokens=page_tokens)


@every_format
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tensors_have_the_sizes_of_the_layout(kv_format, head_dim):
    """KVD-02: the allocator's tensors against the one function, TP 1 and 2."""
    for kv_heads in (4, 2):
        layout = layout_of(kv_format, kv_heads=kv_heads, head_dim=head_dim)
        pool = PlanePool.allocate(layout, pages=3, page_tokens=48)
        assert sum(tensor.nbytes for tensor in pool.tensors.values()) == pool.bytes_total
        assert pool.bytes_total == 3 * layout.bytes_per_slot(48) == 144 * pool.bytes_per_token
        assert all(tensor.data_ptr() % 256 == 0 for tensor in pool.tensors.values())
        assert all(tensor.is_contiguous() for tensor in pool.tensors.values())


@every_format
@settings(deadline=None, max_examples=25)
@given(st.data())
def test_append_writes_its_rows_and_nothing_else(kv_format, data):
    """KVD-05, INT-02: whole planes against a byte array, rows where the offset function says."""
    pool = pool_of(kv_format)
    pool.fill_poison()
    model = {name: np.full(tensor.nbytes, 0xFF, np.uint8) for name, tensor in pool.tensors.items()}
    cells = st.tuples(st.integers(0, 3), st.integers(0, 15))
    for seed in range(data.draw(st.integers(1, 3))):
        layer = data.draw(st.integers(0, LAYERS - 1))
        targets = data.draw(st.lists(cells, max_size=5, unique=True))
        x = dict(zip("kv", vectors(len(targets), seed), strict=True))
        pages, positions = (index(*column) for column in ([t[i] for t in targets] for i in (0, 1)))
        pool.append(layer, pages, positions, x["k"], x["v"])
        for which in "kv":
            wanted = [plane for plane in pool.layout.planes if plane.which == which]
            for row, (page, position) in enumerate(targets):
                for head in range(KV_HEADS):
                    rows = encode(kv_format, which, x[which][row, head])
                    for plane, values in zip(wanted, rows, strict=True):
                        offset = row_offset_bytes(
                            *(plane, layer * pool.pages + page, position, head),
                            page_tokens=pool.page_tokens,
                            kv_heads=KV_HEADS,
                        )
                        model[plane.name][offset : offset + plane.row_bytes] = bytes_of(values)
    for name, tensor in pool.tensors.items():
        assert np.array_equal(bytes_of(tensor).numpy().ravel(), model[name])


@every_format
def test_strided_planes_hold_the_same_rows_and_keep_their_gaps(kv_format):
    """List 10 of section 8 (vllm#49716: scales beside their place in a padded pool)."""
    memory, padded = strided(layout_of(kv_format), pages=4, page_tokens=16)
    pool = pool_of(kv_format)
    k, v = vectors(40)
    cells = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:40]
    for target in (pool, padded):
        target.fill_poison()
        for layer in range(LAYERS):
            target.append(layer, cells // 16, cells % 16, k + layer, v - layer)
    flats = np.array([6, 1, 3])  # pages 2 of layer 1, 1 and 3 of layer 0
    for which in "kv":
        for rows, others in zip(
            pool.gather(which, flats, 40), padded.gather(which, flats, 40), strict=True
        ):
            assert torch.equal(bytes_of(rows), bytes_of(others))
    for name, tensor in padded.tensors.items():
        assert torch.equal(bytes_of(tensor), bytes_of(pool.tensors[name]))
        rows = bytes_of(tensor).numel()
        tensor.view(torch.uint8).fill_(GUARD)
        assert rows < memory[name].numel()
        assert (memory[name] == GUARD).all()


@every_format
def test_a_page_reads_the_same_in_a_poisoned_and_in_a_zeroed_pool(kv_format):
    k, v = vectors(5)
    results = []
    for poisoned in (True, False):
        pool = pool_of(kv_format)
        pool.fill_poison()
        if not poisoned:
            for tensor in pool.tensors.values():
                tensor.zero_()
        pool.append(1, index(2, 2, 2, 2, 2), torch.arange(5), k, v)
        results.append(pool.read(1, 2, 5))
    for left, right in zip(*results, strict=True):
        assert torch.isfinite(left).all()
        assert torch.equal(left, right)
        assert left.shape == (5, KV_HEADS, HEAD_DIM)
        assert left.dtype == torch.float32


@every_format
def test_a_page_saved_and_restored_has_the_same_bits(kv_format):
    """List 6 of section 8 (vllm#25800: scales stayed behind)."""
    pool = pool_of(kv_format)
    pool.fill_poison()
    for layer in range(LAYERS):
        pool.append(layer, torch.full((16,), 1), torch.arange(16), *vectors(16, seed=layer))
    before = {name: bytes_of(tensor).clone() for name, tensor in pool.tensors.items()}
    saved = {name: tensor[:, 1].clone() for name, tensor in pool.tensors.items()}
    pool.fill_poison()
    for name, tensor in pool.tensors.items():
        tensor[:, 3] = saved[name]
        assert torch.equal(bytes_of(tensor[:, 3]), before[name][:, 1])
        assert (bytes_of(tensor[:, :3]) == 0xFF).all()


@every_format
def test_slots_and_pages_hold_the_same_bits(kv_format):
    """One prompt in a slot of 64 tokens, in pages of 16 in any order, and token by token."""
    k, v = vectors(50)
    slots = pool_of(kv_format, pages=2, page_tokens=64)
    paged = pool_of(kv_format, pages=8, page_tokens=16)
    single = pool_of(kv_format, pages=2, page_tokens=64)
    table = index(6, 1, 7, 2)
    position = torch.arange(50)
    slots.append(0, torch.ones_like(position), position, k, v)
    paged.append(0, table[position // 16], position % 16, k, v)
    for t in range(50):
        single.append(0, index(1), index(t), k[t : t + 1], v[t : t + 1])
    for which in "kv":
        whole = slots.rows(which, 0, 1, 50)
        for rows, others in zip(whole, single.rows(which, 0, 1, 50), strict=True):
            assert torch.equal(rows, others)
        lengths = (16, 16, 16, 2)
        parts = [
            paged.rows(which, 0, page, length)
            for page, length in zip(table.tolist(), lengths, strict=True)
        ]
        gathered = paged.gather(which, table.numpy(), 50)
        for rows, copy, pieces in zip(whole, gathered, zip(*parts, strict=True), strict=True):
            assert torch.equal(rows, torch.cat(pieces))
            assert torch.equal(rows, copy)
            assert copy.is_contiguous()


@every_format
def test_ranks_write_the_bytes_of_their_heads(kv_format):
    """List 7 of section 8 (vllm#23813): a rank holds every second half of the heads."""
    k, v = vectors(8, kv_heads=4)
    whole = PlanePool.allocate(layout_of(kv_format, kv_heads=4), pages=1, page_tokens=16)
    zero = torch.zeros(8, dtype=torch.int64)
    whole.append(0, zero, torch.arange(8), k, v)
    for rank in range(2):
        heads = slice(2 * rank, 2 * rank + 2)
        half = PlanePool.allocate(layout_of(kv_format, kv_heads=2), pages=1, page_tokens=16)
        half.append(0, zero, torch.arange(8), k[:, heads], v[:, heads])
        for which in "kv":
            for left, right in zip(
                whole.rows(which, 0, 0, 8), half.rows(which, 0, 0, 8), strict=True
            ):
                assert torch.equal(left[:, heads], right)


@every_format
def test_attention_over_many_equal_values_returns_the_value(kv_format):
    """List 1 of section 8: 131,072 tokens; what is stored is the same number for each of them."""
    tokens = 131_072
    layout = layout_of(kv_format, layers=1, kv_heads=1)
    pool = PlanePool.allocate(layout, pages=1, page_tokens=tokens)
    _, v = vectors(1, kv_heads=1)
    rng = torch.Generator().manual_seed(2)
    for start in range(0, tokens, 16_384):
        k = torch.randn(16_384, 1, HEAD_DIM, generator=rng).bfloat16()
        positions = torch.arange(start, start + 16_384)
        pool.append(0, torch.zeros_like(positions), positions, k, v.expand_as(k))
    keys, values = pool.read(0, 0, tokens)
    q = torch.randn(4, HEAD_DIM, generator=rng)
    out = torch.softmax(q @ keys[:, 0].t() / 8, dim=-1) @ values[:, 0]
    assert (out - values[0, 0]).norm(dim=-1).max() <= 1e-3 * values[0, 0].norm()


def test_auto_rows_are_views_of_the_model_dtype():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)[-16 * KV_HEADS * HEAD_DIM :]
    k = bits.view(torch.bfloat16).view(16, KV_HEADS, HEAD_DIM)
    pool = pool_of(AUTO)
    pool.append(0, torch.zeros(16, dtype=torch.int64), torch.arange(16), k, k)
    (stored,) = pool.rows("k", 0, 0, 16)
    assert stored.data_ptr() == pool.tensors["k"].data_ptr()
    assert torch.equal(stored.view(torch.int16), k.view(torch.int16))


@every_format
def test_no_tokens_change_nothing(kv_format):
    pool = pool_of(kv_format)
    pool.fill_poison()
    pool.append(0, index(), index(), *vectors(0))
    assert all((bytes_of(tensor) == 0xFF).all() for tensor in pool.tensors.values())
    assert pool.read(0, 0, 0)[0].shape == (0, KV_HEADS, HEAD_DIM)


@pytest.mark.parametrize("which", ["k", "v"])
@every_format
def test_checked_mode_names_the_place(kv_format, which):
    for value, checked in ((math.nan, True), (math.inf, True), (math.inf, False)):
        pool = pool_of(kv_format, checked=checked)
        pool.fill_poison()
        x = dict(zip("kv", vectors(3), strict=True))
        x[which][1, 2, 5] = value
        arguments = 1, index(3, 0, 2), index(7, 11, 13), x["k"], x["v"]
        if not checked:
            pool.append(*arguments)
            continue
        words = f"{which.upper()} of layer 1, row 1, position 11 .*0.* is {value} at head 2.*5"
        with pytest.raises(NonFiniteKV, match=words):
            pool.append(*arguments)
        assert all((bytes_of(tensor) == 0xFF).all() for tensor in pool.tensors.values())


def test_planes_that_do_not_fit_are_refused():
    """List 4 of section 8 (NVIDIA/TensorRT-LLM#16916): a missing scale plane has no default."""
    pool = pool_of(K8V4)
    sizes = {"pages": 4, "page_tokens": 16}
    good = dict(pool.tensors)
    memory = torch.zeros(good["k"].numel() + 512, dtype=torch.int8)
    start = -memory.data_ptr() % 256 + 64
    unaligned = memory[start : start + good["k"].numel()].view(good["k"].shape)
    for change, words in (
        ({"k_scale": None}, "k, k_scale, v, v_scale, got k, v, v_scale"),
        ({"extra": good["k"]}, "extra"),
        ({"v": good["v"].view(torch.int8)}, "v must be torch.uint8"),
        ({"v": good["v"][:, :3]}, "v must be"),
        ({"k": good["k"].transpose(3, 4).contiguous().transpose(3, 4)}, "row stride"),
        ({"k": good["k"].transpose(0, 1).contiguous().transpose(0, 1)}, "layer stride"),
        ({"k": unaligned}, "aligned"),
    ):
        tensors = {name: entry for name, entry in (good | change).items() if entry is not None}
        with pytest.raises(ConfigError, match=words):
            PlanePool(pool.layout, tensors, **sizes)
    with pytest.raises(TypeError):
        pool.tensors["k"] = good["k"]
    k, v = vectors(2)
    for arguments in ((index(0, 1, 2), index(0, 1, 2), k, v), (index(0, 1), index(0), k, v)):
        with pytest.raises(AssertionError):
            pool.append(0, *arguments)
    with pytest.raises(AssertionError):
        pool.read(0, 0, 17)


def test_a_pool_larger_than_memory_is_refused_before_it_is_made():
    layout = layout_of(FP8_64)
    for pages, page_tokens, words in (
        (2**20, 2**20, "max_batch_size or max_context"),
        (0, 16, "pages=0"),
        (4, -1, "page_tokens=-1"),
        (2**30, 2**40, "64-bit"),
    ):
        with pytest.raises(ConfigError, match=words):
            PlanePool.allocate(layout, pages=pages, page_tokens=page_tokens)


def test_stored_rows_are_those_of_the_reference():
    """The pool, the codecs and the scalar implementation, once end to end."""
    pool = pool_of(K8V4)
    k, v = vectors(4)
    pool.append(1, index(3, 3, 0, 1), index(0, 1, 15, 7), k, v)
    for row, (page, position) in enumerate(((3, 0), (3, 1), (0, 15), (1, 7))):
        for head in range(KV_HEADS):
            for which, x in (("k", k), ("v", v)):
                codes, scales = reference.encode(K8V4.name, which, x[row, head].float().numpy())
                at = 1, page, position, head
                assert pool.tensors[which][at].tolist() == codes
                assert pool.tensors[f"{which}_scale"][at].view(torch.int16).tolist() == scales


def test_bench_reports_each_format_at_each_context():
    report = bench_kv(contexts=(16, 80), kv_heads=2, group=3, head_dim=64, layers=5, repeat=2)
    rows = [(row["kv_dtype"], row["context"]) for row in report.rows]
    labels = [entry.label for entry in FORMATS]
    assert rows == [(label, context) for label in labels for context in (16, 80)]
    for row, kv_format in zip(report.rows[::2], FORMATS, strict=True):
        size = layout_of(kv_format, layers=5, kv_heads=2).bytes_per_token
        assert row["bytes_per_token"] == size
        assert set(report.columns) <= set(row)
        assert 0 <= row["rel_l2"] < 0.15
        assert row["attention_ms_median"] > 0
        # What only a GPU measures is there, and empty.
        for name in ("attention_device_ms_median", "append_device_us_per_token", "floor_ratio"):
            assert row[name] is None
    errors = {row["kv_dtype"]: row["rel_l2"] for row in report.rows if row["context"] == 80}
    assert errors["auto"] < 1e-5 < errors[INT8_LABEL] < errors[K8V4.label]
    with pytest.raises(ConfigError, match="context"):
        bench_kv(contexts=(0,))
    with pytest.raises(ConfigError, match="head_dim"):
        bench_kv(contexts=(16,), head_dim=96)
    only = bench_kv(
        formats=[parse_kv_format("auto", model_dtype=torch.float32)], contexts=(16,), head_dim=96
    )
    assert [row["kv_dtype"] for row in only.rows] == ["auto"]


INT8_LABEL = "int8_per_token_head"
