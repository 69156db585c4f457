"""From a resolved source to a model in memory: read config, check names and shapes, load."""

import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.backends.base import Backend, Weight
from headrace.backends.torch_ops import TorchBackend
from headrace.errors import ConfigError, ModelError
from headrace.layers import block_fp8
from headrace.loading.checkpoint import FP8_WEIGHTS, Checkpoint
from headrace.loading.gguf_file import GgufFile
from headrace.loading.gguf_tokenizer import tokenizer_json
from headrace.loading.progress import LoadProgress
from headrace.loading.resolve import ModelSource
from headrace.loading.safetensors_folder import SafetensorsFolder, read_chat_template, read_config
from headrace.models.config import SUPPORTED_DTYPES, ModelConfig
from headrace.models.decoder import DecoderModel
from headrace.models.quantization import FP8_BLOCK
from headrace.models.tensors import TensorSource, expected_tensors, may_be_fp8

# Spread of random linear weights, as transformers initialises them.
_DUMMY_STD = 0.02


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what is needed to turn text into its tokens.

    tokenizer_path: a `tokenizer.json` (folders); tokenizer_json: its content (GGUF files). Both
    are None for random weights.
    """

    model: DecoderModel
    config: ModelConfig
    tokenizer_path: Path | None = None
    tokenizer_json: str | None = None
    chat_template: str | None = None


def load_model(
    source: ModelSource,
    *,
    device: torch.device | str = "cpu",
    dtype: str | torch.dtype = "auto",
    backend: Backend | None = None,
    load_format: str = "auto",
    seed: int = 0,
    fp8_weights: str = "keep",
    progress: bool = False,
) -> LoadedModel:
    """Load weights tensor by tensor.

    dtype: "auto" is fp32 on a CPU and the dtype of the file elsewhere. backend: default the torch
    reference on `device`. load_format: "dummy" takes only the config of the source and makes
    random weights from `seed`: the same on all CPUs, others on all GPUs. fp8_weights: "keep"
    leaves the codes of an fp8 checkpoint as they are, "dequantize" makes them dense once. progress:
    show a bar on standard error.

    Raises
    ------
    ModelError
        The config is not supported.
    CheckpointError
        Tensors or scales are missing, unexpected or mis-shaped, or a file is damaged: checked
        before any weight is read. Or a weight is NaN or infinite.
    ConfigError
        `dtype` or `fp8_weights` is unknown, the dtype is not supported by the backend, or backend
        and device differ.
    """
    if fp8_weights not in FP8_WEIGHTS:
        raise ConfigError(f"fp8_weights {fp8_weights!r} is not one of {', '.join(FP8_WEIGHTS)}")
    device = torch.device(device)
    if backend is None:
        backend = TorchBackend(device)
    elif backend.device.type != device.type:
        raise ConfigError(f"backend is on {backend.device}, device is {device}")

    def build(config: ModelConfig, tensors: TensorSource) -> DecoderModel:
        total = len(expected_tensors(config))
        with LoadProgress(tensors, source.name, total, enabled=progress) as watched:
            return DecoderModel(config, watched, resolve_dtype(dtype, config, device), backend)

    if source.kind == "dummy" or load_format == "dummy":
        config = _config_of(source)
        random = _RandomTensors(config, seed, codes=fp8_weights == "keep", device=device)
        return LoadedModel(build(config, random), config)
    path = _path_of(source)
    if source.kind == "gguf":
        gguf_file = GgufFile(path)
        config = gguf_file.config()
        checkpoint = Checkpoint(gguf_file, config)
        return LoadedModel(
            build(config, checkpoint),
            config,
            tokenizer_json=tokenizer_json(gguf_file),
            chat_template=gguf_file.metadata("tokenizer.chat_template"),
        )
    config = read_config(path)
    checkpoint = Checkpoint(SafetensorsFolder(path), config, fp8_weights=fp8_weights)
    tokenizer_path = path / "tokenizer.json"
    return LoadedModel(
        build(config, checkpoint),
        config,
        tokenizer_path=tokenizer_path if tokenizer_path.is_file() else None,
        chat_template=read_chat_template(path),
    )


def resolve_dtype(
    dtype: str | torch.dtype, config: ModelConfig, device: torch.device
) -> torch.dtype:
    """Return the dtype of weights and KV.

    Raises
    ------
    ConfigError
        The name is unknown.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        # Exact tokens are promised on a CPU, and half precision is slow on many of them.
        dtype = "float32" if device.type == "cpu" else config.dtype
    if dtype not in SUPPORTED_DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not one of auto, {', '.join(SUPPORTED_DTYPES)}")
    resolved: torch.dtype = getattr(torch, dtype)
    return resolved


class _RandomTensors(TensorSource):
    """Seeded weights; each tensor has a stream of its own, so the order of reading is free.

    Made on the device, where a GPU has another generator: 8 G numbers take a CPU a minute.
    """

    def __init__(
        self, config: ModelConfig, seed: int, *, codes: bool, device: torch.device
    ) -> None:
        self._config = config
        self._shapes = expected_tensors(config)
        self._seed = seed
        self._device = device
        self._codes = codes and config.weight_format == FP8_BLOCK

    def get(self, name: str) -> Weight:
        # The generator of torch looks at the low 32 bits of its seed only.
        seed = zlib.crc32(f"{self._seed}/{name}".encode())
        generator = torch.Generator(self._device).manual_seed(seed)
        shape = self._shapes[name]
        noise = torch.empty(shape, device=self._device)
        noise.normal_(0.0, _DUMMY_STD, generator=generator)
        if "norm" in name and not (
            self._config.norm_zero_centred and not name.endswith("linear_attn.norm.weight")
        ):
            return noise + 1.0
        if self._codes and may_be_fp8(name, shape):
            return block_fp8.quantise(noise)
        return noise


def _config_of(source: ModelSource) -> ModelConfig:
    if source.config is not None:
        return source.config
    path = _path_of(source)
    return GgufFile(path).config() if source.kind == "gguf" else read_config(path)


def _path_of(source: ModelSource) -> Path:
    if source.path is None:
        raise ModelError(f"model {source.name!r} has no files")
    return source.path
