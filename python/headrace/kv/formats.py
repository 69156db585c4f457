"""KV formats by name: which planes a format has and how many bytes they take.

`planes` is the only place that knows the sizes of a format; the pools, copies and `headrace plan`
all derive theirs from it, since two computations of one number drift apart (kvcached#424).

A plane is one tensor `[layers, pages, page_tokens, kv_heads, row]`. A fixed slot is a page of
`max_context` tokens. All sizes and offsets are exact integers, refused above 63 bits.
"""

import math
import operator
from dataclasses import dataclass
from typing import Literal, SupportsIndex, TypeAlias

import torch

from headrace.errors import ConfigError

Which: TypeAlias = Literal["k", "v"]

AUTO = "auto"
FP8 = "fp8_e4m3"
INT8 = "int8_per_token_head"
K8V4 = "turboquant_k8v4"
KV_FORMATS = (AUTO, FP8, INT8, K8V4)

# The one short name that vLLM has for the same number format.
_ALIASES = {"fp8": FP8}

FP8_BLOCKS = (0, 64)  # channels with one scale; 0: the whole vector
# Measured sizes of the rotation; others would need constants of their own (`A_D` of k8v4).
ROTATED_HEAD_DIMS = (64, 128, 256)
# A row of codes is loaded in pieces of 16 bytes.
CODE_ROW_BYTES = 16
MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# torch and C index with signed 64-bit numbers.
MAX_BYTES = 2**63 - 1
# A block table entry has 31 bits for `page + layer * pages`.
MAX_FLAT_PAGES = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFormat:
    """One of the four formats with its options.

    name: one of `KV_FORMATS`.
    model_dtype: dtype of K and V as the model computes them; what `auto` stores.
    fp8_block: channels that share a scale in `fp8_e4m3`, 0 for the whole vector.
    int8_rotate: `int8_per_token_head` codes rotated vectors.

    Raises
    ------
    ConfigError
        A name or dtype is unknown, or an option does not belong to the format.
    """

    name: str
    model_dtype: torch.dtype
    fp8_block: int = 0
    int8_rotate: bool = False

    def __post_init__(self) -> None:
        if self.name not in KV_FORMATS:
            raise ConfigError(f"KV format {self.name!r}: accepted is one of {_listed(KV_FORMATS)}")
        if self.model_dtype not in MODEL_DTYPES:
            raise ConfigError(
                f"model_dtype={self.model_dtype!r}: accepted is one of {_listed(MODEL_DTYPES)}"
            )
        # 0.0 and False equal 0, and a format is compared and hashed by its fields.
        if type(self.fp8_block) is not int or self.fp8_block not in FP8_BLOCKS:
            raise ConfigError(
                f"fp8_block={self.fp8_block!r}: accepted is one of {_listed(FP8_BLOCKS)}"
            )
        if not isinstance(self.int8_rotate, bool):
            raise ConfigError(f"int8_rotate={self.int8_rotate!r}: accepted is True or False")
        if self.fp8_block and self.name != FP8:
            raise ConfigError(
                f"fp8_block={self.fp8_block} belongs to {FP8}, the KV format is {self.name}"
            )
        if self.int8_rotate and self.name != INT8:
            raise ConfigError(f"int8_rotate belongs to {INT8}, the KV format is {self.name}")

    @property
    def rotated(self) -> bool:
        """Whether K and V are stored rotated: queries must be rotated, outputs rotated back."""
        return self.int8_rotate or self.name == K8V4

    @property
    def quantised(self) -> bool:
        """Whether stored values differ from those of the model."""
        return self.name != AUTO

    @property
    def label(self) -> str:
        """Name with the options that are set, for tables and messages."""
        if self.fp8_block:
            return f"{self.name}, block {self.fp8_block}"
        return f"{self.name}, rotated" if self.int8_rotate else self.name

    def check_head_dim(self, head_dim: int) -> None:
        """Refuse a head size that the format cannot store.

        Raises
        ------
        ConfigError
            Names the format and the head size.
        """
        refused = f"KV format {self.label} with head_dim {head_dim}: "
        if type(head_dim) is not int or head_dim <= 0:
            raise ConfigError(f"{refused}head_dim must be a positive integer")
        if self.rotated and head_dim not in ROTATED_HEAD_DIMS:
            raise ConfigError(f"{refused}accepted is one of {_listed(ROTATED_HEAD_DIMS)}")
        if self.quantised and head_dim % CODE_ROW_BYTES:
            raise ConfigError(f"{refused}accepted is a multiple of {CODE_ROW_BYTES}")
        if self.fp8_block and head_dim % self.fp8_block:
            raise ConfigError(f"{refused}accepted is a multiple of {self.fp8_block}")


def parse_kv_format(
    name: str, *, fp8_block: int = 0, int8_rotate: bool = False, model_dtype: torch.dtype
) -> KVFormat:
    """Return the format that a user means by `name`.

    Accepts the names of `KV_FORMATS`, `fp8` for `fp8_e4m3`, and the model's own dtype by name for
    `auto`.

    Raises
    ------
    ConfigError
        The name is unknown or another dtype than the model's, or an option does not belong to it.
    """
    if not isinstance(name, str):
        raise ConfigError(f"kv_dtype={name!r}: accepted is one of {_listed(KV_FORMATS)}")
    canonical = _ALIASES.get(name, name)
    floats = {str(dtype).removeprefix("torch."): dtype for dtype in MODEL_DTYPES}
    if name in floats:
        if floats[name] != model_dtype:
            raise ConfigError(
                f"kv_dtype={name!r} with a model in {model_dtype}: an unquantised KV has the dtype "
                f"of the model; accepted is {AUTO}"
            )
        canonical = AUTO
    elif canonical not in KV_FORMATS:
        raise ConfigError(
            f"kv_dtype={name!r}: accepted is one of {_listed(KV_FORMATS)}, "
            f"{_listed(tuple(_ALIASES))} or the model's own dtype"
        )
    return KVFormat(
        name=canonical, model_dtype=model_dtype, fp8_block=fp8_block, int8_rotate=int8_rotate
    )


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of KV: what it holds of one (layer, token, KV head)."""

    name: str
    which: Which
    dtype: torch.dtype
    row_elements: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one (layer, token, KV head)."""
        return self.row_elements * self.dtype.itemsize


