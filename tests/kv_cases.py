"""Formats and input vectors that the KV tests share."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from headrace.kv.formats import parse_kv_format

HEAD_DIMS = (64, 128, 256)
make = partial(parse_kv_format, model_dtype=torch.bfloat16)
AUTO, FP8, FP8_64 = make("auto"), make("fp8"), make("fp8", fp8_block=64)
INT8, INT8_R = make("int8_per_token_head"), make("int8_per_token_head", int8_rotate=True)
K8V4 = make("turboquant_k8v4")
QUANTISED = (FP8, FP8_64, INT8, INT8_R, K8V4)
FORMATS = (AUTO, *QUANTISED)
every_format = pytest.mark.parametrize("kv_format", FORMATS, ids=lambda entry: entry.label)
quantised = pytest.mark.parametrize("kv_format", QUANTISED, ids=lambda entry: entry.label)
every_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)


def one_to_two(rng, x):
    # Away from 0, where a scale of few bits in the subnormal range of half would be measured.
    return rng.uniform(1, 2, x.shape) * np.sign(x)


def distribution(kind, rows, head_dim, seed=0):
    """Vectors in bf16 values, fp32 `[rows, head_dim]`, as in the measured tables."""
    rng = np.random.default_rng([seed, head_dim])
    x = rng.standard_normal((rows, head_dim))
    if kind == "t3":
        x = rng.standard_t(3, (rows, head_dim))
    elif kind == "outlier":
        x[:, :4] *= 20
    elif kind == "one-hot":
        x = one_to_two(rng, x) * (np.arange(head_dim) == rng.integers(0, head_dim, (rows, 1)))
    elif kind == "constant":
        x[:] = one_to_two(rng, x)[:, :1]
    return torch.from_numpy(x.astype(np.float32)).bfloat16().float()


def special(kind, rows, head_dim):
    x = distribution("gauss", rows, head_dim, seed=1)
    channels = torch.arange(head_dim)
    if kind == "zero":
        return torch.where(x < 0, -0.0, 0.0)
    if kind == "not finite":
        for step, value in ((7, math.nan), (11, math.inf), (13, -math.inf), (5, -0.0)):
            x[:, channels % step == step - 1] = value
        return x
    # Scales of one step of half, values below fp32's normal range, and above that of half.
    return x * {"tiny": 2.0**-24, "subnormal": 2.0**-137, "vanishing": 1e-22, "huge": 3e4}[kind]
