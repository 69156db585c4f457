"""What a model name means: a folder, a GGUF file, a model we can pull, or a known configuration."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.errors import ConfigError, ModelError
from headrace.loading.pull import PULLABLE, pull
from headrace.models.config import ModelConfig
from headrace.models.known import KNOWN_CONFIGS, known_config

LOAD_FORMATS = ("auto", "dummy")

_ACCEPTED = (
    f"give a folder with config.json and safetensors files, a .gguf file, or one of "
    f"{', '.join(PULLABLE)}; with load_format='dummy' also one of {', '.join(KNOWN_CONFIGS)}"
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from.

    kind: "hf" (folder) and "gguf" (file) have a path; "dummy" has a configuration and makes
    random weights.
    """

    kind: Literal["hf", "gguf", "dummy"]
    name: str
    path: Path | None = None
    config: ModelConfig | None = None


def resolve_model(
    name_or_path: str | Path, *, load_format: str = "auto", cache_dir: Path | None = None
) -> ModelSource:
    """Find a model; a name that can be pulled is fetched to `cache_dir` if it is not there yet.

    Raises
    ------
    ConfigError
        `load_format` is not one of "auto" and "dummy".
    ModelError
        Nothing is found; the message lists what is accepted.
    DownloadError
        A model had to be fetched and could not be.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    name = str(name_or_path)
    if load_format == "dummy":
        return ModelSource("dummy", name, config=known_config(name))
    if isinstance(name_or_path, str) and name in PULLABLE:
        return ModelSource("hf", name, pull(name, cache_dir))
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json; {_ACCEPTED}")
        return ModelSource("hf", name, path)
    if path.is_file():
        # A file of another kind is reported by the reader, from its first bytes.
        return ModelSource("gguf", name, path)
    if name.lower() in KNOWN_CONFIGS:
        raise ModelError(f"{name!r} is a configuration without weights; use load_format='dummy'")
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        raise ModelError(
            f"{name!r} is not a local path, and weights are never downloaded from a model hub; "
            f"{_ACCEPTED}"
        )
    raise ModelError(f"no model at {name!r}; {_ACCEPTED}")
