"""INT-02: kernels form the addresses that exact integers give. `python probe_offsets.py`.

A pool of petabytes cannot be allocated, but its base can be moved: every plane begins so far ahead
of a small buffer that the row in question lands in the buffer. A kernel that multiplies in 32 bits
anywhere reads or writes somewhere else, and the process dies: run it in one of its own. Results are
compared, bit by bit, with those of the same launch on a pool of one page.
"""

import sys
from types import SimpleNamespace

import numpy as np
import torch
from kv_setup import DEVICE, noise

from headrace.backends.cuda import kv
from headrace.backends.cuda.kv import KVKernels, LowWindow
from headrace.backends.cuda.prefill_attention import PrefillAttention, reads_pool
from headrace.kv.formats import KVFormat, KVLayout, row_offset_bytes
from headrace.kv.planes import PlanePool
from headrace.models.batch import PrefillSegment

BF16 = torch.bfloat16
FORMATS = (
    KVFormat(name="auto", model_dtype=torch.float32),
    KVFormat(name="auto", model_dtype=BF16),
    KVFormat(name="fp8_e4m3", model_dtype=BF16),
    KVFormat(name="fp8_e4m3", model_dtype=BF16, fp8_block=64),
    KVFormat(name="int8_per_token_head", model_dtype=BF16, int8_rotate=True),
    KVFormat(name="turboquant_k8v4", model_dtype=BF16),
)
ROWS, CONTEXT, SMALL_PAGE, PROMPT = 3, 2**20, 16, 65
MAX_FLAT = 2**31


def signed(address):
    """The same 64 bits as a number that fits a signed argument."""
    return (address + 2**63) % 2**64 - 2**63


def moved(kernels, pool, geometry, flat_page, offset):
    """Point the kernels at a pool of `geometry` whose row (flat page, offset) is the first here."""
    kernels.pool = SimpleNamespace(**geometry)
    kernels.planes = tuple(
        signed(
            pool.tensors[name].data_ptr()
            - row_offset_bytes(
                plane,
                flat_page,
                offset,
                0,
                page_tokens=geometry["page_tokens"],
                kv_heads=pool.layout.kv_heads,
            )
        )
        if plane is not None
        else 0
        for name, plane in (
            (name, next((p for p in pool.layout.planes if p.name == name), None))
            for name in ("k", "k_scale", "v", "v_scale")
        )
    )


