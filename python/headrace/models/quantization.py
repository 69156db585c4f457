"""How the matrices of a checkpoint are stored, as its `quantization_config` says.

The one quantised format is e4m3 codes with a scale for every 128 x 128 block. The scales stand
beside the weights; activations are quantised at run time or not at all, so they have none.
"""

from collections.abc import Mapping
from typing import Any

from headrace.errors import ModelError

DENSE = "dense"
FP8_BLOCK = "fp8_block"
WEIGHT_FORMATS = (DENSE, FP8_BLOCK)

_BLOCK = [128, 128]
_ONLY_VALUES: dict[str, tuple[object, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),
    "weight_block_size": (_BLOCK, tuple(_BLOCK)),
}
# Which modules stayed dense is seen in the file itself; `dequantize` is a wish of a loader.
_IGNORED = ("modules_to_not_convert", "dequantize")


def weight_format(config: Mapping[str, Any]) -> str:
    """Return the storage of the matrices.

    Raises
    ------
    ModelError
        A method, block size or key that is not known; the message names it.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return DENSE
    if not isinstance(quantization, Mapping):
        raise ModelError(f"quantization_config must be an object, got {quantization!r}")
    for key, accepted in _ONLY_VALUES.items():
        value = quantization.get(key)
        if value not in accepted:
            raise ModelError(
                f"quantization_config: {key} = {value!r} is not supported; only {accepted[0]!r} is"
            )
    for key, value in quantization.items():
        if key not in _ONLY_VALUES and key not in _IGNORED and value not in (None, False):
            raise ModelError(f"quantization_config: {key} = {value!r} is not supported")
    return FP8_BLOCK
