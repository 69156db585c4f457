"""The KV cache of a model: one address for fixed slots, pages and windows of layers.

A `PlanePool` owns the memory: N pages of P tokens over all KV layers. Slots are the same pool with
P = `max_context`, one page a request. Who holds which page is the scheduler's business: a block
table (`tables`) says where the tokens of a row are. Memory is not initialised, so its pages cost
nothing before first use and stale rows may hold NaN: whoever reads stays within the length of the
request. The values and strides that attention sees do not depend on the layout, so neither do its
bits.
"""

import torch

from headrace.errors import ConfigError
from headrace.kv.codecs import decode, rotate_queries, unrotate_outputs
from headrace.kv.formats import AUTO, KVFormat, KVLayout
from headrace.kv.planes import PlanePool
from headrace.kv.tables import NO_WINDOW, Table, Window, entries_of, flat_pages
from headrace.models.config import ModelConfig


def kv_layout(config: ModelConfig, kv_format: KVFormat) -> KVLayout:
    """The KV of a model in a format; its sizes are the only source of bytes per token and page.

    Raises `ConfigError` if the format cannot store the model's heads.
    """
    return KVLayout(
        kv_format=kv_format,
        layers=config.kv_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


class KVCache:
    """KV in `pages` pages of `page_tokens` tokens over all KV layers.

    width: physical layers of a LOW page; means nothing to tables without LOW entries. dtype: of the
    model, and of what `auto` stores. kv_format: `auto` unless given. checked: `append` raises on
    NaN and infinity.

    Raises
    ------
    ConfigError
        A size is not positive, the width is beyond the KV layers, the format cannot store the
        model's heads, or the pools do not fit in the memory that is free now. Nothing has been
        allocated then.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        width: int = 1,
        device: torch.device | str = "cpu",
        kv_format: KVFormat | None = None,
        checked: bool = False,
    ) -> None:
        self.format = kv_format or KVFormat(name=AUTO, model_dtype=dtype)
        layout = kv_layout(config, self.format)
        check_width(width, layout.layers)
        self.pool = PlanePool.allocate(
            layout, pages=pages, page_tokens=page_tokens, device=device, checked=checked
        )
        self.pages = pages
        self.page_tokens = page_tokens
        self.width = width
        self.kv_heads = config.num_kv_heads
        self.dtype = dtype
        self.device = torch.device(device)
        self.bytes_per_token = self.pool.bytes_per_token
        self.bytes_total = self.pool.bytes_total

    @property
    def k(self) -> torch.Tensor:
        """Keys (codes, if quantised) `[KV layers, pages, page_tokens, kv_heads, row]`."""
        return self.pool.tensors["k"]

    @property
    def v(self) -> torch.Tensor:
        """Values (codes, if quantised) `[KV layers, pages, page_tokens, kv_heads, row]`."""
        return self.pool.tensors["v"]

    def append(
        self,
        layer: int,
        pages: torch.Tensor,
        offsets: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Store `k, v [T, kv_heads, head_dim]` of new tokens, quantised if the format says so.

        pages, offsets: int64 `[T]`, base of the HIGH page of each token and its place in it. A LOW
        page never takes new tokens: its next layer would overwrite them.
        """
        self.pool.append(layer, pages, offsets, k, v)

    def view(
        self, layer: int, table: Table, length: int, window: Window = NO_WINDOW
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """First `length` tokens of a row, `[length, kv_heads, head_dim]`, as attention reads them.

        `auto`: what is stored, a view if one page holds it and a copy of the pages if not.
        Quantised: fp32 values, rotated for rotated formats. Reads nothing beyond `length`.
        """
        assert length > 0, "padding rows read nothing"
        k, v = self._rows(layer, table, length, window)
        if not self.format.quantised:
            return k[0], v[0]
        return decode(self.format, "k", k), decode(self.format, "v", v)

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Queries `[..., head_dim]` in the dtype and domain that `view` returns keys in."""
        return rotate_queries(self.format, q.float()) if self.format.quantised else q

    def outputs(self, out: torch.Tensor) -> torch.Tensor:
        """Attention outputs over what `view` returns, back in the model's domain and dtype."""
        if not self.format.quantised:
            return out
        return unrotate_outputs(self.format, out).to(self.dtype)

    def fill_poison(self) -> None:
        """Fill all memory with 0xFF bytes, to find reads beyond a length."""
        self.pool.fill_poison()

    def _rows(
        self, layer: int, table: Table, length: int, window: Window
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Planes of K and of V `[length, kv_heads, row]` as they are stored."""
        count = -(-length // self.page_tokens)
        if count == 1:
            flat = flat_pages(int(table[0]), layer, self.pages, window)
            at = *divmod(flat, self.pages), length
            return self.pool.rows("k", *at), self.pool.rows("v", *at)
        flats = flat_pages(entries_of(table, count), layer, self.pages, window)
        return self.pool.gather("k", flats, length), self.pool.gather("v", flats, length)


def check_width(width: int, layers: int) -> None:
    """Refuse a width that a LOW page cannot have; `ConfigError` names it and the limit."""
    if type(width) is not int or not 1 <= width <= layers:
        raise ConfigError(f"width={width!r}: accepted is 1 to the {layers} layers with KV")
