"""The contracts of attention over a paged KV pool, one for decode steps and one for prefills."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from graphtune.worker.runners.buffers import DecodeBatch
    from graphtune.worker.runners.prefill_buffers import PrefillBatch


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
    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Write ``k`` and ``v`` (tokens, kv heads, head size) of the step at the batch's output slots, then attend.

        ``q`` is (tokens, heads, head size); returns (tokens, heads × head size) in q's dtype, which is ``out`` where
        that is given. The scale is head_size ** -0.5. Inputs may be strided views of one merged projection.
        """


class PrefillAttention(ABC):
    """One call per layer on whatever batch was planned last, between the segments of a recording or, when the batch has
    fixed request slots, in it.

    Queries of all requests lie on one token axis; a request's keys are its cached prefix and its own new tokens up to
    the query's. Rows beyond the real tokens belong to nobody.
    """

    name: str

    kernels: str
    """The kernels in use, for the record."""

    @abstractmethod
    def private_tensors(self) -> dict[str, torch.Tensor]:
        """Every private buffer by name: the address check covers them."""

    @abstractmethod
    def plan(self, batch: PrefillBatch) -> None:
        """Take the batch that ``forward`` works on from now. Called before every step, eager or replayed."""

    @abstractmethod
    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """Write the real tokens' ``k`` and ``v`` (tokens, kv heads, head size) at their slots, attend into ``out``.

        ``q`` is (tokens, heads, head size), ``out`` (tokens, heads × head size) in q's dtype; tokens may be more than
        the batch has, and those rows of ``out`` become zero. The scale is head_size ** -0.5. Inputs may be strided
        views of one merged projection. At capture they hold unwritten memory.
        """
