"""Fixed-slot KV cache: one slot holds the keys and values of one request over all layers.

A slot is a page of `max_context` tokens of a `PlanePool`, which owns the memory; who holds which
slot is the scheduler's business. Memory is not initialised, so its pages cost nothing before first
use and stale rows may hold NaN: whoever reads stays within the length of the request.
"""

import torch

from headrace.kv.codecs import rotate_queries, unrotate_outputs
from headrace.kv.formats import AUTO, KVFormat, KVLayout
from headrace.kv.planes import PlanePool
from headrace.models.config import ModelConfig


def kv_layout(config: ModelConfig, kv_format: KVFormat) -> KVLayout:
    """The KV of a model in a format; its sizes are the only source of bytes per token and slot.

    Raises `ConfigError` if the format cannot store the model's heads.
    """
    return KVLayout(
        kv_format=kv_format,
        layers=config.kv_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


class SlotKVCache:
    """KV of `slots` requests of up to `max_context` tokens.

    dtype: of the model, and of what `auto` stores. kv_format: `auto` unless given. checked:
    `append` raises on NaN and infinity.

    Raises
    ------
    ConfigError
        A size is not positive, the format cannot store the model's heads, or the pools do not fit
        in the memory that is free now. Nothing has been allocated then.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        kv_format: KVFormat | None = None,
        checked: bool = False,
    ) -> None:
        self.format = kv_format or KVFormat(name=AUTO, model_dtype=dtype)
        self.pool = PlanePool.allocate(
            kv_layout(config, self.format),
            pages=slots,
            page_tokens=max_context,
            device=device,
            checked=checked,
        )
        self.slots = slots
        self.max_context = max_context
        self.kv_heads = config.num_kv_heads
        self.dtype = dtype
        self.device = torch.device(device)
        self.bytes_per_token = self.pool.bytes_per_token
        self.bytes_total = self.pool.bytes_total

    @property
    def k(self) -> torch.Tensor:
        """Keys (codes, if quantised) `[KV layers, slots, max_context, kv_heads, row]`."""
        return self.pool.tensors["k"]

    @property
    def v(self) -> torch.Tensor:
        """Values (codes, if quantised) `[KV layers, slots, max_context, kv_heads, row]`."""
        return self.pool.tensors["v"]

    def append(
        self,
        layer: int,
        slots: torch.Tensor,
        positions: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Store `k, v [T, kv_heads, head_dim]` of new tokens, quantised if the format says so."""
        self.pool.append(layer, slots, positions, k, v)

    def view(self, layer: int, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """First `length` tokens of a slot, `[length, kv_heads, head_dim]`, as attention reads them.

        `auto`: views of what is stored. Quantised: fp32 values, rotated for rotated formats.
        """
        if self.format.quantised:
            return self.pool.read(layer, slot, length)
        [k] = self.pool.rows("k", layer, slot, length)
        [v] = self.pool.rows("v", layer, slot, length)
        return k, v

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
