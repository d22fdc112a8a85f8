"""The kernel sets: torch's against the formulas, FlashInfer's against torch's, and which one is chosen."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import math
from typing import Any

import pytest
import torch

from graphtune.model_config import ModelConfig
from graphtune.worker.models.layers import TORCH_KERNELS, flashinfer_kernels, kernels_for
from graphtune.worker.models.rope import cos_sin_table, inverse_frequencies

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}


def config(**keys: Any) -> ModelConfig:
    return ModelConfig.from_mapping({**SHAPE, **keys})


def strided_heads(tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """q (tokens, 4, head_dim), k and v (tokens, 2, head_dim) as views of one merged projection."""
    merged = torch.randn((tokens, 8 * head_dim), generator=torch.Generator().manual_seed(tokens))
    return merged.to(device, dtype).view(tokens, 8, head_dim).split_with_sizes((4, 2, 2), 1)


def rotated(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Every pair (i, i + half) of a head as one complex number, turned by position · frequency."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    angles = positions.double()[:, None, None] * frequencies.double()
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [2, 16, 128])
def test_torch_rope_turns_pairs_in_place(head_dim: int, dtype: torch.dtype) -> None:
    model = config(head_dim=head_dim)
    positions = torch.tensor([0, 3, 255])
    q, k, v = strided_heads(3, head_dim, dtype, CPU)
    untouched, frequencies = v.clone(), inverse_frequencies(model, CPU)
    expected = [rotated(x, positions, frequencies) for x in (q, k)]
    TORCH_KERNELS.rope(q, k, TORCH_KERNELS.rotation(cos_sin_table(model, CPU), positions))
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for found, wanted in zip((q, k), expected, strict=True):
        assert (found.double() - wanted).norm() <= tolerance * wanted.norm()
    assert torch.equal(v, untouched)


def test_llama3_scaling_keeps_short_waves_and_slows_long_ones() -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = config(head_dim=128, rope_scaling={**rope, "original_max_position_embeddings": 128})
    plain, found = inverse_frequencies(config(head_dim=128), CPU), inverse_frequencies(scaled, CPU)
    waves = 2 * math.pi / plain
    assert torch.equal(found[waves < 128 / 4], plain[waves < 128 / 4])
    assert torch.allclose(found[waves > 128], plain[waves > 128] / 8)
    between = (waves >= 128 / 4) & (waves <= 128)
    assert bool(between.any()) and bool((found[between] < plain[between]).all())
    assert bool((found[between] > plain[between] / 8).all())
    assert bool((found.diff() < 0).all())


def test_torch_norms_follow_the_formula() -> None:
    x, residual, weight = torch.randn(3, 512), torch.randn(3, 512), torch.randn(512)

    def formula(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return rows / (rows.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt() * scale

    torch.testing.assert_close(TORCH_KERNELS.norm(x, weight, 1e-2), formula(x, weight))
    total = x + residual
    torch.testing.assert_close(TORCH_KERNELS.add_norm(x.clone(), residual, weight, 1e-2), formula(total, weight))
    torch.testing.assert_close(residual, total)
    q, k, _ = strided_heads(3, 16, torch.float32, CPU)
    expected, others = formula(k, weight[:16]), q.clone()
    TORCH_KERNELS.head_norm(k, weight[:16], 1e-2)
    torch.testing.assert_close(k, expected)
    assert torch.equal(q, others)


def test_torch_silu_mul_takes_gate_first() -> None:
    gate_up = torch.randn(3, 20)
    gate, up = gate_up[:, :10], gate_up[:, 10:]
    torch.testing.assert_close(TORCH_KERNELS.silu_mul(gate_up.clone()), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize(
    ("installed", "device", "dtype", "keys", "name"),
    [
        (True, CPU, torch.bfloat16, {}, "torch"),
        (True, CUDA, torch.float32, {}, "torch"),
        (False, CUDA, torch.bfloat16, {}, "torch"),
        (True, CUDA, torch.bfloat16, {"head_dim": 96}, "torch"),
        (True, CUDA, torch.bfloat16, {"intermediate_size": 1026}, "torch"),
        (True, CUDA, torch.bfloat16, {}, "flashinfer"),
        (True, CUDA, torch.float16, {"head_dim": 64}, "flashinfer"),
    ],
)
def test_the_choice_of_kernels_is_a_rule(
    installed: bool,
    device: torch.device,
    dtype: torch.dtype,
    keys: dict[str, Any],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = importlib.machinery.ModuleSpec("flashinfer", None) if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: spec)
    monkeypatch.setattr("graphtune.worker.models.layers.flashinfer_kernels", lambda device: "flashinfer")
    chosen = kernels_for(device, dtype, config(**keys))
    assert getattr(chosen, "name", chosen) == name


# On a GPU: both sets, same inputs


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found.float() - wanted.float()).norm() <= 1e-2 * wanted.float().norm())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flashinfer_rows_equal_torch(dtype: torch.dtype) -> None:
    kernels = flashinfer_kernels(torch.device("cuda", 0))
    generator = torch.Generator("cuda").manual_seed(0)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=CUDA)

    for tokens in (1, 3, 257):
        x, residual, weight = rows(tokens, 512), rows(tokens, 512), rows(512)
        assert near(kernels.norm(x, weight, 1e-5), TORCH_KERNELS.norm(x, weight, 1e-5))
        sums = [residual.clone(), residual.clone()]
        found = kernels.add_norm(x.clone(), sums[0], weight, 1e-5)
        assert near(found, TORCH_KERNELS.add_norm(x.clone(), sums[1], weight, 1e-5)) and near(*sums)
        gate_up = rows(tokens, 1040)
        assert near(kernels.silu_mul(gate_up), TORCH_KERNELS.silu_mul(gate_up.clone()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flashinfer_heads_equal_torch(dtype: torch.dtype) -> None:
    """In place on strided views, q/k norm then rope; v, which lies between tokens, stays as it is."""
    device = torch.device("cuda", 0)
    for tokens, head_dim, index in itertools.product((1, 3, 2048), (64, 128, 256), (torch.int32, torch.int64)):
        table = cos_sin_table(config(head_dim=head_dim), device)
        positions = (torch.arange(tokens, device=device, dtype=index) * 7) % 256
        weight = torch.rand(head_dim, device=device).add_(0.5).to(dtype)
        results = []
        for kernels in (flashinfer_kernels(device), TORCH_KERNELS):
            q, k, v = strided_heads(tokens, head_dim, dtype, device)
            before = v.clone()
            for x in (q, k):
                kernels.head_norm(x, weight, 1e-6)
            kernels.rope(q, k, kernels.rotation(table, positions))
            assert torch.equal(v, before)
            results.append((q, k))
        for found, wanted in zip(*results, strict=True):
            assert near(found, wanted), (tokens, head_dim, index)