def random_geometry(rng, *, long_pages):
    """Layers, pages and tokens of a page, up to what a block table can number."""
    layers = int(rng.integers(1, 65))
    pages = int(rng.integers(1, 257)) if long_pages else int(rng.integers(1, MAX_FLAT // layers))
    page_tokens = int(rng.integers(2**19, 2**20 + 1)) if long_pages else SMALL_PAGE
    return layers, {"pages": pages, "page_tokens": page_tokens}


def probe(kv_format, head_dim, kv_heads, seed):
    """Append and gather one token, then attend over a million, near and far."""
    rng = np.random.default_rng([seed, head_dim, kv_heads])
    layout = KVLayout(kv_format=kv_format, layers=1, kv_heads=kv_heads, head_dim=head_dim)
    near = PlanePool.allocate(layout, pages=1, page_tokens=SMALL_PAGE, device=DEVICE)
    far = PlanePool.allocate(layout, pages=1, page_tokens=SMALL_PAGE, device=DEVICE)
    on_near, on_far = (
        KVKernels(pool, query_heads=kv_heads, max_rows=ROWS, max_context=CONTEXT)
        for pool in (near, far)
    )
    attentions = ()
    if reads_pool(kv_format):
        attentions = (PrefillAttention(on_near), PrefillAttention(on_far))
    k, v = (noise(1, kv_heads, head_dim, seed=seed + i).to(kv_format.model_dtype) for i in (0, 1))
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)

    # One token at the end of the longest pages.
    near.fill_poison()
    far.fill_poison()
    layers, geometry = random_geometry(rng, long_pages=True)
    layer, page = layers - 1, geometry["pages"] - 1
    offset = int(rng.integers(0, geometry["page_tokens"]))
    moved(on_far, far, geometry, layer * geometry["pages"] + page, offset)
    on_near.append(0, zero, zero, k, v)
    on_far.append(layer, zero + page, zero + offset, k, v)
    same_planes(near, far)
    # The layer of a LOW page is where the running number of the layer says.
    window = int(rng.integers(1, layers + 1))
    k0 = int(rng.integers(0, 2**31))
    start = int(rng.integers(0, layers - window + 1))
    flat = page + (start + (k0 + layer) % window) * geometry["pages"]
    moved(on_far, far, geometry, flat, offset)
    low_entry = page + start * geometry["pages"] - 2**31
    low = LowWindow(size=window, k0=torch.tensor([k0], dtype=torch.int32, device=DEVICE))
    outs = []
    for kernels, entry, first, where, options in (
        (on_near, 0, 0, 0, {}),
        (on_far, low_entry, offset, layer, {"low": low}),
    ):
        table = torch.tensor([entry], dtype=torch.int32, device=DEVICE)
        pair = torch.full((2, 1, kv_heads, head_dim), torch.nan, dtype=k.dtype, device=DEVICE)
        kernels.gather(where, table, first, k_out=pair[0], v_out=pair[1], **options)
        outs.append(pair)
    assert torch.equal(outs[0], outs[1])

    # A million tokens, all in one page far away.
    for token in range(1, SMALL_PAGE):
        pair = noise(2, 1, kv_heads, head_dim, seed=seed + token).to(kv_format.model_dtype)
        on_near.append(0, zero, zero + token, *pair)
    for name, tensor in near.tensors.items():
        far.tensors[name].copy_(tensor)
    layers, geometry = random_geometry(rng, long_pages=False)
    layer, page = layers - 1, geometry["pages"] - 1
    moved(on_far, far, geometry, layer * geometry["pages"] + page, 0)
    q = noise(ROWS, kv_heads, head_dim, seed=seed)
    lengths = torch.tensor([1, CONTEXT, 5000], dtype=torch.int32, device=DEVICE)
    outs = []
    for kernels, entry, where in ((on_near, 0, 0), (on_far, page, layer)):
        table = torch.full((ROWS, CONTEXT // SMALL_PAGE), entry, dtype=torch.int32, device=DEVICE)
        out = torch.full_like(q, torch.nan)
        kernels.attention_decode(where, q, table, lengths, out=out)
        outs.append(out)
    assert outs[0].isfinite().all()
    assert torch.equal(outs[0], outs[1])

    # The last tokens of a prompt, over the same pages; and all tokens of a page at once.
    if attentions:
        q = noise(PROMPT, kv_heads, head_dim, seed=seed + 1).to(kv_format.model_dtype)
        outs = []
        for attention, entry, where in zip(attentions, (0, page), (0, layer), strict=True):
            table = torch.full((CONTEXT // SMALL_PAGE,), entry, dtype=torch.int32, device=DEVICE)
            segment = PrefillSegment(
                table=table, state_slot=0, start=CONTEXT - PROMPT, length=PROMPT, offset=0
            )
            out = torch.full_like(q, torch.nan)
            attention.attend(where, q, [segment], out=out)
            outs.append(out)
        assert outs[0].isfinite().all()
        assert torch.equal(outs[0], outs[1])
    k, v = noise(2, SMALL_PAGE, kv_heads, head_dim, seed=seed + 2).to(kv_format.model_dtype)
    offsets = torch.arange(SMALL_PAGE, device=DEVICE)
    for kernels, entry, where in ((on_near, 0, 0), (on_far, page, layer)):
        kernels.append(where, torch.full_like(offsets, entry), offsets, k, v)
    same_planes(near, far)


def same_planes(one, other):
    """Both pools have the same bytes."""
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor.view(torch.uint8), other.tensors[name].view(torch.uint8)), name


def main():
    """Print the number of geometries."""
    count = 0
    kv._APPEND_WAVE = 1  # two vectors and more take the form for many tokens
    for seed in range(2):
        for kv_format in FORMATS:
            for head_dim, kv_heads in ((64, 64), (128, 2), (256, 64)):
                probe(kv_format, head_dim, kv_heads, seed)
                count += 1
    torch.cuda.synchronize()
    print(f"{count} geometries")
    return 0


if __name__ == "__main__":
    sys.exit(main())
