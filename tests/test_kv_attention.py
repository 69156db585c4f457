"""Attention of the reference backend over every KV format, against fp64 over what is stored.

kv_formats.md section 7 (kernel row) and section 8 items 2, 16 and 20: all head sizes, group sizes
and formats; several query rows of a prefill give what sequential decode steps give.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from headrace.backends.torch_ops import TorchBackend
from headrace.bench.kv import every_format
from headrace.kv.cache import KVCache
from headrace.kv.codecs import decode, rotate_queries, unrotate_outputs
from headrace.kv.tables import NO_WINDOW
from headrace.models.batch import PrefillSegment
from headrace.models.known import KNOWN_CONFIGS

KV_HEADS = 2
TOKENS = 130  # two tiles of 64 and a ragged one
SLOT = 1


def filled(kv_format, head_dim, group):
    config = replace(
        KNOWN_CONFIGS["qwen3-0.6b"],
        num_layers=1,
        num_heads=KV_HEADS * group,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
    )
    kv = KVCache(config, pages=3, page_tokens=TOKENS + 2, dtype=torch.float32, kv_format=kv_format)
    kv.fill_poison()
    generator = torch.Generator().manual_seed(head_dim + group)
    k, v = torch.randn((2, TOKENS, KV_HEADS, head_dim), generator=generator)
    q = torch.randn((TOKENS, KV_HEADS * group, head_dim), generator=generator)
    positions = torch.arange(TOKENS)
    kv.append(0, torch.full_like(positions, SLOT), positions, k, v)
    return kv, q


def exact(kv, q, length, group):
    """fp64 attention of one token `q [heads, D]` over the stored vectors."""
    kv_format = kv.format
    k = decode(kv_format, "k", kv.pool.rows("k", 0, SLOT, length)).double()
    v = decode(kv_format, "v", kv.pool.rows("v", 0, SLOT, length)).double()
    turned = rotate_queries(kv_format, q).double().view(KV_HEADS, group, -1)
    scores = torch.einsum("hgd,thd->hgt", turned, k) / math.sqrt(q.shape[-1])
    out = torch.einsum("hgt,thd->hgd", torch.softmax(scores, -1), v).reshape(q.shape)
    return unrotate_outputs(kv_format, out.float()).double(), float(v.abs().max())


def segments(*cuts):
    """The tokens between cuts, each piece at the row of its first token."""
    return [
        PrefillSegment(table=[SLOT], state_slot=0, start=start, length=end - start, offset=start)
        for start, end in itertools.pairwise(cuts)
    ]


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_format", every_format(torch.float32), ids=lambda f: f.label)
def test_decode_and_prefill_equal_fp64_over_the_stored_vectors(kv_format, head_dim, group):
    backend = TorchBackend("cpu", deterministic=False)
    kv, q = filled(kv_format, head_dim, group)
    prefill = torch.empty_like(q)
    backend.attention_prefill(q, 0, kv, segments(0, TOKENS), NO_WINDOW, out=prefill)
    for row in (0, 1, 62, 63, 64, 65, 127, 128, TOKENS - 1):  # both sides of every tile edge
        expected, largest = exact(kv, q[row], row + 1, group)
        one = q[row : row + 1]
        stepped = backend.attention_decode(one, 0, kv, [[SLOT]], [row + 1], NO_WINDOW)[0]
        for out in (prefill[row], stepped):
            error = out.double() - expected
            assert error.norm() <= 1e-3 * expected.norm()
            assert error.abs().max() <= 2e-3 * largest
        assert (prefill[row] - stepped).norm() <= 1e-5 * stepped.norm()


@pytest.mark.parametrize("kv_format", every_format(torch.float32), ids=lambda f: f.label)
def test_a_cut_prefill_has_the_bits_of_one_in_a_piece(kv_format):
    backend = TorchBackend("cpu", deterministic=True)
    kv, q = filled(kv_format, 64, 3)
    whole, parts = torch.empty_like(q), torch.empty_like(q)
    for out, cuts in ((whole, (0, TOKENS)), (parts, (0, 64, 128, TOKENS))):
        backend.attention_prefill(q, 0, kv, segments(*cuts), NO_WINDOW, out=out)
    assert torch.equal(parts, whole)
