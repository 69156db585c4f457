"""Published configurations by name, for planning and for random weights without any file.

Source: the `config.json` of each release, as tabulated in the design notes (models, section 1.3).
"""

from dataclasses import replace

from headrace.errors import ModelError
from headrace.models.config import ModelConfig
from headrace.models.hybrid_config import FULL_ATTENTION, LINEAR_ATTENTION, LinearAttention
from headrace.models.quantization import FP8_BLOCK

_QWEN3_VOCAB = 151_936
_QWEN3_IM_END = 151_645
_QWEN3_ENDOFTEXT = 151_643


def _qwen3(
    *, layers: int, hidden: int, inter: int, heads: int, tied: bool, kv_heads: int = 8
) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        vocab_size=_QWEN3_VOCAB,
        hidden_size=hidden,
        intermediate_size=inter,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position=40_960,
        tie_word_embeddings=tied,
        qk_norm=True,
        eos_token_ids=(_QWEN3_IM_END, _QWEN3_ENDOFTEXT),
        bos_token_id=_QWEN3_ENDOFTEXT,
        dtype="bfloat16",
    )


_QWEN35_27B = ModelConfig(
    architecture="qwen3_5",
    vocab_size=248_320,
    hidden_size=5_120,
    intermediate_size=17_408,
    num_layers=64,
    num_heads=24,
    num_kv_heads=4,
    head_dim=256,
    rms_norm_eps=1e-6,
    rope_theta=1e7,
    max_position=262_144,
    tie_word_embeddings=False,
    qk_norm=True,
    eos_token_ids=(248_044, 248_046),
    dtype="bfloat16",
    layer_types=(LINEAR_ATTENTION, LINEAR_ATTENTION, LINEAR_ATTENTION, FULL_ATTENTION) * 16,
    linear=LinearAttention(key_heads=16, value_heads=48, key_head_dim=128, value_head_dim=128),
    rotary_dim=64,
    attn_output_gate=True,
    norm_zero_centred=True,
)

KNOWN_CONFIGS: dict[str, ModelConfig] = {
    "smollm2-135m": ModelConfig(
        architecture="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        max_position=8_192,
        tie_word_embeddings=True,
        qk_norm=False,
        eos_token_ids=(2,),
        bos_token_id=1,
        dtype="bfloat16",
    ),
    "qwen3-0.6b": _qwen3(layers=28, hidden=1_024, inter=3_072, heads=16, tied=True),
    "qwen3-1.7b": _qwen3(layers=28, hidden=2_048, inter=6_144, heads=16, tied=True),
    "qwen3-4b": _qwen3(layers=36, hidden=2_560, inter=9_728, heads=32, tied=True),
    "qwen3-8b": _qwen3(layers=36, hidden=4_096, inter=12_288, heads=32, tied=False),
    "qwen3-14b": _qwen3(layers=40, hidden=5_120, inter=17_408, heads=40, tied=False),
    "qwen3-32b": _qwen3(layers=64, hidden=5_120, inter=25_600, heads=64, tied=False),
    "qwen3.5-27b": _QWEN35_27B,
    "qwen3.5-27b-fp8": replace(_QWEN35_27B, weight_format=FP8_BLOCK),
}


def known_config(name: str) -> ModelConfig:
    """Return the configuration published under `name`; upper and lower case are the same.

    Raises
    ------
    ModelError
        No configuration has this name; the message lists those that exist.
    """
    config = KNOWN_CONFIGS.get(name.lower())
    if config is None:
        raise ModelError(f"no known configuration {name!r}; known: {', '.join(KNOWN_CONFIGS)}")
    return config
