"""Bytes that steps take on a GPU besides weights and pools, known before these are made.

What is allocated by size is counted: scratch of decode attention, arrays and logits of the widest
graphs, the KV of the longest prompt if it is not read in place, the tensors of a linear mixer, what
the largest graph of prompts holds. What libraries and the driver take for themselves gets an
allowance. No state.
"""

from headrace._core import decode_width
from headrace.backends.cuda.kv import scratch_bytes
from headrace.backends.cuda.prefill_attention import most_captured, reads_pool
from headrace.backends.cuda.step_arrays import StepShape, prompt_sizes
from headrace.kv.formats import KVFormat
from headrace.models.config import ModelConfig

_FLOAT32 = _INT32 = 4
# Workspaces of libraries, kernels, graphs and what the driver has for them: an allowance.
RESERVE_BYTES = 1 << 30


def step_bytes(
    config: ModelConfig,
    kv_format: KVFormat,
    *,
    slots: int,
    max_context: int,
    page_tokens: int,
    max_batch_tokens: int,
    token_workspace: int,
    itemsize: int,
) -> int:
    """Bytes beyond `workspace_bytes`, which counts what the layers of any device have.

    token_workspace: what it counts for a token; graphs of prompts have memory of their own.
    """
    rows, tokens = decode_width(slots), max_batch_tokens + slots
    group = config.num_heads // config.num_kv_heads
    attention = scratch_bytes(rows, config.num_kv_heads, group, config.head_dim, max_context)
    # K and V of a whole request at a time, where prefill attention does not read the pool.
    row = 2 * config.num_kv_heads * config.head_dim * itemsize
    gathered = 0 if reads_pool(kv_format) else max_context * row
    table_pages = -(-max_context // page_tokens)
    arrays = StepShape(tokens=rows, decode_rows=rows, table_pages=table_pages).nbytes
    mixer = _mixer_bytes(config, itemsize)
    captured, prompts = 0, min(slots, most_captured(kv_format))
    if prompts:
        size = prompt_sizes(min(max_batch_tokens, slots * max_context), config)[-1]
        captured = size * (token_workspace + mixer) + prompts * table_pages * _INT32
    logits = (rows + prompts) * config.vocab_size * _FLOAT32
    return RESERVE_BYTES + attention + gathered + arrays + logits + tokens * mixer + captured


def _mixer_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of one token in a linear mixer: projections, convolution, result, and its norm."""
    linear = config.linear
    if linear is None:
        return 0
    elements = 2 * linear.channels + 2 * linear.value_size
    return elements * itemsize + linear.value_size * _FLOAT32
