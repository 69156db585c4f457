"""A checkpoint under the names of the model: prefixes mapped, parts skipped, fp8 pairs joined.

Names, shapes and scales are checked from the headers, before any weight is read; values are checked
as they are read, because one NaN in a weight makes every token of every request NaN.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from headrace.backends.base import Weight
from headrace.errors import CheckpointError
from headrace.layers.block_fp8 import BlockFp8Weight, blocks_of
from headrace.models.config import ModelConfig
from headrace.models.quantization import FP8_BLOCK
from headrace.models.tensors import expected_tensors

FP8_WEIGHTS = ("keep", "dequantize")

# A multimodal checkpoint nests the text part; the vision tower and the draft head are not run.
_NESTED_PREFIX = "model.language_model."
_SKIPPED_PREFIXES = ("model.visual.", "mtp.")
_DENSE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Either name is in use; both are multiplied.
_SCALE_SUFFIXES = ("_scale_inv", "_scale")
# At most this many names of each kind are listed in an error.
_LISTED_NAMES = 8


class CheckpointFile(Protocol):
    """Tensors of a file under the names the file has."""

    path: Path

    def get(self, name: str) -> torch.Tensor:
        """Return one tensor, in the dtype of the file."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every tensor, without reading data."""
        ...

    def fp8_names(self) -> frozenset[str]:
        """Names of the tensors that are stored as e4m3 codes."""
        ...


class Checkpoint:
    """The weights of one model, by the names of `expected_tensors`; a `TensorSource`.

    fp8_weights: "keep" gives codes and scales as they are, "dequantize" dense fp32.

    Raises
    ------
    CheckpointError
        Lists tensors that are missing, unexpected or mis-shaped, and scales that are missing.
    """

    def __init__(
        self, file: CheckpointFile, config: ModelConfig, *, fp8_weights: str = "keep"
    ) -> None:
        self._file = file
        self._dequantise = fp8_weights == "dequantize"
        shapes = file.shapes()
        named = _text_names(shapes, config)
        self._names = {ours: theirs for ours, theirs in named.items() if not _is_scale(ours)}
        fp8 = file.fp8_names()
        self._scales: dict[str, str] = {}
        for ours, theirs in named.items():
            weight = _weight_of(ours)
            if weight is not None and named.get(weight) in fp8:
                self._scales[weight] = theirs
            elif weight is not None:
                self._names[ours] = theirs  # a scale of nothing is reported as unexpected
        coded = [ours for ours, theirs in self._names.items() if theirs in fp8]
        actual = {ours: shapes[theirs] for ours, theirs in self._names.items()}
        problems = _tensor_problems(actual, config)
        if coded and config.weight_format != FP8_BLOCK:
            problems["fp8 codes without a quantization_config"] = coded
        problems["fp8 codes that are no matrix"] = [
            name for name in coded if len(actual[name]) != 2
        ]
        problems["missing scales of"] = [name for name in coded if name not in self._scales]
        problems["wrong shape of the scales of"] = [
            f"{weight} {list(shapes[scale])}, expected {_scale_shape(actual[weight])}"
            for weight, scale in self._scales.items()
            if not _scale_fits(shapes[scale], actual[weight])
        ]
        found = [f"{kind}: {_shortened(names)}" for kind, names in problems.items() if names]
        if found:
            raise CheckpointError(f"{file.path} does not match its config; {'; '.join(found)}")

    def get(self, name: str) -> Weight:
        """Return one tensor, dense in the dtype of the file, or codes with their scales.

        Raises
        ------
        CheckpointError
            No such tensor, its bytes cannot be read, or a value is NaN or infinite.
        """
        if name not in self._names:
            raise CheckpointError(f"{self._file.path} has no tensor {name}")
        tensor = self._file.get(self._names[name])
        if name not in self._scales:
            if tensor.dtype not in _DENSE_DTYPES:
                raise CheckpointError(
                    f"{self._file.path}: {name} is stored as {tensor.dtype}, which is not supported"
                )
            if not _all_finite(tensor):
                self._refuse_values(name)
            return tensor
        # Any float dtype, and singleton axes between or behind the two that count.
        scales = self._file.get(self._scales[name]).float()
        weight = BlockFp8Weight(tensor, scales.reshape(_scale_shape(tuple(tensor.shape))))
        if weight.has_nan():
            self._refuse_values(name)
        return weight.dequantise() if self._dequantise else weight

    def _refuse_values(self, name: str) -> None:
        raise CheckpointError(f"{self._file.path}: {name} has values that are NaN or infinite")


def _text_names(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> dict[str, str]:
    """Our name -> name in the file, for every tensor that is not skipped."""
    if config.architecture != "qwen3_5":
        return {name: name for name in shapes}
    kept = [name for name in shapes if not name.startswith(_SKIPPED_PREFIXES)]
    if not any(name.startswith(_NESTED_PREFIX) for name in kept):
        return {name: name for name in kept}
    # Beside a nested text part, "model." alone is the name of nothing we know.
    return {
        f"model.{name.removeprefix(_NESTED_PREFIX)}"
        if name.startswith(_NESTED_PREFIX)
        else name.replace("model.", "model (not nested).", 1): name
        for name in kept
    }


def _weight_of(name: str) -> str | None:
    """Name of the weight that a scale belongs to."""
    for suffix in _SCALE_SUFFIXES:
        if name.endswith(f".weight{suffix}"):
            return name.removesuffix(suffix)
    return None


def _is_scale(name: str) -> bool:
    return _weight_of(name) is not None


def _tensor_problems(
    actual: Mapping[str, tuple[int, ...]], config: ModelConfig
) -> dict[str, list[str]]:
    expected = expected_tensors(config)
    return {
        "missing": [name for name in expected if name not in actual],
        "unexpected": [
            name for name in actual if name not in expected and not _harmless(name, config)
        ],
        "wrong shape": [
            f"{name} is {list(actual[name])}, expected {list(shape)}"
            for name, shape in expected.items()
            if name in actual and actual[name] != shape
        ],
    }


def _harmless(name: str, config: ModelConfig) -> bool:
    # Old llama files store the rotary frequencies; some tied models store the head a second time.
    return name.endswith("rotary_emb.inv_freq") or (
        name == "lm_head.weight" and config.tie_word_embeddings
    )


def _scale_shape(weight: tuple[int, ...]) -> list[int]:
    return [blocks_of(extent) for extent in weight]


def _scale_fits(scale: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    expected = _scale_shape(weight)
    if len(scale) == len(expected):
        return list(scale) == expected
    # Of higher rank: the same extents in the same order, with axes of 1 anywhere between.
    return len(scale) == 4 and [n for n in scale if n > 1] == [n for n in expected if n > 1]


def _all_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite: one pass for the usual answer, as a sum keeps any NaN."""
    # Infinities of both signs sum to NaN; a sum that merely overflows is looked at again.
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())


def _shortened(names: list[str]) -> str:
    listed = ", ".join(names[:_LISTED_NAMES])
    more = len(names) - _LISTED_NAMES
    return f"{listed} and {more} more" if more > 0 else listed
