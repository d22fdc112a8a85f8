"""The kernels of a decoder layer that are not matrix products, in two implementations behind one small interface.

``torch`` runs anywhere; ``flashinfer`` needs CUDA and a 16-bit dtype. A set is plain functions, resolved once: in eager
mode every microsecond of Python between two launches is paid per layer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from graphtune.model_config import ModelConfig

Rotation = tuple[torch.Tensor, torch.Tensor]

# Head sizes that FlashInfer's in-place rope kernel is compiled for.
FLASHINFER_HEAD_DIMS = (64, 128, 256, 512)
# Its SiLU·mul reads 16 bytes at a time from the start of each half row.
FLASHINFER_ROW_BYTES = 16


@dataclass(frozen=True)
class Kernels:
    """One implementation. ``n`` is tokens, weights are (width,), and ``eps`` is added to the mean square.

    ``norm(x, weight, eps)``: RMSNorm of (n, width) rows into a new tensor.
    ``add_norm(x, residual, weight, eps)``: adds x to residual in place and returns RMSNorm(residual); x is given up.
    ``head_norm(x, weight, eps)``: RMSNorm of every head of (n, heads, head_dim), in place; x may be strided.
    ``silu_mul(x)``: (n, 2 · width) holding gate and up to (n, width) silu(gate) · up.
    ``rotation(table, positions)``: what ``rope`` needs for these positions (n,), made once per forward.
    ``rope(q, k, rotation)``: turns q and k (n, heads, head_dim) in place, first half against second half of a head;
    both may be strided views.
    """

    name: str
    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
    head_norm: Callable[[torch.Tensor, torch.Tensor, float], None]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    rotation: Callable[[torch.Tensor, torch.Tensor], Rotation]
    rope: Callable[[torch.Tensor, torch.Tensor, Rotation], None]


def kernels_for(device: torch.device, dtype: torch.dtype, config: ModelConfig) -> Kernels:
    """FlashInfer's kernels where installed and fit for dtype and shapes, else torch's; the set says which by name."""
    takes_dtype = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    takes_shapes = config.head_dim in FLASHINFER_HEAD_DIMS and (
        config.intermediate_size * dtype.itemsize % FLASHINFER_ROW_BYTES == 0
    )
    if takes_dtype and takes_shapes and importlib.util.find_spec("flashinfer") is not None:
        return flashinfer_kernels(device)
    return TORCH_KERNELS


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rms_norm(x, weight.shape, weight, eps)


def _add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    residual.add_(x)
    return torch.rms_norm(residual, weight.shape, weight, eps)


def _head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    x.copy_(torch.rms_norm(x, weight.shape, weight, eps))


def _silu_mul(x: torch.Tensor) -> torch.Tensor:
    width = x.shape[-1] // 2
    gate, up = x.split_with_sizes((width, width), -1)
    return torch.nn.functional.silu(gate).mul_(up)


def _rotation(table: torch.Tensor, positions: torch.Tensor) -> Rotation:
    """cos and signed sin, (n, 1, head_dim) each, so that a turn is x · cos + x rolled by half a head · sin."""
    half = table.shape[1] // 2
    cos, sin = table.index_select(0, positions).split_with_sizes((half, half), 1)
    return torch.cat((cos, cos), 1).unsqueeze(1), torch.cat((sin.neg(), sin), 1).unsqueeze(1)


def _rope(q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> None:
    cos, sin = rotation
    for x in (q, k):
        # The table is fp32, so 16-bit heads are turned in fp32 and rounded once, as FlashInfer does.
        x.copy_((x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin))


TORCH_KERNELS = Kernels("torch", _norm, _add_norm, _head_norm, _silu_mul, _rotation, _rope)


def flashinfer_kernels(device: torch.device) -> Kernels:
    """FlashInfer 0.6.13's kernels. Loads (or, without its precompiled files, builds) the three modules used."""
    from flashinfer import activation, norm, rope
    from flashinfer.utils import device_support_pdl

    # The public wrappers make views, look the module up and ask for the compute capability in every call; these are
    # the functions they end in. Norms come from one of two sources, as the package decides at import.
    pdl = device_support_pdl(device)
    if norm._USE_CUDA_NORM:
        rmsnorm, fused_add_rmsnorm = norm.get_norm_module().rmsnorm, norm.get_norm_module().fused_add_rmsnorm
    else:
        rmsnorm, fused_add_rmsnorm = norm._rmsnorm_impl, norm.fused_add_rmsnorm
    silu_and_mul = activation.get_act_and_mul_module("silu").silu_and_mul
    apply_rope = rope.get_rope_module().apply_rope_pos_ids_cos_sin_cache
    empty_like = torch.empty_like

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = empty_like(x)
        rmsnorm(out, x, weight, eps, pdl)
        return out

    def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        fused_add_rmsnorm(x, residual, weight, eps, pdl)
        return x

    def head_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        # In place is safe: a warp has read a whole head before it writes, and only its own.
        rmsnorm(x, x, weight, eps, pdl)

    def silu_mul(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((x.shape[0], x.shape[1] // 2))
        silu_and_mul(out, x, pdl)
        return out

    def rotation(table: torch.Tensor, positions: torch.Tensor) -> Rotation:
        return table, positions

    def rotate(q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> None:
        table, positions = rotation
        apply_rope(q, k, q, k, table, positions, False)

    return Kernels("flashinfer", rms_norm, add_rms_norm, head_rms_norm, silu_mul, rotation, rotate)
