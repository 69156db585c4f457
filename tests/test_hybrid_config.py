"""Reading hybrid configurations, and the sizes that follow from them."""

import pytest
import torch

from headrace.errors import ModelError
from headrace.models.config import ModelConfig
from headrace.models.known import KNOWN_CONFIGS
from headrace.models.tensors import expected_tensors, weight_bytes
from tiny_models import hybrid_config


def test_the_27b_model_has_its_published_sizes():
    config = KNOWN_CONFIGS["qwen3.5-27b"]
    assert (config.kv_layers, config.linear_layers) == (16, 48)
    assert config.parameter_count / 1e9 == pytest.approx(26.896, abs=5e-4)
    assert config.kv_bytes_per_token(2) == 65_536
    assert config.state_bytes_per_slot(2) == 150_994_944 + 2_949_120
    tensors = expected_tensors(config)
    assert len(tensors) == 851
    assert sum(torch.Size(shape).numel() for shape in tensors.values()) == config.parameter_count
    assert weight_bytes(config, 2) == 2 * config.parameter_count
    assert weight_bytes(KNOWN_CONFIGS["qwen3.5-27b-fp8"], 2) / 1e9 == pytest.approx(29.46, rel=1e-3)


def published_27b():
    text = hybrid_config("tiny_hybrid_27").to_dict() | {
        "vocab_size": 248_320,
        "hidden_size": 5_120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "max_position_embeddings": 262_144,
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "output_gate_type": "swish",
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "eos_token_id": 248_044,
        "dtype": "bfloat16",
    }
    del text["layer_types"], text["tie_word_embeddings"]
    return text


def test_nested_and_flat_configurations_are_read():
    text = published_27b()
    nested = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {"depth": 27},
        "tie_word_embeddings": False,
    }
    generation = {"eos_token_id": [248_044, 248_046]}
    assert ModelConfig.from_hf(nested, generation) == KNOWN_CONFIGS["qwen3.5-27b"]
    assert ModelConfig.from_hf(text, generation) == KNOWN_CONFIGS["qwen3.5-27b"]
    assert ModelConfig.from_hf(nested | {"tie_word_embeddings": True}).tie_word_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3_5_moe"}, "'qwen3_5_moe' is not supported"),
        ({"architectures": ["Qwen3_5ForSequenceClassification"]}, "ForSequenceClassification"),
        ({"layer_types": ["linear_attention"] * 63 + ["mamba"]}, "entry 'mamba'"),
        ({"layer_types": ["linear_attention"] * 64}, "no 'full_attention' layer"),
        ({"full_attention_interval": None}, "full_attention_interval"),
        ({"attn_output_gate": False}, "attn_output_gate = False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid'"),
        ({"mamba_ssm_dtype": "float16"}, "mamba_ssm_dtype"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim = 3"),
        ({"linear_num_value_heads": 40}, "linear_num_value_heads"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim"),
        ({"num_experts": 8}, "num_experts"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 1.5}}, "1.5"),
        ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "yarn"}}, "'yarn'"),
    ],
)
def test_config_refuses_by_name_what_it_cannot_run(change, message):
    """REQ-06."""
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(published_27b() | change)
    nested = {"model_type": "qwen3_5", "text_config": 3}
    with pytest.raises(ModelError, match="text_config must be an object"):
        ModelConfig.from_hf(nested)
