"""The contract of an attention backend for decode steps over a paged KV pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from graphtune.worker.runners.buffers import DecodeBatch


class AttentionBackend(ABC):
    """Two halves of metadata and one attend call per layer.

    The out-of-graph half (``plan``) may read host data, branch and launch copies; it runs before every step, eager or
    replayed. The in-graph half (``prepare``) holds device operations of static shape only and is recorded.

    Every private buffer is made at its maximum when the backend is made; ``bind`` adds what one captured size needs
    and nothing is allocated after it.
    """

    name: str
    seq_len_fill: int
    """Length that a padded row pretends to have; it must be legal for the backend's kernels."""

    kernels: str
    """The kernels in use, for the record."""

    @abstractmethod
    def private_tensors(self) -> dict[str, torch.Tensor]:
        """Every private buffer by name: the address check covers them."""

    @abstractmethod
    def bind(self, size: int, *, per_size: bool) -> None:
        """Make what graphs of ``size`` requests need. ``per_size`` gives them a workspace of their own."""

    @abstractmethod
    def unbind(self) -> None:
        """Drop what ``bind`` made for all sizes."""

    @abstractmethod
    def plan(self, batch: DecodeBatch, *, graph_size: int | None) -> None:
        """Out-of-graph half for one step. ``graph_size`` is the bound size to replay, None for an eager step.

        Waits until the device has read what the previous plan staged, so it may be called while that step still runs.
        """

    @abstractmethod
    def prepare(self, batch: DecodeBatch) -> None:
        """In-graph half: called at the start of the forward, recorded with it."""

    @abstractmethod
    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write ``k`` and ``v`` (tokens, kv heads, head size) of the step at the batch's output slots, then attend.

        ``q`` is (tokens, heads, head size); returns (tokens, heads × head size) in q's dtype. The scale is
        head_size ** -0.5. Inputs may be strided views of one merged projection.
        """
