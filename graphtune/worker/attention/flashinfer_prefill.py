"""FlashInfer paged prefill attention, planned once per step from host arrays.

Written against flashinfer-python 0.6.13. The public wrapper is planned once, to pick and load the kernels. Each step
calls the planner and the kernels that it ends in, over one pinned copy of the step's metadata: the public calls copy
five arrays through pageable memory per step and check every argument once per layer, which is what a prefill of few
tokens would then consist of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import flashinfer
import numpy as np
import torch
from flashinfer.page import get_page_module
from flashinfer.utils import device_support_pdl

from graphtune.worker.attention.base import PrefillAttention
from graphtune.worker.kv_cache import PagedKVCache, RequestTable
from graphtune.worker.runners.prefill_buffers import PrefillBatch

FLOAT_WORKSPACE_BYTES = 384 << 20
INT_WORKSPACE_BYTES = 8 << 20
KERNELS = "fa2"
TILE_ROWS = 128
"""Rows of the kernel's largest tile; a row is one token of one query head of a group."""
_NHD = 0
_CAUSAL = 1

Ints = TypeVar("Ints", torch.Tensor, np.ndarray)


def recorded_workspace_bytes(*, heads: int, kv_heads: int, head_size: int, tokens: int, request_slots: int) -> int:
    """Float workspace that a recorded plan takes: partial outputs and their scales in float32 for every tile.

    Source: the planner of the fa2 kernels, which splits keys whenever the launch must have a fixed shape.
    """
    tiles = -(-tokens * (heads // kv_heads) // TILE_ROWS) + request_slots
    return heads * tiles * TILE_ROWS * (head_size + 1) * 4 + 64


@dataclass(frozen=True)
class _Planned:
    """A step as its layers read it. ``rows`` are attended: all of them when the launch is ``recorded``, since its shape
    is, else the real ones. ``offsets`` and ``append`` are arguments of the attention and of the append kernel."""

    info: Any
    rows: int
    recorded: bool
    offsets: tuple[torch.Tensor, ...]
    append_rows: tuple[torch.Tensor, ...]
    append_places: tuple[torch.Tensor, ...]


class FlashInferPrefill(PrefillAttention):
    """Prefill attention of FlashInfer with its kernels named (``fa2``).

    A batch with ``request_slots`` is planned for a launch of fixed shape, which can be recorded; any other one for its
    own shape, so it must run between segments. ``float_workspace`` may be that of the decode attention: the two phases
    never run at once.
    """

    name = "flashinfer"
    kernels = f"flashinfer {KERNELS}"

    def __init__(
        self,
        cache: PagedKVCache,
        table: RequestTable,
        *,
        heads: int,
        kv_heads: int,
        head_size: int,
        max_tokens: int,
        max_requests: int,
        float_workspace: torch.Tensor | None = None,
    ) -> None:
        device, dtype = cache.pool.device, cache.pool.dtype
        self._table = table
        self._page_size = cache.page_size
        self._heads = (heads, kv_heads)
        self._head_size = head_size
        if float_workspace is None:
            float_workspace = torch.zeros(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._float_workspace = float_workspace
        self._int_workspace = torch.zeros(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._pinned_workspace = torch.zeros(INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=True)
        # Query offsets, page offsets, last page lengths and page indices of a step, at places that never change.
        self._max = max_requests
        ints = 3 * max_requests + 2 + cache.pages + max_requests
        self._metadata = torch.zeros(ints, dtype=torch.int32, device=device)
        self._staging = torch.zeros(ints, dtype=torch.int32, pin_memory=True)
        self._kv_lens = torch.zeros(max_requests, dtype=torch.int32)
        self._counting = np.arange(cache.pages + max_requests, dtype=np.int32)
        self._staged = torch.cuda.Event()
        # Appending through a view with pages of one slot makes the write address exactly ``out_slots``.
        self._arange = torch.arange(max_tokens + 1, dtype=torch.int32, device=device)
        self._zeros = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._ones = torch.ones(max_tokens, dtype=torch.int32, device=device)
        self._append = get_page_module().append_paged_kv_cache
        self._slots = [
            (keys.flatten(0, 1).unsqueeze(1), values.flatten(0, 1).unsqueeze(1))
            for keys, values in zip(cache.keys, cache.values, strict=True)
        ]
        self._caches = list(zip(cache.keys, cache.values, strict=True))
        self._scale = head_size**-0.5
        self._pdl = device_support_pdl(device)
        self._module = self._load(dtype)
        self._planned: _Planned | None = None

    def _load(self, dtype: torch.dtype) -> Any:
        """The kernel module that the public plan picks."""
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._float_workspace, "NHD", backend=KERNELS)
        wrapper.reset_workspace_buffer(self._float_workspace, self._int_workspace)
        one = torch.ones(1, dtype=torch.int32)
        ends = torch.tensor([0, 1], dtype=torch.int32)
        wrapper.plan(
            ends,
            ends,
            torch.zeros(1, dtype=torch.int32),
            one,
            *self._heads,
            self._head_size,
            self._page_size,
            causal=True,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        return wrapper._cached_module

    @property
    def workspace_bytes(self) -> int:
        """Device bytes of the private buffers."""
        return sum(t.numel() * t.element_size() for t in self.private_tensors().values())

    def private_tensors(self) -> dict[str, torch.Tensor]:
        return {
            "prefill_attention.metadata": self._metadata,
            "prefill_attention.float_workspace": self._float_workspace,
            "prefill_attention.int_workspace": self._int_workspace,
            "prefill_attention.arange": self._arange,
            "prefill_attention.zeros": self._zeros,
            "prefill_attention.ones": self._ones,
        }

    def plan(self, batch: PrefillBatch) -> None:
        n, page_size = batch.requests, self._page_size
        slots = batch.request_slots or n
        recorded = batch.request_slots is not None
        rows = batch.padded_tokens if recorded else batch.raw_tokens
        self._staged.synchronize()
        host = self._staging.numpy()
        query_offsets, page_offsets, last_page_lens, indices = self._split(host)
        lengths = batch.host["extend_lens"][:slots].numpy()
        totals = lengths + batch.host["prefix_lens"][:slots].numpy()
        counts = (totals + (page_size - 1)) // page_size
        # Requests without tokens repeat the last offset: they have neither queries nor pages.
        np.cumsum(lengths, out=query_offsets[1 : slots + 1])
        np.cumsum(counts, out=page_offsets[1 : slots + 1])
        np.subtract(totals, (np.maximum(counts, 1) - 1) * page_size, out=last_page_lens[:slots])
        total = int(page_offsets[slots])
        table = self._table.page_table_host
        # Row i's pages start at row · width in the flat table and at page_offsets[i] in the step's list of pages.
        starts = batch.host["req_rows"][:slots].numpy() * table.shape[1] - page_offsets[:slots]
        places = np.repeat(starts, counts)
        places += self._counting[:total]
        np.take(table.reshape(-1), places, out=indices[:total])
        used = 3 * self._max + 2 + total
        self._metadata[:used].copy_(self._staging[:used], non_blocking=True)
        self._kv_lens.numpy()[:slots] = totals
        staged = self._split(self._staging)
        causal, window, split, no_split, colocated = True, -1, -1, False, 0
        info = self._module.plan(
            self._float_workspace, self._int_workspace, self._pinned_workspace,
            staged[0][: slots + 1], staged[1][: slots + 1], self._kv_lens[:slots],
            rows, slots, *self._heads, page_size, recorded,
            self._head_size, self._head_size, causal, window, split, no_split, colocated,
        )  # fmt: skip
        self._staged.record()
        queries, pages, last_lens, page_indices = self._split(self._metadata)
        self._planned = _Planned(
            info,
            rows,
            recorded,
            (queries[: slots + 1], pages[: slots + 1], page_indices, last_lens[:slots]),
            (self._arange[:rows], self._zeros[:rows]),
            (batch.out_slots[:rows], self._arange[: rows + 1], self._ones[:rows]),
        )

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        planned = self._planned
        assert planned is not None, "plan() comes before forward()"
        rows = planned.rows
        if rows < q.shape[0]:
            out[rows:].zero_()
            q, k, v = q[:rows], k[:rows], v[:rows]
        elif planned.recorded:
            # The kernels write the rows that requests have at replay; the others must not keep what they held.
            out.zero_()
        self._append(k, v, *planned.append_rows, *self._slots[layer], *planned.append_places, _NHD)
        window, soft_cap, rope_scale, rope_theta, scored = -1, 0.0, 1.0, 1e4, 0
        self._module.paged_run(
            self._float_workspace, self._int_workspace, planned.info, q, *self._caches[layer], *planned.offsets,
            out[:rows].view(rows, self._heads[0], self._head_size), None, _CAUSAL, _NHD, window, self._pdl,
            None, None, None, None, None, None, soft_cap, self._scale, None, None, None,
            rope_scale, rope_theta, scored, self._float_workspace.numel(),
        )  # fmt: skip

    def _split(self, ints: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Query offsets and page offsets (max + 1 each), last page lengths (max) and page indices of one step."""
        first, second, third = self._max + 1, 2 * self._max + 2, 3 * self._max + 2
        return ints[:first], ints[first:second], ints[second:third], ints[third:]
