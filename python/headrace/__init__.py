"""Batched LLM inference: a Rust scheduler, torch forward passes, long contexts in little memory.

Importing the package touches neither torch nor a GPU; names are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace._core import PageAllocator, Scheduler, SlotAllocator, __version__
    from headrace.config import EngineConfig
    from headrace.engine import Engine
    from headrace.errors import (
        CheckpointError,
        ConfigError,
        DeviceError,
        DownloadError,
        DuplicateRequest,
        EngineClosed,
        ForkedProcess,
        HeadraceError,
        InvalidRequest,
        ModelError,
        OutOfPages,
        PageStateError,
        PromptTooLong,
        QueueFull,
        StalePlan,
        StepTimeout,
        UnknownRequest,
    )
    from headrace.llm import LLM
    from headrace.request import BatchedRequest, RequestOutput, SamplingParams

_HOME = {
    "LLM": "headrace.llm",
    "BatchedRequest": "headrace.request",
    "CheckpointError": "headrace.errors",
    "ConfigError": "headrace.errors",
    "DeviceError": "headrace.errors",
    "DownloadError": "headrace.errors",
    "DuplicateRequest": "headrace.errors",
    "Engine": "headrace.engine",
    "EngineClosed": "headrace.errors",
    "EngineConfig": "headrace.config",
    "ForkedProcess": "headrace.errors",
    "HeadraceError": "headrace.errors",
    "InvalidRequest": "headrace.errors",
    "ModelError": "headrace.errors",
    "OutOfPages": "headrace.errors",
    "PageAllocator": "headrace._core",
    "PageStateError": "headrace.errors",
    "PromptTooLong": "headrace.errors",
    "QueueFull": "headrace.errors",
    "RequestOutput": "headrace.request",
    "SamplingParams": "headrace.request",
    "Scheduler": "headrace._core",
    "SlotAllocator": "headrace._core",
    "StalePlan": "headrace.errors",
    "StepTimeout": "headrace.errors",
    "UnknownRequest": "headrace.errors",
    "__version__": "headrace._core",
}

__all__ = [
    "LLM",
    "BatchedRequest",
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "DownloadError",
    "DuplicateRequest",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "ForkedProcess",
    "HeadraceError",
    "InvalidRequest",
    "ModelError",
    "OutOfPages",
    "PageAllocator",
    "PageStateError",
    "PromptTooLong",
    "QueueFull",
    "RequestOutput",
    "SamplingParams",
    "Scheduler",
    "SlotAllocator",
    "StalePlan",
    "StepTimeout",
    "UnknownRequest",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
