"""Memory arithmetic of one rank, a GPU: weights, KV, state, steps, and what fits in a budget.

Reads configurations, never weights. KV bytes come from the functions the KV cache itself uses, on
the configuration of one rank, so plan and pools cannot drift apart; those of the host tier and of
steps likewise come from the functions that size them for an engine. What a driver and libraries
take for themselves is an allowance; not counted is, on a CPU, the second, reordered copy of a tied
head.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headrace.backends.base import PREFILL_TILE
from headrace.backends.cuda.memory import step_bytes
from headrace.config import MAX_BATCH_SIZE
from headrace.errors import ConfigError, ModelError
from headrace.kv.cache import check_width
from headrace.kv.cache import kv_layout as layout_of
from headrace.kv.formats import KVLayout, parse_kv_format
from headrace.loading.gguf_file import GgufFile
from headrace.loading.pull import PULLABLE
from headrace.loading.resolve import resolve_model
from headrace.loading.safetensors_folder import read_config
from headrace.models.config import ModelConfig
from headrace.models.known import KNOWN_CONFIGS
from headrace.models.tensors import weight_bytes
from headrace.tiers import HostSizes, host_sizes, staging_states

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FLOAT32 = 4
# What PCIe gen5 x16 moves in large copies, as measured on one H200 machine.
LINK_BYTES_PER_S = 55e9
# What `sampling` takes per vocabulary entry of a row, and how many rows go through it at once
# (`sampling.ROWS_PER_PASS`: 16 rows of 150k entries take 150 MB).
_SAMPLING_BYTES = 64
_SAMPLING_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of one rank.

    `budget_bytes` and what follows from it are None without a budget. A dense model has no state.
    `max_slots_that_fit` is at `context`, `max_context_that_fits` at `slots`; 0 if nothing fits.
    Both are None if the number of pages is given; `max_pages_that_fit` is None with slots.
    `kv_bytes_total` is that of the pool: slots, or pages. `state_bytes_total` is that of the slots,
    and of states on their way to the host tier. `workspace_bytes` are what the layers of
    a step have on any device, `gpu_step_bytes` what steps take on a GPU beside them. `pages` and
    `stream` are None with slots, `host` without a host tier.
    """

    model: str
    tp: int
    dtype: str
    kv_dtype: str
    slots: int
    context: int
    weights_bytes: int
    kv_layers: int
    kv_bytes_per_token: int
    kv_bytes_per_slot: int
    kv_bytes_total: int
    state_bytes_per_slot: int
    state_bytes_total: int
    workspace_bytes: int
    gpu_step_bytes: int
    total_bytes: int
    budget_bytes: int | None = None
    left_bytes: int | None = None
    max_slots_that_fit: int | None = None
    max_context_that_fits: int | None = None
    max_pages_that_fit: int | None = None
    pages: "PagePlan | None" = None
    host: "HostPlan | None" = None
    stream: "StreamPlan | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlan:
    """Bytes of a paged KV pool of one rank.

    A raw page is `page_tokens` tokens over all KV layers: one HIGH page, or several LOW pages of
    `width` layers, which hold `low_tokens_per_raw_page` tokens between them. Layers that are left
    over when the width does not divide them are unused.
    """

    pages: int
    page_tokens: int
    width: int
    raw_page_bytes: int
    low_page_bytes: int
    low_pages_per_raw_page: int
    low_tokens_per_raw_page: int
    pool_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """What the host memory of one rank holds. `tokens`: KV of cached or streamed tokens at once."""

    budget_bytes: int
    used_bytes: int
    pages: int
    tokens: int
    snapshots: int
    snapshot_bytes: int
    snapshot_interval: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """What LOW streaming costs: a decode step moves the KV of every LOW token over the link once.

    `step_ms` is that time for one request of `context` tokens, `tokens_per_s_cap` what all LOW
    requests of that size generate together at most, whatever their number. `tokens_per_ms` LOW
    tokens are streamed in a millisecond of a step, free of charge where the step is that long.
    """

    link_bytes_per_s: float
    bytes_per_token_step: int
    context: int
    step_ms: float
    tokens_per_s_cap: float
    tokens_per_ms: float


