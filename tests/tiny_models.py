"""Small random models built with transformers, and short ways to make batches and run them."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headrace.backends.torch_ops import TorchBackend
from headrace.kv.cache import KVCache
from headrace.kv.state import StatePool
from headrace.kv.tables import NO_WINDOW
from headrace.loading.build import load_model
from headrace.loading.resolve import resolve_model
from headrace.models.batch import ForwardBatch, PrefillSegment
from headrace.models.decoder import DecoderModel

VOCAB = 512
MAX_POSITION = 1024

_COMMON = {
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_POSITION,
    # Wide enough that greedy text varies and top-1 margins stay far above fp32 path differences.
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_QWEN3 = {"hidden_size": 256, "intermediate_size": 512, "rope_theta": 1e6, "head_dim": 64}
_SHAPES = {
    "tiny_llama": {
        "hidden_size": 576,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rope_theta": 1e5,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "tiny_qwen3": _QWEN3
    | {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    "tiny_qwen3_d128": _QWEN3
    | {
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    "tiny_qwen3_g5": _QWEN3
    | {"num_hidden_layers": 3, "num_attention_heads": 10, "num_key_value_heads": 2},
    "tiny_qwen3_g8": _QWEN3
    | {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 1},
}
TINY_NAMES = tuple(_SHAPES)

_LINEAR = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
_HYBRID_SHAPES = {
    "tiny_hybrid": _LINEAR
    | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
        },
    },
    # The ratios of the 27B model: 6 query heads a KV head, 3 value heads a key head.
    "tiny_hybrid_27": _LINEAR
    | {
        "hidden_size": 512,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 12,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
    },
}
HYBRID_NAMES = tuple(_HYBRID_SHAPES)


@dataclass(frozen=True)
class TinyModel:
    """A saved model, and the same model in transformers: the oracle."""

    path: Path
    hf: PreTrainedModel

    def load(self, *, deterministic=False):
        return load(self.path, deterministic=deterministic)


def build_tiny(name, folder, seed=0):
    """Build and save one model; every norm weight is noise, as constants would hide bugs."""
    hf = build_hybrid(name, seed) if name in _HYBRID_SHAPES else _build_dense(name, seed)
    path = Path(folder) / f"{name}-{seed}"
    hf.save_pretrained(path)
    return TinyModel(path, hf)


def _build_dense(name, seed):
    torch.manual_seed(seed)
    options = _COMMON | _SHAPES[name]
    hf = (
        LlamaForCausalLM(LlamaConfig(**options))
        if name == "tiny_llama"
        else Qwen3ForCausalLM(Qwen3Config(**options))
    )
    hf.eval()
    with torch.no_grad():
        for parameter_name, parameter in hf.named_parameters():
            if "norm" in parameter_name:
                parameter.copy_(1.0 + 0.2 * torch.randn(parameter.shape))
    return hf


def hybrid_config(name, **changes):
    return Qwen3_5TextConfig(**(_COMMON | _HYBRID_SHAPES[name] | changes))


def build_hybrid(name, seed=0, **changes):
    """Build one hybrid model with noise on everything that starts as a constant."""
    torch.manual_seed(seed)
    hf = Qwen3_5ForCausalLM(hybrid_config(name, **changes)).eval()
    add_noise(hf)
    return hf


@torch.no_grad()
def add_noise(hf):
    """Norms start as 1, or as 0 for 1 + w, and dt_bias as 1: their wrong use would not show."""
    for name, parameter in hf.named_parameters():
        if name.endswith("A_log"):
            parameter.copy_(torch.empty(parameter.shape).uniform_(0.01, 16).log_())
        elif "norm" in name or name.endswith(("dt_bias", "conv1d.weight")):
            parameter.add_(0.2 * torch.randn(parameter.shape))


def load(path, *, deterministic=False):
    backend = TorchBackend("cpu", deterministic=deterministic)
    return load_model(resolve_model(path), backend=backend).model


def make_kv(model, *, slots=8, max_context=512):
    kv = KVCache(model.config, pages=slots, page_tokens=max_context, dtype=model.dtype)
    # What must not be read is poisoned: one stale value in a sum shows up as NaN.
    kv.k.fill_(float("nan"))
    kv.v.fill_(float("nan"))
    return kv


def make_state(model, *, slots=8):
    """State pool full of NaN, or None for a dense model."""
    if model.config.linear is None:
        return None
    state = StatePool(model.config, slots=slots, dtype=model.dtype)
    state.fill_poison()
    return state


def make_batch(decode=(), prefill=(), *, kv=None, tables=None, window=NO_WINDOW):
    """Batch of `decode` rows (token, slot, position) and `prefill` runs (tokens, slot, start).

    A negative slot is padding, at position 0. A slot is a page, unless `tables` gives the block
    table of each slot over the pages of `kv`. Sampled rows: every decode row, then the last token
    of every run.
    """
    tokens = [token for token, _, _ in decode]
    slots = [slot for _, slot, _ in decode]
    positions = [position for _, _, position in decode]
    sample = list(range(len(decode)))
    segments = []

    def table_of(slot):
        return [slot] if tables is None or slot < 0 else tables[slot]

    for run, slot, start in prefill:
        segments.append(
            PrefillSegment(
                table=table_of(slot),
                state_slot=slot,
                start=start,
                length=len(run),
                offset=len(tokens),
            )
        )
        tokens += run
        slots += [slot] * len(run)
        positions += range(start, start + len(run))
        sample.append(len(tokens) - 1)
    pages, offsets = slots, positions
    if tables is not None:
        # New tokens go to HIGH pages, whose entries are their numbers.
        size = kv.page_tokens
        pages = [int(table_of(s)[at // size]) for s, at in zip(slots, positions, strict=True)]
        offsets = [at % size for at in positions]
    return ForwardBatch(
        token_ids=torch.tensor(tokens),
        positions=torch.tensor(positions),
        token_pages=torch.tensor(pages),
        token_offsets=torch.tensor(offsets),
        num_decode=len(decode),
        tables=[table_of(slot) for _, slot, _ in decode],
        decode_lengths=[position + 1 if slot >= 0 else 0 for _, slot, position in decode],
        state_slots=torch.tensor([slot for _, slot, _ in decode], dtype=torch.int64),
        segments=segments,
        sample_index=torch.tensor(sample),
        window=window,
    )


def pools(model, slots=8):
    return make_kv(model, slots=slots), make_state(model, slots=slots)


def prefill(model, caches, prompt, slot, cuts=()):
    """Prefill one prompt in runs that end at `cuts`; returns the last logits `[vocab]`."""
    edges = [0, *cuts, len(prompt)]
    for start, end in itertools.pairwise(edges):
        logits = model.forward(make_batch(prefill=[(prompt[start:end], slot, start)]), *caches)
    return logits[0]


def decode(model, caches, rows):
    """One step of rows (token, slot, position)."""
    return model.forward(make_batch(decode=rows), *caches)


def slot_bits(caches, slot, length):
    """Everything that belongs to a request of `length` tokens in a slot."""
    kv, state = caches
    return (
        kv.k[:, slot, :length].clone(),
        kv.v[:, slot, :length].clone(),
        state.recurrent[:, slot].clone(),
        state.conv[:, slot].clone(),
    )


def assert_same_bits(one, other):
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


def relative(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def random_prompt(length, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def greedy(model: DecoderModel, prompts, steps):
    """Greedy tokens of all prompts in one batch, and every step's logits `[steps, B, vocab]`."""
    kv, state = make_kv(model, slots=len(prompts)), make_state(model, slots=len(prompts))
    runs = [(prompt, slot, 0) for slot, prompt in enumerate(prompts)]
    logits = model.forward(make_batch(prefill=runs), kv, state)
    history = [logits]
    tokens = [[token] for token in logits.argmax(-1).tolist()]
    for step in range(steps - 1):
        rows = [(out[-1], i, len(prompts[i]) + step) for i, out in enumerate(tokens)]
        logits = model.forward(make_batch(decode=rows), kv, state)
        history.append(logits)
        for out, token in zip(tokens, logits.argmax(-1).tolist(), strict=True):
            out.append(token)
    return tokens, torch.stack(history)


@torch.inference_mode()
def hf_logits(hf, tokens):
    """Logits of the last token, `[vocab]`."""
    return hf(input_ids=torch.tensor([tokens])).logits[0, -1]


@torch.inference_mode()
def hf_greedy(hf, prompt, steps):
    """Greedy tokens, and the smallest margin between best and second best."""
    tokens, margin, cache = [], float("inf"), None
    ids = torch.tensor([prompt])
    for _ in range(steps):
        out = hf(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        best = out.logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        ids = best.indices[:1].view(1, 1)
    return tokens, margin
