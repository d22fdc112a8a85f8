"""Bytes of a model by its shapes: weights, KV cache per token, activations; and a deployment that differs in them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from graphtune.errors import InputError
from graphtune.model_config import ModelConfig

WIDTHS: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of one value of a model's dtype."""

KV_WIDTHS: Mapping[str, Fraction] = {
    "float32": Fraction(4),
    "bfloat16": Fraction(2),
    "float16": Fraction(2),
    "fp8": Fraction(1),
    "fp8_e4m3": Fraction(1),
    "fp8_e5m2": Fraction(1),
    "int8": Fraction(1),
    "mxfp8": 1 + Fraction(1, 32),
    "fp4": Fraction(1, 2) + Fraction(1, 16),
}
"""Bytes of one value in the KV cache, with a scale byte per block of 32 (mxfp8) or 16 (fp4)."""

SAMPLING_COPIES = 2
"""Copies of the logits in float32 that sampling holds: the logits themselves and the probabilities."""


@dataclass(frozen=True)
class Deployment:
    """How a server differs from what was swept; null is no difference. ``shard`` is the ranks of tensor parallelism."""

    kv_dtype: str | None = None
    weights_bytes: int | None = None
    shard: int | None = None

    def __post_init__(self) -> None:
        if self.kv_dtype is not None and self.kv_dtype not in KV_WIDTHS:
            raise InputError(
                f"unknown KV dtype {self.kv_dtype!r}", where="--kv-dtype", action=f"Known: {', '.join(KV_WIDTHS)}."
            )
        if self.weights_bytes is not None and self.weights_bytes < 1:
            raise InputError("weights of no bytes make no sense", where="--weights")

    @property
    def differs(self) -> bool:
        return self != Deployment()


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of one rank. ``activation_bytes_per_token`` are those of a forward at its widest layer;
    ``logits_bytes_per_row`` the logits with what sampling makes of them."""

    weights_bytes: int
    bytes_per_kv_token: int
    activation_bytes_per_token: int
    logits_bytes_per_row: int


def model_bytes(config: ModelConfig, dtype: str, deployment: Deployment | None = None) -> ModelBytes:
    """The bytes of a dense model, whole or one rank's, under a deployment.

    Raises InputError for a shard that does not divide the model or that is asked of shapes that are one rank's already.
    """
    deployment = deployment or Deployment()
    if deployment.shard is not None and deployment.shard != config.shard_of:
        config = _sharded(config, deployment.shard)
    width = WIDTHS[dtype]
    return ModelBytes(
        weights_bytes=deployment.weights_bytes or config.weights_bytes(width),
        bytes_per_kv_token=kv_bytes(2 * config.kv_size * config.num_layers, deployment.kv_dtype or dtype),
        activation_bytes_per_token=activation_bytes_per_token(
            config.hidden_size, config.q_size, config.kv_size, config.intermediate_size, width
        ),
        logits_bytes_per_row=logits_bytes_per_row(config.vocab_size, width),
    )


def _sharded(config: ModelConfig, ranks: int) -> ModelConfig:
    try:
        return (config.whole or config).shard(ranks)
    except InputError as error:
        raise InputError(error.message, where="--shard", action=error.action) from error


def kv_bytes(values_per_token: int, kv_dtype: str) -> int:
    """Whole bytes of one token's keys and values."""
    return math.ceil(values_per_token * KV_WIDTHS[kv_dtype])


def activation_bytes_per_token(hidden: int, q: int, kv: int, inner: int, width: int) -> int:
    """Residual and hidden state, and the larger of attention (q, k, v, output) and MLP (gate, up, product)."""
    return width * (2 * hidden + max(2 * q + 2 * kv, 3 * inner))


def logits_bytes_per_row(vocabulary: int, width: int) -> int:
    """Logits as computed and ``SAMPLING_COPIES`` float32 copies."""
    return vocabulary * (width + 4 * SAMPLING_COPIES)