def plan_host(
    sizes: HostSizes,
    *,
    budget_bytes: int,
    page_tokens: int,
    state_bytes: int,
    snapshot_interval: int,
) -> HostPlan:
    """What the engine makes of a budget of host memory."""
    return HostPlan(
        budget_bytes=budget_bytes,
        used_bytes=sizes.nbytes,
        pages=sizes.pages,
        tokens=sizes.pages * page_tokens,
        snapshots=sizes.snapshots,
        snapshot_bytes=state_bytes,
        snapshot_interval=snapshot_interval,
    )


def plan_stream(layout: KVLayout, *, context: int, link_bytes_per_s: float) -> StreamPlan:
    """Compute what streaming costs over a link; `ConfigError` if its rate is not positive."""
    if not 0 < link_bytes_per_s < float("inf"):
        raise ConfigError(f"link={link_bytes_per_s!r} bytes/s: accepted is a number above 0")
    token = layout.bytes_per_token
    step_s = context * token / link_bytes_per_s
    return StreamPlan(
        link_bytes_per_s=link_bytes_per_s,
        bytes_per_token_step=token,
        context=context,
        step_ms=step_s * 1e3,
        tokens_per_s_cap=1 / step_s,
        tokens_per_ms=link_bytes_per_s / token / 1e3,
    )


def plan_pages(layout: KVLayout, *, pages: int, page_tokens: int, width: int) -> PagePlan:
    """Compute the bytes of a pool of `pages` raw pages whose LOW pages span `width` layers.

    Raises
    ------
    ConfigError
        A size is not positive or too large, or `width` is beyond the KV layers.
    """
    check_width(width, layout.layers)
    raw_page_bytes = layout.bytes_per_page(page_tokens)
    low_pages = layout.layers // width
    return PagePlan(
        pages=pages,
        page_tokens=page_tokens,
        width=width,
        raw_page_bytes=raw_page_bytes,
        low_page_bytes=raw_page_bytes // layout.layers * width,
        low_pages_per_raw_page=low_pages,
        low_tokens_per_raw_page=low_pages * page_tokens,
        pool_bytes=layout.pool_bytes(pages, page_tokens),
    )


def read_model_config(model: str) -> ModelConfig:
    """Return the configuration behind a known name, a folder, a GGUF file or a pullable model.

    Fetches nothing. Raises `ModelError` if there is no such model.
    """
    if model in PULLABLE:
        # A pulled model is stored in fp32, whatever its publisher used.
        return replace(KNOWN_CONFIGS["smollm2-135m"], dtype="float32")
    if model.lower() in KNOWN_CONFIGS and not Path(model).exists():
        return KNOWN_CONFIGS[model.lower()]
    source = resolve_model(model)
    if source.path is None:
        raise ModelError(f"model {model!r} has no files")
    return GgufFile(source.path).config() if source.kind == "gguf" else read_config(source.path)


