"""Reader of a Hugging Face folder: one safetensors file, or shards with an index.

Files are memory-mapped and read tensor by tensor; shapes are known without reading data.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headrace.errors import CheckpointError, ModelError
from headrace.models.config import ModelConfig

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_E4M3 = "F8_E4M3"


class SafetensorsFolder:
    """Tensors of a folder by name.

    Raises
    ------
    CheckpointError
        No safetensors file, a missing shard, or a file that is truncated or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        if (path / _SINGLE_FILE).is_file():
            self._add(path / _SINGLE_FILE)
        elif (path / _INDEX_FILE).is_file():
            self._add_shards(path / _INDEX_FILE)
        else:
            raise CheckpointError(f"{path} has neither {_SINGLE_FILE} nor {_INDEX_FILE}")

    def get(self, name: str) -> torch.Tensor:
        """Return one tensor, mapped from its file.

        Raises
        ------
        CheckpointError
            No such tensor, or its bytes cannot be read.
        """
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        try:
            tensor: torch.Tensor = self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: cannot read {name}: {error}") from error
        return tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, from the headers alone."""
        return {
            name: tuple(self._open[file].get_slice(name).get_shape())
            for name, file in self._file_of.items()
        }

    def fp8_names(self) -> frozenset[str]:
        """Names of the tensors that are stored as e4m3 codes, from the headers alone."""
        return frozenset(
            name
            for name, file in self._file_of.items()
            if self._open[file].get_slice(name).get_dtype() == _E4M3
        )

    def _add(self, file: Path) -> None:
        try:
            opened: Any = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is truncated or damaged: {error}") from error
        self._open[file] = opened
        self._file_of.update(dict.fromkeys(opened.keys(), file))

    def _add_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map")
        shards = sorted({str(shard) for shard in weight_map.values()})
        missing = [shard for shard in shards if not (self.path / shard).is_file()]
        if missing:
            raise CheckpointError(f"{self.path}: missing shards {', '.join(missing)}")
        for shard in shards:
            self._add(self.path / shard)
        misplaced = [
            name
            for name, shard in weight_map.items()
            if self._file_of.get(name) != self.path / shard
        ]
        if misplaced:
            raise CheckpointError(f"{index} names tensors its shards lack: {', '.join(misplaced)}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises
    ------
    ModelError
        The file is missing, is not JSON, or is not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return content


def read_config(path: Path) -> ModelConfig:
    """Read the `config.json` of a folder, and its `generation_config.json` if there is one."""
    generation = path / "generation_config.json"
    return ModelConfig.from_hf(
        read_json(path / "config.json"), read_json(generation) if generation.is_file() else None
    )


def read_chat_template(path: Path) -> str | None:
    """Chat template of a folder: its own file first, then the tokenizer's configuration."""
    own_file = path / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    if not (path / "tokenizer_config.json").is_file():
        return None
    template = read_json(path / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        # Several named templates; the one called "default" is the plain chat.
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
