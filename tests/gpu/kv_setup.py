"""Pools, block tables and float64 attention that the KV kernel tests share."""

from dataclasses import dataclass

import torch

from headrace.backends.cuda.kv import KVKernels, LowWindow
from headrace.kv.codecs import decode, encode, rotate_queries, unrotate_outputs
from headrace.kv.formats import KVFormat, KVLayout
from headrace.kv.planes import PlanePool

DEVICE = torch.device("cuda")
# Flat page of a table entry that nobody may follow.
NOWHERE = 2**31 - 1


def noise(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


@dataclass
class Case:
    """A pool with the KV of some rows in one layer, and what it takes to read them.

    k, v: by row `[length, kv_heads, head_dim]` in the model dtype, as they were encoded.
    """

    pool: PlanePool
    layer: int
    table: torch.Tensor
    lengths: torch.Tensor
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    low: LowWindow | None

    def kernels(self, query_heads, max_context=None):
        return KVKernels(
            self.pool,
            query_heads=query_heads,
            max_rows=max(len(self.lengths), 1),
            max_context=max_context or max(int(self.lengths.max()), 1),
        )


def new_pool(kv_format, *, layers, kv_heads, head_dim, pages, page_tokens):
    layout = KVLayout(kv_format=kv_format, layers=layers, kv_heads=kv_heads, head_dim=head_dim)
    return PlanePool.allocate(layout, pages=pages, page_tokens=page_tokens, device=DEVICE)


def write_rows(pool, which, flat_pages, offsets, x):
    """Encode with the reference codec and store at (flat page, offset)."""
    names = ("k", "k_scale") if which == "k" else ("v", "v_scale")
    for name, rows in zip(names, encode(pool.layout.kv_format, which, x), strict=False):
        pool.tensors[name].flatten(0, 1).index_put_((flat_pages, offsets), rows)


def build(kv_format: KVFormat, head_dim, kv_heads, lengths, layout="slots", *, seed=0, scale=1.0):
    """The same vectors in one of three layouts: slots, permuted pages, pages with LOW windows."""
    layers, layer, window = 5, 3, 2
    longest = max(*lengths, 1)
    page_tokens = longest if layout == "slots" else 48
    need = [-(-length // page_tokens) for length in lengths]
    pages = sum(need) + 2
    pool = new_pool(
        kv_format,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        pages=pages,
        page_tokens=page_tokens,
    )
    pool.fill_poison()
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).tolist()
    k0 = 6
    table = torch.full((len(lengths), max(*need, 1)), NOWHERE, dtype=torch.int64)
    ks, vs = [], []
    for row, length in enumerate(lengths):
        shape = (length, kv_heads, head_dim)
        k = (noise(*shape, seed=100 * seed + 2 * row) * scale).to(kv_format.model_dtype)
        v = (noise(*shape, seed=100 * seed + 2 * row + 1) * scale).to(kv_format.model_dtype)
        ks.append(k)
        vs.append(v)
        flat = []
        for page in range(need[row]):
            base, low = order.pop(), layout == "windows" and page % 3 != 1
            start = page % (layers - window + 1)  # a LOW page may start at any physical layer
            table[row, page] = base + start * pages - 2**31 if low else base
            flat.append(base + (start + (k0 + layer) % window if low else layer) * pages)
        tokens = torch.arange(length)
        flat_pages = torch.tensor(flat, dtype=torch.int64)[tokens // page_tokens].to(DEVICE)
        offsets = (tokens % page_tokens).to(DEVICE)
        write_rows(pool, "k", flat_pages, offsets, k)
        write_rows(pool, "v", flat_pages, offsets, v)
    low = None
    if layout == "windows":
        low = LowWindow(size=window, k0=torch.tensor([k0], dtype=torch.int32, device=DEVICE))
    return Case(
        pool,
        layer,
        table.to(torch.int32).to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        ks,
        vs,
        low,
    )


def stored(kv_format, which, x):
    """What attention must see of vectors: encoded and decoded, in the code domain, fp32."""
    return decode(kv_format, which, encode(kv_format, which, x))


def exact_attention(kv_format, q, k, v):
    """Float64 attention of `q [heads, D]` over stored `k, v [n, kv_heads, D]`, code domain."""
    heads, head_dim = q.shape
    kv_heads = k.shape[1]
    queries = rotate_queries(kv_format, q.float()).double()
    queries = queries.view(kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("hgd,nhd->hgn", queries, k.double()) * head_dim**-0.5
    out = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v.double())
    if not kv_format.rotated:
        return out.reshape(heads, head_dim)
    # The inverse rotation of the reference is fp32: far below the tolerance.
    return unrotate_outputs(kv_format, out.reshape(heads, head_dim).float()).double()


def run_decode(case, kernels, q, rows=None):
    """Output `[B, heads, D]` for queries in any dtype; rows: which rows of the case, in order."""
    out = torch.full_like(q, float("nan"))
    table, lengths = case.table, case.lengths
    if rows is not None:
        index = torch.tensor(rows, device=DEVICE)
        table, lengths = table[index].contiguous(), lengths[index].contiguous()
    kernels.attention_decode(case.layer, q, table, lengths, out=out, low=case.low)
    return out