def make_plan(
    config: ModelConfig,
    *,
    model: str,
    tp: int = 1,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    fp8_block: int = 0,
    int8_rotate: bool = False,
    slots: int = 1,
    context: int | None = None,
    max_batch_tokens: int = 512,
    budget_bytes: int | None = None,
    kv_layout: str = "slots",
    page_size: int = 64,
    num_pages: int | None = None,
    slot_widths: int = 2,
    host_bytes: int = 0,
    snapshot_interval: int = 4096,
    link_bytes_per_s: float = LINK_BYTES_PER_S,
) -> MemoryPlan:
    """Compute the bytes of one rank of `tp`.

    dtype "auto" is the checkpoint's own (an engine on a CPU takes float32 instead); context None is
    the model's limit, num_pages None what the slots would take. host_bytes are those of the rank.

    Raises
    ------
    ConfigError
        `tp` does not divide the model, `context` is beyond its limit, `kv_dtype` is unknown or
        cannot store its heads, `slot_widths` is beyond the KV layers, or `host_bytes` holds no
        page.
    """
    dtype = config.dtype if dtype == "auto" else dtype
    kv_format = parse_kv_format(
        kv_dtype, fp8_block=fp8_block, int8_rotate=int8_rotate, model_dtype=_DTYPES[dtype]
    )
    context = config.max_position if context is None else context
    if context > config.max_position:
        raise ConfigError(
            f"context={context}: {model} was made for at most {config.max_position} tokens"
        )
    rank = rank_config(config, tp)
    itemsize = _DTYPES[dtype].itemsize
    weights = _rank_weight_bytes(rank, tp, itemsize)
    layout = layout_of(rank, kv_format)
    state = rank.state_bytes_per_slot(itemsize)

    paged = kv_layout == "paged"

    def pool(slots: int, context: int) -> tuple[int, int]:
        """Pages of the KV pool, and tokens of each."""
        if not paged:
            return slots, context
        return num_pages or slots * -(-context // page_size), page_size

    def steps(slots: int, context: int) -> tuple[int, int]:
        """Bytes of the workspace, and of what a GPU takes besides."""
        return (
            workspace_bytes(rank, slots, context, max_batch_tokens, itemsize),
            step_bytes(
                rank,
                layout.kv_format,
                slots=slots,
                max_context=context,
                page_tokens=pool(slots, context)[1],
                max_batch_tokens=max_batch_tokens,
                token_workspace=token_workspace_bytes(rank, itemsize),
                itemsize=itemsize,
            ),
        )

    sizes = None
    if host_bytes:
        sizes = host_sizes(
            host_bytes,
            layout,
            page_size=page_size,
            state_bytes=state,
            snapshot_interval=snapshot_interval,
        )

    def states(slots: int) -> int:
        return (slots + staging_states(slots, sizes)) * state

    def total(slots: int, context: int) -> int:
        kv = layout.pool_bytes(*pool(slots, context))
        return weights + kv + states(slots) + sum(steps(slots, context))

    workspace, on_gpu = steps(slots, context)

    plan = MemoryPlan(
        model=model,
        tp=tp,
        dtype=dtype,
        kv_dtype=kv_format.label,
        slots=slots,
        context=context,
        weights_bytes=weights,
        kv_layers=layout.layers,
        kv_bytes_per_token=layout.bytes_per_token,
        kv_bytes_per_slot=layout.bytes_per_slot(context),
        kv_bytes_total=layout.pool_bytes(*pool(slots, context)),
        state_bytes_per_slot=state,
        state_bytes_total=states(slots),
        workspace_bytes=workspace,
        gpu_step_bytes=on_gpu,
        total_bytes=total(slots, context),
        pages=plan_pages(
            layout, pages=pool(slots, context)[0], page_tokens=page_size, width=slot_widths
        )
        if paged
        else None,
        host=plan_host(
            sizes,
            budget_bytes=host_bytes,
            page_tokens=page_size,
            state_bytes=state,
            snapshot_interval=snapshot_interval,
        )
        if sizes is not None
        else None,
        stream=plan_stream(layout, context=context, link_bytes_per_s=link_bytes_per_s)
        if paged
        else None,
    )
    if budget_bytes is None:
        return plan
    plan = replace(plan, budget_bytes=budget_bytes, left_bytes=budget_bytes - plan.total_bytes)
    if paged:
        for_pages = budget_bytes - plan.total_bytes + plan.kv_bytes_total
        fits = max(0, for_pages // layout.bytes_per_page(page_size))
        plan = replace(plan, max_pages_that_fit=fits)
    if paged and num_pages is not None:
        return plan
    return replace(
        plan,
        max_slots_that_fit=_largest(MAX_BATCH_SIZE, lambda n: total(n, context) <= budget_bytes),
        max_context_that_fits=_largest(
            config.max_position, lambda n: total(slots, n) <= budget_bytes
        ),
    )


def check_fits(plan: MemoryPlan) -> None:
    """Raise `ConfigError` with the numbers if the plan has a budget and is beyond it."""
    if plan.left_bytes is None or plan.left_bytes >= 0:
        return
    fits = []
    if plan.max_slots_that_fit is not None:
        fits.append(f"{plan.max_slots_that_fit} slots of {plan.context} tokens")
        fits.append(f"{plan.slots} slots of {plan.max_context_that_fits}")
    if plan.max_pages_that_fit is not None:
        fits.append(f"{plan.max_pages_that_fit} pages")
    raise ConfigError(
        f"{plan.model} with {plan.slots} slots of {plan.context} tokens needs "
        f"{plan.total_bytes:,} bytes a rank (weights {plan.weights_bytes:,}, KV "
        f"{plan.kv_bytes_total:,}, state {plan.state_bytes_total:,}, workspace "
        f"{plan.workspace_bytes:,}, scratch and allowance of a GPU {plan.gpu_step_bytes:,}), "
        f"{plan.budget_bytes:,} are there, {-plan.left_bytes:,} are missing; what fits is "
        f"{', or '.join(fits)}; lower slots, pages or context, or raise tp"
    )


def rank_config(config: ModelConfig, tp: int) -> ModelConfig:
    """Return what one of `tp` ranks holds of a layer; `ConfigError` if it cannot be split."""
    parts = {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
    }
    linear = config.linear
    if linear is not None:
        parts["linear_num_key_heads"] = linear.key_heads
        parts["linear_num_value_heads"] = linear.value_heads
    legal = [
        size
        for size in range(1, config.num_kv_heads + 1)
        if all(count % size == 0 for count in parts.values())
    ]
    if tp not in legal:
        bad = ", ".join(f"{name} ({n})" for name, n in parts.items() if tp < 1 or n % tp)
        raise ConfigError(
            f"tp={tp} does not divide {bad}; accepted is {', '.join(map(str, legal))}"
        )
    return replace(
        config,
        num_heads=config.num_heads // tp,
        num_kv_heads=config.num_kv_heads // tp,
        intermediate_size=config.intermediate_size // tp,
        linear=None
        if linear is None
        else replace(
            linear, key_heads=linear.key_heads // tp, value_heads=linear.value_heads // tp
        ),
    )


def workspace_bytes(
    rank: ModelConfig, slots: int, context: int, max_batch_tokens: int, itemsize: int
) -> int:
    """Estimate what a full step holds at its peak besides weights and KV, with rotary tables."""
    logits = slots * rank.vocab_size * (itemsize + _FLOAT32)
    sampling = min(slots, _SAMPLING_ROWS) * rank.vocab_size * _SAMPLING_BYTES
    mask = PREFILL_TILE * context * itemsize
    rotary = rank.max_position * rank.head_dim * _FLOAT32
    tokens = (max_batch_tokens + slots) * token_workspace_bytes(rank, itemsize)
    return tokens + logits + sampling + mask + rotary


def token_workspace_bytes(rank: ModelConfig, itemsize: int) -> int:
    """Estimate what a layer holds at its peak for each token."""
    q_size, kv_size = rank.num_heads * rank.head_dim, rank.num_kv_heads * rank.head_dim
    # Residual and its sum; the norm works on an fp32 copy and its square.
    stream = rank.hidden_size * (2 * itemsize + 2 * _FLOAT32)
    # q, k, v and the result; rotation of q and k goes through two fp32 copies.
    attention = (2 * q_size + 2 * kv_size) * itemsize + (q_size + kv_size) * 2 * _FLOAT32
    mlp = 3 * rank.intermediate_size * itemsize  # gate and up side by side, and their product
    return stream + max(attention, mlp)


def _rank_weight_bytes(rank: ModelConfig, tp: int, itemsize: int) -> int:
    """Weights of one rank: embeddings and norms are whole, an untied head is cut by rows."""
    total = weight_bytes(rank, itemsize)
    if rank.tie_word_embeddings:
        return total
    others = (rank.vocab_size - -(-rank.vocab_size // tp)) * rank.hidden_size
    return total - others * itemsize


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Largest n up to `limit` that fits, by bisection: more never fits better."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