def planes(kv_format: KVFormat, head_dim: int) -> tuple[Plane, ...]:
    """All planes of a format: K codes, K scales, V codes, V scales (`auto` has no scales).

    FP8 codes are bytes (uint8), two 4-bit codes share one; scales are halves.

    Raises
    ------
    ConfigError
        The format cannot store `head_dim`.
    """
    kv_format.check_head_dim(head_dim)
    if not kv_format.quantised:
        dtype = kv_format.model_dtype
        return Plane("k", "k", dtype, head_dim), Plane("v", "v", dtype, head_dim)
    code = torch.uint8 if kv_format.name == FP8 else torch.int8
    blocks = head_dim // kv_format.fp8_block if kv_format.fp8_block else 1
    v_codes = Plane("v", "v", code, head_dim)
    if kv_format.name == K8V4:
        v_codes = Plane("v", "v", torch.uint8, head_dim // 2)
    return (
        Plane("k", "k", code, head_dim),
        Plane("k_scale", "k", torch.float16, blocks),
        v_codes,
        Plane("v_scale", "v", torch.float16, blocks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The KV of one model in one format on one rank.

    layers: layers that have KV. kv_heads: KV heads of this rank.

    Raises
    ------
    ConfigError
        A size is not a positive integer, or the format cannot store `head_dim`.
    """

    kv_format: KVFormat
    layers: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads"):
            positive(name, getattr(self, name))
        self.kv_format.check_head_dim(self.head_dim)

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The planes, in the order of `planes`."""
        return planes(self.kv_format, self.head_dim)

    @property
    def bytes_per_token_head(self) -> int:
        """Bytes of one token of one layer and KV head, over all planes."""
        return sum(plane.row_bytes for plane in self.planes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers, KV heads and planes."""
        return checked_bytes(self.layers, self.kv_heads, self.bytes_per_token_head)

    def bytes_per_page(self, page_tokens: int) -> int:
        """Bytes of one page over all layers; also of one slot, with `page_tokens = max_context`."""
        return checked_bytes(positive("page_tokens", page_tokens), self.bytes_per_token)

    def bytes_per_slot(self, max_context: int) -> int:
        """Bytes of one slot over all layers."""
        return self.bytes_per_page(positive("max_context", max_context))

    def pool_bytes(self, pages: int, page_tokens: int) -> int:
        """Bytes of a pool: the sum of the sizes of all its tensors.

        Raises
        ------
        ConfigError
            A size is not positive, the bytes exceed 63 bits, or a page number 31.
        """
        flat_pages = self.layers * positive("pages", pages)
        if flat_pages > MAX_FLAT_PAGES:
            raise ConfigError(
                f"{self.layers} layers x {pages} pages: at most {MAX_FLAT_PAGES:,} can be numbered"
            )
        return checked_bytes(pages, self.bytes_per_page(page_tokens))

    def plane_shape(self, plane: Plane, pages: int, page_tokens: int) -> tuple[int, ...]:
        """Shape of the tensor of a plane, `[layers, pages, page_tokens, kv_heads, row]`."""
        return self.layers, pages, page_tokens, self.kv_heads, plane.row_elements


def row_offset_bytes(
    plane: Plane,
    flat_page: SupportsIndex,
    position: SupportsIndex,
    head: SupportsIndex,
    *,
    page_tokens: SupportsIndex,
    kv_heads: SupportsIndex,
) -> int:
    """Bytes from the base of a contiguous plane to one row.

    flat_page: `layer * pages + page`. Every number may be a fixed-width one, such as a numpy int32
    from a block table: it is widened before anything is multiplied.

    Raises
    ------
    ConfigError
        The offset does not fit 63 bits.
    """
    page, token, row = operator.index(flat_page), operator.index(position), operator.index(head)
    tokens, heads = operator.index(page_tokens), operator.index(kv_heads)
    assert page >= 0, "pages count from 0"
    assert 0 <= token < tokens, "a position lies in its page"
    assert 0 <= row < heads, "a head lies in its row"
    return checked_bytes((page * tokens + token) * heads + row, plane.row_bytes)


def checked_bytes(*factors: int) -> int:
    """Product of exact integers.

    Raises
    ------
    ConfigError
        The product does not fit a signed 64-bit number.
    """
    product = math.prod(factors)
    if product > MAX_BYTES:
        text = " x ".join(f"{factor:,}" for factor in factors)
        raise ConfigError(f"{text} = {product:,} bytes, more than 64-bit addresses")
    return product


def positive(name: str, value: int) -> int:
    """Return `value` if it is a positive integer.

    Raises
    ------
    ConfigError
        It is not; names the field and the value.
    """
    if type(value) is not int or value <= 0:
        raise ConfigError(f"{name}={value!r}: accepted is a positive integer")
    return value


def _listed(values: tuple[object, ...]) -> str:
    return ", ".join(str(value) for value in values)
