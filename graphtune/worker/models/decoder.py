"""One dense decoder for every family of ModelConfig: functions over tensors, no modules, no hooks, no host reads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from graphtune.model_config import ModelConfig
from graphtune.worker.models.layers import kernels_for
from graphtune.worker.models.rope import cos_sin_table
from graphtune.worker.models.weights import Checkpoint, allocate, fill_random

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _Layer(NamedTuple):
    """One layer as the forward reads it: weights transposed to (in, out), ``next_norm`` is the norm that follows."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    next_norm: torch.Tensor


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """(n, in) @ (in, out) + bias, straight to the product: F.linear would transpose and dispatch once more."""
    return torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)


class Decoder:
    """A decoder on one device with random weights (``seed``) or, through ``from_safetensors``, trained ones.

    Weights lie merged (query, key, value; gate, up) in one copy. When ``config.shard_of`` is above 1 the shapes are
    those of rank 0 and there are no collectives: products that a server would reduce over ranks are left partial, the
    embedding and the LM head hold the first slice of the vocabulary, and callers take token ids modulo
    ``config.vocab_size``. Such logits measure time and memory; they predict nothing.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._build(config, dtype, device)
        with torch.inference_mode(False), torch.no_grad():
            fill_random(self._weights, seed)

    @classmethod
    def from_safetensors(
        cls, config: ModelConfig, folder: str | Path, *, dtype: torch.dtype, device: torch.device
    ) -> Decoder:
        """Load ``model.safetensors`` or the files of its index, converted to ``dtype``; a shard takes rank 0's slices.

        Every tensor is used exactly once. Raises one InputError that names all that do not fit, before any allocation.
        """
        decoder = cls.__new__(cls)
        with ExitStack() as stack, torch.inference_mode(False), torch.no_grad():
            checkpoint = Checkpoint(folder, config, stack)
            decoder._build(config, dtype, device)
            checkpoint.copy_into(decoder._weights)
        return decoder

    def _build(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.kernels = kernels_for(device, dtype, config)
        # Normal tensors even when called under inference mode: those could not be written to outside it.
        with torch.inference_mode(False), torch.no_grad():
            self._weights = allocate(config, dtype, device)
            self._cos_sin = cos_sin_table(config, device)
        weights = self._weights
        self._embedding = weights["embedding"]
        self._lm_head = weights["embedding" if config.tie_word_embeddings else "lm_head"].t()
        self._first_norm = weights["layers.0.input_norm"]
        self._layers = tuple(self._layer(index) for index in range(config.num_layers))
        self._split = (config.num_heads, config.num_kv_heads, config.num_kv_heads)

    def _layer(self, index: int) -> _Layer:
        weights, own = self._weights, f"layers.{index}."
        following = f"layers.{index + 1}.input_norm"
        return _Layer(
            qkv=weights[own + "qkv"].t(),
            qkv_bias=weights.get(own + "qkv_bias"),
            q_norm=weights.get(own + "q_norm"),
            k_norm=weights.get(own + "k_norm"),
            o=weights[own + "o"].t(),
            o_bias=weights.get(own + "o_bias"),
            post_norm=weights[own + "post_norm"],
            gate_up=weights[own + "gate_up"].t(),
            gate_up_bias=weights.get(own + "gate_up_bias"),
            down=weights[own + "down"].t(),
            down_bias=weights.get(own + "down_bias"),
            next_norm=weights[following if following in weights else "final_norm"],
        )

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights; equals ``config.weights_bytes`` at the dtype's size."""
        return sum(tensor.nbytes for tensor in self._weights.values())

    @property
    def rope_cache_bytes(self) -> int:
        """Bytes of the cos/sin table, which is not a weight."""
        return self._cos_sin.nbytes

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Everything a forward reads besides its arguments: weights and the cos/sin table."""
        return {**self._weights, "rope.cos_sin": self._cos_sin}

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        logits_rows: torch.Tensor | None = None,
        *,
        head: bool = True,
    ) -> torch.Tensor:
        """Logits (n, vocab) in ``dtype`` of ``input_ids`` (n,) at ``positions`` (n,), both int32 or int64.

        ``attend(layer, q, k, v)`` gets q (n, heads, head_dim) and k, v (n, kv heads, head_dim), rope applied, as views
        of one tensor, and returns (n, heads · head_dim). With ``logits_rows`` (m,) only those rows' logits are made.
        Without ``head`` the normed hidden states (n, hidden) are returned, which ``logits`` takes.
        Positions must be below ``max_position_embeddings`` and ids below ``vocab_size``: nothing here looks at values.
        """
        config, kernels = self.config, self.kernels
        add_norm, silu_mul, rope, head_norm = kernels.add_norm, kernels.silu_mul, kernels.rope, kernels.head_norm
        eps, split, heads, head_dim = config.rms_norm_eps, self._split, sum(self._split), config.head_dim
        rotation = kernels.rotation(self._cos_sin, positions)
        residual = torch.embedding(self._embedding, input_ids)
        hidden = kernels.norm(residual, self._first_norm, eps)
        for index, layer in enumerate(self._layers):
            qkv = _linear(hidden, layer.qkv, layer.qkv_bias).view(-1, heads, head_dim)
            q, k, v = qkv.split_with_sizes(split, 1)
            if layer.q_norm is not None and layer.k_norm is not None:
                head_norm(q, layer.q_norm, eps)
                head_norm(k, layer.k_norm, eps)
            rope(q, k, rotation)
            attended = attend(index, q, k, v)
            # What is dead is let go and what is written again is written in place: a graph pool holds the peak of this.
            del qkv, q, k, v
            _linear(attended, layer.o, layer.o_bias, out=hidden)
            del attended
            hidden = add_norm(hidden, residual, layer.post_norm, eps)
            inner = silu_mul(_linear(hidden, layer.gate_up, layer.gate_up_bias))
            _linear(inner, layer.down, layer.down_bias, out=hidden)
            del inner
            hidden = add_norm(hidden, residual, layer.next_norm, eps)
        if not head:
            return hidden
        if logits_rows is not None:
            hidden = hidden.index_select(0, logits_rows)
        return torch.mm(hidden, self._lm_head)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (n, vocab) of normed hidden states (n, hidden)."""
        return torch.mm(hidden, self._lm_head)
