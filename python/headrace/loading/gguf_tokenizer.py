"""Byte-level BPE tokenizer of a GGUF file, as the JSON of the `tokenizers` library."""

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from headrace.errors import CheckpointError, ModelError
from headrace.loading.gguf_file import GgufFile

# Token types of the format (`tokenizer.ggml.token_type`).
_CONTROL = 3
_USER_DEFINED = 4

# The split pattern Qwen2 and Qwen3 publish in their tokenizer.json.
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_json(file: GgufFile) -> str:
    """Build the tokenizer of a GGUF file; returns the content of a `tokenizer.json`.

    Raises
    ------
    ModelError
        The tokenizer model, the pre-tokenizer or a flag of the file is not supported.
    CheckpointError
        The vocabulary is missing or does not fit its merges.
    """
    model = file.metadata("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelError(
            f"{file.path}: tokenizer.ggml.model {model!r} is not supported; only 'gpt2' "
            f"(byte-level BPE) is"
        )
    pre = file.metadata("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.pre {pre!r} is not supported; supported: "
            f"{', '.join(_PRE_TOKENIZERS)}"
        )
    if file.metadata("tokenizer.ggml.add_bos_token"):
        raise ModelError(f"{file.path}: tokenizer.ggml.add_bos_token = true is not supported")
    tokens = _strings(file, "tokenizer.ggml.tokens")
    merges = [merge.split(" ") for merge in _strings(file, "tokenizer.ggml.merges")]
    try:
        tokenizer = Tokenizer(
            models.BPE(
                vocab={token: index for index, token in enumerate(tokens)},
                merges=[(left, right) for left, right in merges],
                fuse_unk=False,
                byte_fallback=False,
            )
        )
    except Exception as error:  # the library raises the bare base class
        raise CheckpointError(f"{file.path}: vocabulary and merges do not fit: {error}") from error
    _PRE_TOKENIZERS[pre](tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = file.metadata("tokenizer.ggml.token_type") or []
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        tokenizer.add_tokens(
            [
                AddedToken(token, special=special, normalized=False)
                for token, token_kind in zip(tokens, kinds, strict=False)
                if token_kind == kind
            ]
        )
    return str(tokenizer.to_str())


def _strings(file: GgufFile, key: str) -> list[str]:
    values: Any = file.metadata(key)
    if not isinstance(values, list) or not values:
        raise CheckpointError(f"{file.path} has no key {key}")
    return [str(value) for value in values]


def _use_smollm(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _use_qwen2(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: dict[str, Callable[[Tokenizer], None]] = {
    "smollm": _use_smollm,
    "qwen2": _use_qwen2,
}
