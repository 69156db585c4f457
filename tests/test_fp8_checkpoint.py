"""Block-fp8 checkpoints and hybrid folders: what is read is what was stored, damage is named."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration
from transformers.quantizers import quantizer_finegrained_fp8

from headrace.backends.torch_ops import TorchBackend
from headrace.errors import CheckpointError, ConfigError, ModelError
from headrace.layers.block_fp8 import BlockFp8Weight, quantise
from headrace.layers.linear import Linear
from headrace.loading.build import load_model
from headrace.loading.checkpoint import Checkpoint
from headrace.loading.resolve import ModelSource, resolve_model
from headrace.loading.safetensors_folder import SafetensorsFolder, read_config
from headrace.models.config import ModelConfig
from headrace.models.decoder import DecoderModel
from headrace.models.known import KNOWN_CONFIGS
from tiny_models import (
    add_noise,
    build_hybrid,
    greedy,
    hf_greedy,
    hf_logits,
    hybrid_config,
    make_batch,
    make_kv,
    make_state,
    random_prompt,
)

# Both sides compute in fp32 from the same dequantised weights.
LOGIT_TOLERANCE = 1e-4
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.language_model.embed_tokens"],
}
DENSE = ("embed_tokens.weight", "lm_head.weight", "in_proj_a.weight", "in_proj_b.weight")
GATE = "model.layers.0.mlp.gate_proj.weight"


def coded(weight):
    """Codes and bf16 scales of a matrix, block by block: slow, and as the format is defined."""
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // 128), -(-columns // 128), dtype=torch.bfloat16)
    codes = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = weight[part].abs().max() / 440  # rounded down, it still fits 448
            codes[part] = (weight[part] / scales[i, j].float()).to(torch.float8_e4m3fn)
    return codes, scales


def product(codes, scales):
    """`code * scale` in fp64, element by element."""
    rows = torch.arange(codes.shape[0]) // 128
    columns = torch.arange(codes.shape[1]) // 128
    return codes.double() * scales.double()[rows[:, None], columns[None, :]]


def write_folder(folder, hf, *, prefix="model.", change=None, quantization=QUANTIZATION):
    """Write a model as an fp8 checkpoint, and load the dequantised weights into `hf`."""
    tensors, exact = {}, {}
    for name, tensor in hf.state_dict().items():
        named = name.replace("model.", prefix, 1) if name.startswith("model.") else name
        if tensor.ndim != 2 or name.endswith(DENSE):
            tensors[named] = tensor.contiguous()
            continue
        codes, scales = coded(tensor)
        tensors[named], tensors[f"{named}_scale_inv"] = codes, scales
        exact[name] = product(codes, scales).float()
    hf.load_state_dict(exact, strict=False)
    if change is not None:
        change(tensors)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = hf.config.to_dict() | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "quantization_config": quantization,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder, **options):
    return load_model(resolve_model(folder), **options).model


def logits_of(model, prompt):
    batch = make_batch(prefill=[(prompt, 0, 0)])
    return model.forward(batch, make_kv(model, slots=1), make_state(model, slots=1))[0]


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """tiny_hybrid_fp8: folder and oracle. 700 and 120 are no multiples of 128."""
    hf = build_hybrid("tiny_hybrid_27", 0, intermediate_size=700)
    return write_folder(tmp_path_factory.mktemp("fp8") / "model", hf), hf


@pytest.mark.parametrize("mode", ["keep", "dequantize"])
def test_logits_equal_those_of_the_dequantised_model(fp8, mode):
    folder, hf = fp8
    model = load(folder, fp8_weights=mode)
    for length in (1, 3, 65, 129):
        prompt = random_prompt(length)
        torch.testing.assert_close(
            logits_of(model, prompt), hf_logits(hf, prompt), rtol=0, atol=LOGIT_TOLERANCE
        )
    prompts = [random_prompt(length) for length in (5, 64)]
    for prompt, out in zip(prompts, greedy(model, prompts, 16)[0], strict=True):
        expected, margin = hf_greedy(hf, prompt, 16)
        assert margin > 1e-4
        assert out == expected


def test_logits_equal_those_of_transformers_own_reader(tmp_path, monkeypatch):
    """Its reader needs a package for placing models on devices, which reading on a CPU does not."""
    hf = build_hybrid("tiny_hybrid_27", 2)  # it takes whole blocks only
    folder = write_folder(tmp_path / "model", hf)
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    theirs = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, hf.state_dict()[name]), name
    model = load(folder)
    for length in (1, 4, 64):
        prompt = random_prompt(length)
        torch.testing.assert_close(
            logits_of(model, prompt), hf_logits(theirs, prompt), rtol=0, atol=LOGIT_TOLERANCE
        )


def test_kept_weights_stay_codes_and_keep_their_bytes(fp8):
    folder, _ = fp8
    kept, dense = load(folder), load(folder, fp8_weights="dequantize")
    # Ragged gate and up rows would share a block, so that they stay two matrices.
    gate_up = kept._layers[0]._mlp._gate_up
    assert [type(weight) for weight in gate_up.weights] == [BlockFp8Weight] * 2
    qkv_z = kept._layers[0]._mixer._qkv_z
    assert [type(weight) for weight in qkv_z.weights] == [BlockFp8Weight]
    assert qkv_z.weights[0].codes.itemsize == 1
    assert not isinstance(dense._layers[0]._mixer._qkv_z.weights[0], BlockFp8Weight)
    with pytest.raises(ConfigError, match="fp8_weights 'guess'"):
        load(folder, fp8_weights="guess")


@pytest.mark.parametrize("shape", [(256, 384), (130, 257), (1, 1), (128, 129), (12, 640)])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
def test_dequantised_is_the_exact_product(shape, scale_dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scales = coded(weight)
    scales = (scales.float() * 1.0009765625).to(scale_dtype)  # a value that bf16 cannot hold
    fp8_weight = BlockFp8Weight(codes, scales.float())
    exact = product(codes, scales)
    if scale_dtype == torch.bfloat16:
        assert torch.equal(fp8_weight.dequantise().double(), exact)
    assert torch.equal(fp8_weight.dequantise(), exact.float())
    assert torch.equal(fp8_weight.dequantise(torch.bfloat16), exact.float().bfloat16())
    # The largest value of a block is within half a step of the code it gets, 1/16 of it.
    assert (quantise(weight).dequantise() - weight).abs().max() < weight.abs().max() / 16


def test_linears_of_codes_are_row_invariant_and_fuse():
    backend = TorchBackend("cpu", deterministic=True)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn((rows, 256), generator=generator) for rows in (128, 40, 256)]
    codes = [BlockFp8Weight(c, s.float()) for c, s in map(coded, parts)]
    x = torch.randn((70, 256), generator=generator)
    exact = torch.cat([part.dequantise() for part in codes]).double()
    for weights, matrices in ((codes, 3), (codes[:2], 1), ([codes[0], parts[1], codes[2]], 3)):
        linear = Linear(weights, backend)
        assert len(linear.weights) == matrices
        out = linear.forward(x)
        assert out.shape == (70, linear.out_features)
        if weights is codes:
            torch.testing.assert_close(out.double(), x.double() @ exact.T, rtol=1e-5, atol=1e-4)
        for rows in (1, 5, 64):
            assert torch.equal(linear.forward(x[3 : 3 + rows]), out[3 : 3 + rows])


def _rank_4(tensors):
    scales = tensors.pop(f"{GATE}_scale_inv")
    tensors[f"{GATE}_scale"] = scales[:, None, :, None].contiguous()


def _float32(tensors):
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name] = tensors[name].float()


@pytest.mark.parametrize("change", [_rank_4, _float32])
def test_other_spellings_of_the_same_scales_give_the_same_bits(fp8, tmp_path, change):
    folder, _ = fp8
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    prompt = random_prompt(20)
    assert torch.equal(logits_of(load(tmp_path), prompt), logits_of(load(folder), prompt))


def _nan_code(tensors):
    tensors[GATE].view(torch.uint8)[5, 7] = 0xFF


def _poison(name, value):
    def change(tensors):
        tensors[name].view(-1)[0] = value

    return change


def _replace(name, make):
    def change(tensors):
        tensors[name] = make(tensors[name])

    return change


DAMAGE = {
    "missing scale": (
        lambda tensors: tensors.pop(f"{GATE}_scale_inv"),
        f"missing scales of: {GATE}",
    ),
    "scale of another shape": (
        _replace(f"{GATE}_scale_inv", lambda scale: scale.T.contiguous()),
        r"wrong shape of the scales of: .*gate_proj.weight \[4, 6\], expected \[6, 4\]",
    ),
    "scale of nothing": (
        lambda tensors: tensors.update({"model.norm.weight_scale": torch.ones(1)}),
        r"unexpected: model\.norm\.weight_scale",
    ),
    "missing weight": (
        lambda tensors: tensors.pop("model.layers.1.linear_attn.A_log"),
        r"missing: model\.layers\.1\.linear_attn\.A_log",
    ),
    "weight of another shape": (
        _replace("model.layers.0.linear_attn.conv1d.weight", lambda w: w[:, :, :3].contiguous()),
        r"conv1d\.weight is \[2560, 1, 3\], expected \[2560, 1, 4\]",
    ),
    "unknown name": (
        lambda tensors: tensors.update({"model.layers.0.linear_attn.in_proj_ba": torch.ones(1)}),
        r"unexpected: model\.layers\.0\.linear_attn\.in_proj_ba",
    ),
    "codes that are no matrix": (
        _replace("model.norm.weight", lambda w: w.to(torch.float8_e4m3fn)),
        r"no matrix: model\.norm\.weight",
    ),
    "integers": (
        _replace("model.norm.weight", lambda w: w.to(torch.int8)),
        r"model\.norm\.weight is stored as torch\.int8",
    ),
    "NaN code": (_nan_code, f"{GATE} has values that are NaN"),
    "NaN scale": (_poison(f"{GATE}_scale_inv", torch.nan), f"{GATE} has values that are NaN"),
    "NaN norm": (_poison("model.norm.weight", torch.nan), r"model\.norm\.weight has values"),
    "infinite bias": (
        _poison("model.layers.0.linear_attn.dt_bias", -torch.inf),
        "dt_bias has values that are NaN or infinite",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(fp8, tmp_path, case):
    folder, _ = fp8
    change, message = DAMAGE[case]
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_large_finite_weight_is_no_damage():
    """A sum that overflows is not yet an infinity in the weight."""

    class File:
        path = "memory"

        def get(self, name):
            return torch.full((4,), 3e38)

        def shapes(self):
            return dict.fromkeys(["model.norm.weight"], (4,))

        def fp8_names(self):
            return frozenset()

    checkpoint = object.__new__(Checkpoint)
    checkpoint._file, checkpoint._scales = File(), {}
    checkpoint._names = {"model.norm.weight": "model.norm.weight"}
    assert checkpoint.get("model.norm.weight").isfinite().all()


@pytest.mark.parametrize("kept", [0.3, 0.999])
def test_a_truncated_shard_is_named(fp8, tmp_path, kept):
    folder, _ = fp8
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / shard)
    index = {name: shard for shard, held in shards.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    prompt = random_prompt(9)
    assert torch.equal(logits_of(load(tmp_path), prompt), logits_of(load(folder), prompt))
    content = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(content[: int(kept * len(content))])
    with pytest.raises(CheckpointError, match=r"b\.safetensors is truncated or damaged"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq"}, "quant_method = 'awq'"),
        ({"quant_method": None}, "quant_method"),
        ({"fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme"),
        ({"weight_block_size": [1, 32]}, r"weight_block_size = \[1, 32\]"),
        ({"weight_block_size": None}, "weight_block_size"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ],
)
def test_unknown_quantisation_is_refused_by_name(fp8, change, message):
    config = json.loads((fp8[0] / "config.json").read_text())
    config["quantization_config"] |= change
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(config)


def test_codes_need_a_configuration_that_announces_them(fp8, tmp_path):
    config = json.loads((fp8[0] / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(fp8[0] / "model.safetensors")
    with pytest.raises(CheckpointError, match="fp8 codes without a quantization_config"):
        load(tmp_path)


def test_dummy_weights_of_an_fp8_configuration_are_codes(fp8):
    source = ModelSource("dummy", "small", config=read_config(fp8[0]))
    model = load_model(source).model
    assert torch.isfinite(logits_of(model, random_prompt(70))).all()
    assert isinstance(model._layers[0]._mixer._output.weights[0], BlockFp8Weight)
    assert KNOWN_CONFIGS["qwen3.5-27b-fp8"].weight_format == "fp8_block"


# --- the folder of the multimodal class


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory):
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 256,
        "num_position_embeddings": 16,
    }
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=hybrid_config("tiny_hybrid"), vision_config=vision)
    hf = Qwen3_5ForConditionalGeneration(config).eval()
    add_noise(hf.model.language_model)
    folder = tmp_path_factory.mktemp("multimodal") / "model"
    hf.save_pretrained(folder)
    return folder, hf


def test_the_text_part_of_a_multimodal_folder_is_read(multimodal, tmp_path):
    folder, hf = multimodal
    tensors = load_file(folder / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in tensors)
    prompt = random_prompt(66)
    expected = hf_logits(hf, prompt)
    torch.testing.assert_close(
        logits_of(load(folder), prompt), expected, rtol=0, atol=LOGIT_TOLERANCE
    )
    # A draft head is skipped by its name; anything else is not.
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors["mtp.fc.weight"] = torch.zeros(4, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(logits_of(load(tmp_path), prompt), logits_of(load(folder), prompt))
    tensors["model.norm.weight"] = torch.zeros(256)
    tensors["audio.weight"] = torch.zeros(4, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected: .*audio\.weight") as caught:
        load(tmp_path)
    assert "model (not nested).norm.weight" in str(caught.value)


def test_a_nested_fp8_folder_is_read(fp8, tmp_path):
    """The names of the published fp8 release, scales included."""
    folder, _ = fp8
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        nested = {
            name.replace("model.", "model.language_model.", 1): file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118 - not a dict
        }
    save_file(nested, tmp_path / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    quantization = text.pop("quantization_config")
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "quantization_config": quantization,
    }
    del text["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(SafetensorsFolder(tmp_path), read_config(tmp_path))
    model = DecoderModel(read_config(tmp_path), checkpoint, torch.float32, TorchBackend())
    prompt = random_prompt(12)
    assert torch.equal(logits_of(model, prompt), logits_of(load(folder), prompt))
