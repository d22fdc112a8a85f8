"""The cos/sin table of rotary positions: built once, at construction, for every position of the model."""

from __future__ import annotations

import math

import torch

from graphtune.model_config import Llama3Rope, ModelConfig


def inverse_frequencies(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """(head_dim / 2,) fp32 radians per position: theta ** (-2 i / head_dim), scaled as Llama 3.1 does when asked."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    return frequencies if config.rope_scaling is None else _llama3(frequencies, config.rope_scaling)


def _llama3(frequencies: torch.Tensor, rope: Llama3Rope) -> torch.Tensor:
    """Llama 3.1: with turns = original context / wavelength, at most ``low_freq_factor`` turns are slowed by
    ``factor``, at least ``high_freq_factor`` stay, and those between are blended linearly in turns."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / rope.factor + kept * frequencies


def cos_sin_table(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """(max_position_embeddings, head_dim) fp32: row p is cos of p's angles, then their sin."""
    half = config.head_dim // 2
    table = torch.empty((config.max_position_embeddings, config.head_dim), dtype=torch.float32, device=device)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32, device=device)
    angles = torch.outer(positions, inverse_frequencies(config, device))
    torch.cos(angles, out=table[:, :half])
    torch.sin(angles, out=table[:, half:])
    return table
