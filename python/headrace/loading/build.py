"""From a resolved source to a model in memory: read config, check names and shapes, load."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.backends.base import Backend
from headrace.backends.torch_ops import TorchBackend
from headrace.errors import CheckpointError, ConfigError, ModelError
from headrace.loading.gguf_file import GgufFile
from headrace.loading.gguf_tokenizer import tokenizer_json
from headrace.loading.resolve import ModelSource
from headrace.loading.safetensors_folder import SafetensorsFolder, read_chat_template, read_config
from headrace.models.config import SUPPORTED_DTYPES, ModelConfig
from headrace.models.decoder import DecoderModel, TensorSource, expected_tensors

# Spread of random linear weights, as transformers initialises them.
_DUMMY_STD = 0.02
# At most this many names of each kind are listed in an error.
_LISTED_NAMES = 8


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
) -> LoadedModel:
    """Load weights tensor by tensor.

    dtype: "auto" is fp32 on a CPU and the dtype of the file elsewhere. backend: default the torch
    reference on `device`. load_format: "dummy" takes only the config of the source and makes
    random weights from `seed`; they are the same for every device.

    Raises
    ------
    ModelError
        The config is not supported.
    CheckpointError
        Tensors are missing, unexpected, mis-shaped, or a file is damaged. Checked before any
        weight is read.
    ConfigError
        `dtype` is unknown, or not supported by the backend, or backend and device differ.
    """
    device = torch.device(device)
    if backend is None:
        backend = TorchBackend(device)
    elif backend.device.type != device.type:
        raise ConfigError(f"backend is on {backend.device}, device is {device}")
    if source.kind == "dummy" or load_format == "dummy":
        config = _config_of(source)
        random = _RandomTensors(config, seed)
        model = DecoderModel(config, random, resolve_dtype(dtype, config, device), backend)
        return LoadedModel(model, config)
    path = _path_of(source)
    if source.kind == "gguf":
        gguf_file = GgufFile(path)
        config = gguf_file.config()
        check_tensors(gguf_file.shapes(), config, path)
        return LoadedModel(
            DecoderModel(config, gguf_file, resolve_dtype(dtype, config, device), backend),
            config,
            tokenizer_json=tokenizer_json(gguf_file),
            chat_template=gguf_file.metadata("tokenizer.chat_template"),
        )
    config = read_config(path)
    folder = SafetensorsFolder(path)
    check_tensors(folder.shapes(), config, path)
    tokenizer_path = path / "tokenizer.json"
    return LoadedModel(
        DecoderModel(config, folder, resolve_dtype(dtype, config, device), backend),
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


def check_tensors(actual: Mapping[str, tuple[int, ...]], config: ModelConfig, path: Path) -> None:
    """Compare the tensors of a file with those its config asks for.

    Raises
    ------
    CheckpointError
        Lists missing, unexpected and mis-shaped tensors.
    """
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in actual]
    unexpected = [name for name in actual if name not in expected and not _harmless(name, config)]
    misshaped = [
        f"{name} is {list(actual[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in actual and actual[name] != shape
    ]
    problems = [
        f"{kind}: {_shortened(names)}"
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("wrong shape", misshaped),
        )
        if names
    ]
    if problems:
        raise CheckpointError(f"{path} does not match its config; {'; '.join(problems)}")


class _RandomTensors(TensorSource):
    """Seeded weights; each tensor has a stream of its own, so the order of reading is free."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._shapes = expected_tensors(config)
        self._seed = seed

    def get(self, name: str) -> torch.Tensor:
        # The generator of torch looks at the low 32 bits of its seed only.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}/{name}".encode()))
        noise = torch.empty(self._shapes[name]).normal_(0.0, _DUMMY_STD, generator=generator)
        return noise + 1.0 if "norm" in name else noise


def _config_of(source: ModelSource) -> ModelConfig:
    if source.config is not None:
        return source.config
    path = _path_of(source)
    return GgufFile(path).config() if source.kind == "gguf" else read_config(path)


def _path_of(source: ModelSource) -> Path:
    if source.path is None:
        raise ModelError(f"model {source.name!r} has no files")
    return source.path


def _harmless(name: str, config: ModelConfig) -> bool:
    # Old llama files store the rotary frequencies; some tied models store the head a second time.
    return name.endswith("rotary_emb.inv_freq") or (
        name == "lm_head.weight" and config.tie_word_embeddings
    )


def _shortened(names: list[str]) -> str:
    listed = ", ".join(names[:_LISTED_NAMES])
    more = len(names) - _LISTED_NAMES
    return f"{listed} and {more} more" if more > 0 else listed
