"""`bench quality`: what each KV format does to a model's predictions on real text.

Four English texts from the standard library (`pydoc_data.topics`) go through the model once with
unquantised KV and once with each format; the next-token distributions are compared at every
position. The gates are those the formats were accepted with, on SmolLM2-135M in fp32.
"""

from pydoc_data import topics

import torch

from headrace.bench.env import Value, describe
from headrace.bench.kv import every_format
from headrace.bench.output import Report
from headrace.engine import Engine
from headrace.errors import ConfigError
from headrace.kv.cache import KVCache
from headrace.kv.formats import AUTO, FP8, INT8, K8V4, KVFormat
from headrace.kv.state import StatePool
from headrace.models.batch import ForwardBatch, PrefillSegment

TEXTS = ("assignment", "class", "formatstrings", "operator-summary")
TEXT_TOKENS = 512
_COLUMNS = ("kv_dtype", "kl_mean", "top1_equal", "tvd_mean", "kl_gate", "top1_gate", "meets_gate")


def gates(kv_format: KVFormat) -> tuple[float, float]:
    """Largest mean KL divergence (nats) and least share of equal top-1 tokens."""
    if kv_format.name == INT8:
        return (0.0006, 0.985) if kv_format.rotated else (0.002, 0.975)
    return {FP8: (0.010, 0.93), K8V4: (0.013, 0.93)}[kv_format.name]


def bench_quality(engine: Engine, *, tokens: int = TEXT_TOKENS) -> Report:
    """One row per quantised format: mean over texts and positions against unquantised KV.

    Raises
    ------
    ConfigError
        The engine has no tokenizer, or its KV is quantised itself.
    """
    if engine.tokenizer is None:
        raise ConfigError("bench quality needs a model with a tokenizer")
    if engine.kv.format.quantised:
        raise ConfigError(f"kv_dtype={engine.kv.format.label}: the reference must be auto")
    texts = [engine.tokenizer.encode(topics.topics[name])[:tokens] for name in TEXTS]
    exact = [_log_probs(engine, text, engine.kv.format) for text in texts]
    rows = []
    for kv_format in every_format(engine.kv.dtype):
        if kv_format.name == AUTO:
            continue
        compared = [
            _compare(reference, _log_probs(engine, text, kv_format))
            for text, reference in zip(texts, exact, strict=True)
        ]
        kl, top1, tvd = torch.tensor(compared, dtype=torch.float64).mean(0).tolist()
        kl_gate, top1_gate = gates(kv_format)
        row: dict[str, Value] = {
            "kv_dtype": kv_format.label,
            "kl_mean": kl,
            "top1_equal": top1,
            "tvd_mean": tvd,
            "kl_gate": kl_gate,
            "top1_gate": top1_gate,
            "meets_gate": kl <= kl_gate and top1 >= top1_gate,
        }
        rows.append(row)
    env = describe(engine) | {"texts": ", ".join(TEXTS), "tokens": sum(map(len, texts))}
    return Report(env, rows, _COLUMNS)


@torch.inference_mode()
def _log_probs(engine: Engine, token_ids: list[int], kv_format: KVFormat) -> torch.Tensor:
    """Log-probabilities after every token of a text, fp32 `[tokens, vocab]`."""
    model, count = engine.runner.model, len(token_ids)
    kv = KVCache(model.config, pages=1, page_tokens=count, dtype=model.dtype, kv_format=kv_format)
    state = None
    if model.config.linear is not None:
        state = StatePool(model.config, slots=1, dtype=model.dtype)
    positions = torch.arange(count)
    batch = ForwardBatch(
        token_ids=torch.tensor(token_ids),
        positions=positions,
        token_pages=torch.zeros_like(positions),
        token_offsets=positions,
        num_decode=0,
        tables=[],
        decode_lengths=[],
        state_slots=positions[:0],
        segments=[PrefillSegment(table=[0], state_slot=0, start=0, length=count, offset=0)],
        sample_index=positions,
    )
    return torch.log_softmax(model.forward(batch, kv, state), dim=-1)


def _compare(reference: torch.Tensor, other: torch.Tensor) -> tuple[float, float, float]:
    """Mean KL(reference || other), share of equal top-1 tokens, mean total variation distance."""
    p, q = reference.exp(), other.exp()
    kl = (p * (reference - other)).sum(-1).mean()
    top1 = (reference.argmax(-1) == other.argmax(-1)).double().mean()
    tvd = 0.5 * (p - q).abs().sum(-1).mean()
    return float(kl), float(top1), float(tvd)
