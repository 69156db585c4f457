"""Typed access to the fields of a configuration that came from JSON; errors name the key."""

from collections.abc import Mapping
from typing import Any

from headrace.errors import ModelError


def is_int(value: object) -> bool:
    """Whether `value` is an integer; JSON's true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def required(config: Mapping[str, Any], key: str) -> Any:  # noqa: ANN401 - a JSON value
    """Return a field that must be there; `ModelError` if it is missing or null."""
    if config.get(key) is None:
        raise ModelError(f"config has no field {key!r}")
    return config[key]


def positive(config: Mapping[str, Any], key: str) -> int:
    """Return a field that must be a positive integer."""
    value = required(config, key)
    if not is_int(value) or value <= 0:
        raise ModelError(f"{key} must be a positive integer, got {value!r}")
    return int(value)


def number(config: Mapping[str, Any], key: str) -> float:
    """Return a field that must be a number."""
    value = required(config, key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"{key} must be a number, got {value!r}")
    return float(value)


def token_id(key: str, value: object) -> int | None:
    """Check one token id; None stays None."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ModelError(f"{key} must be a token id, got {value!r}")
    return value


def token_ids(key: str, value: object) -> tuple[int, ...]:
    """Check a token id or a list of them."""
    entries = value if isinstance(value, list | tuple) else [value]
    ids = (token_id(key, entry) for entry in entries)
    return tuple(token for token in ids if token is not None)
