"""FlashInfer paged decode attention: one wrapper per captured size over shared or own workspaces.

Written against flashinfer-python 0.6.13. The public ``plan`` walks the lengths in Python and copies three arrays
through pageable memory at every call. It is used once per wrapper, to pick and load the kernels; each step then calls
the planner that it ends in, with the host arrays that are at hand, after one pinned copy of the step's metadata.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import flashinfer
import numpy as np
import torch
from flashinfer.page import get_page_module

from graphtune.worker.attention.base import AttentionBackend
from graphtune.worker.kv_cache import PagedKVCache, RequestTable
from graphtune.worker.runners.buffers import DecodeBatch

FLOAT_WORKSPACE_BYTES = 384 << 20
INT_WORKSPACE_BYTES = 8 << 20
TENSOR_CORE_GROUP = 4
KERNELS = "fa2"
_NHD = 0

Ints = TypeVar("Ints", torch.Tensor, np.ndarray)


@dataclass(frozen=True)
class _Shape:
    heads: int
    kv_heads: int
    head_size: int
    page_size: int
    dtype: torch.dtype


class FlashInferAttention(AttentionBackend):
    """Decode attention of FlashInfer with its kernels named (``fa2``), on tensor cores from a GQA group of 4 on.

    All private buffers are made here once: a float workspace of 384 MiB or more, an integer workspace of 8 MiB (device
    and pinned), and one int32 array that holds the page offsets, last page lengths and page indices of a step, with a
    pinned twin. ``bind`` makes one wrapper per captured size over them; with ``per_size`` the wrapper keeps an integer
    workspace of its own.
    """

    name = "flashinfer"
    seq_len_fill = 1

    def __init__(
        self,
        cache: PagedKVCache,
        table: RequestTable,
        *,
        heads: int,
        kv_heads: int,
        head_size: int,
        max_requests: int,
        least_workspace_bytes: int = FLOAT_WORKSPACE_BYTES,
    ) -> None:
        device = cache.pool.device
        self._cache = cache
        self._table = table
        self._shape = _Shape(heads, kv_heads, head_size, cache.page_size, cache.pool.dtype)
        self._tensor_cores = heads // kv_heads >= TENSOR_CORE_GROUP
        self.kernels = f"flashinfer {KERNELS} on {'tensor' if self._tensor_cores else 'CUDA'} cores"
        self._max = max_requests
        ints = 2 * max_requests + 1 + cache.pages + max_requests
        self._metadata = torch.zeros(ints, dtype=torch.int32, device=device)
        self._staging = torch.zeros(ints, dtype=torch.int32, pin_memory=True)
        self._host_offsets, self._host_last_page_lens, self._host_indices = self._split(self._staging.numpy())
        self._host_offsets_tensor = self._split(self._staging)[0]
        self._counting = np.arange(cache.pages + max_requests, dtype=np.int32)
        self._query_offsets = torch.arange(max_requests + 1, dtype=torch.int32)
        self._no_data = torch.empty(0, dtype=cache.pool.dtype)
        self._offsets, self._last_page_lens, self._indices = self._split(self._metadata)
        # A split step keeps partial outputs: float32 heads × head size for rows in tiles of 16, at most two tiles per
        # request (512 requests of a 32-head model were seen to take 1.25).
        partial_outputs = max_requests * 2 * 16 * heads * head_size * 4
        float_bytes = max(FLOAT_WORKSPACE_BYTES, partial_outputs, least_workspace_bytes)
        self.float_workspace = torch.zeros(float_bytes, dtype=torch.uint8, device=device)
        self._int_workspace = torch.zeros(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # Appending through a view with pages of one slot makes the write address exactly ``out_slots``.
        self._arange = torch.arange(max_requests + 1, dtype=torch.int32, device=device)
        self._zeros = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._ones = torch.ones(max_requests, dtype=torch.int32, device=device)
        self._append = get_page_module().append_paged_kv_cache
        self._slot_keys = [keys.flatten(0, 1).unsqueeze(1) for keys in cache.keys]
        self._slot_values = [values.flatten(0, 1).unsqueeze(1) for values in cache.values]
        self._caches = list(zip(cache.keys, cache.values, strict=True))
        self._staged = torch.cuda.Event()
        self._graph_wrappers: dict[int, flashinfer.BatchDecodeWithPagedKVCacheWrapper] = {}
        self._own_workspaces: dict[str, torch.Tensor] = {}
        self._eager = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.float_workspace, "NHD", use_tensor_cores=self._tensor_cores, backend=KERNELS
        )
        self._eager.reset_workspace_buffer(self.float_workspace, self._int_workspace)
        self._public_plan(self._eager, 1)
        self._batch: DecodeBatch | None = None
        self._wrapper = self._eager

    @property
    def workspace_bytes(self) -> int:
        """Device bytes of the shared private buffers."""
        return sum(t.numel() * t.element_size() for t in self.private_tensors().values())

    def private_tensors(self) -> dict[str, torch.Tensor]:
        return {
            "attention.metadata": self._metadata,
            "attention.float_workspace": self.float_workspace,
            "attention.int_workspace": self._int_workspace,
            "attention.arange": self._arange,
            "attention.zeros": self._zeros,
            "attention.ones": self._ones,
            **self._own_workspaces,
        }

    def bind(self, size: int, *, per_size: bool) -> None:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.float_workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=self._tensor_cores,
            paged_kv_indptr_buffer=self._offsets[: size + 1],
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=self._last_page_lens[:size],
            backend=KERNELS,
        )
        if per_size:
            self._own_workspaces[f"attention.int_workspace.{size}"] = wrapper._int_workspace_buffer
        else:
            wrapper.reset_workspace_buffer(self.float_workspace, self._int_workspace)
        self._public_plan(wrapper, size)
        self._graph_wrappers[size] = wrapper

    def unbind(self) -> None:
        self._graph_wrappers.clear()
        self._own_workspaces.clear()
        self._wrapper = self._eager

    def plan(self, batch: DecodeBatch, *, graph_size: int | None) -> None:
        n, page_size = batch.padded_size, self._shape.page_size
        self._staged.synchronize()
        lens = batch.seq_lens_host.numpy()
        counts = (lens + (page_size - 1)) // page_size
        offsets = self._host_offsets
        np.cumsum(counts, out=offsets[1 : n + 1])
        np.subtract(lens, (counts - 1) * page_size, out=self._host_last_page_lens[:n])
        total = int(offsets[n])
        table = self._table.page_table_host
        # Row i's pages start at row · width in the flat table and at offsets[i] in the step's list of pages.
        starts = batch.req_rows_host.numpy() * table.shape[1] - offsets[:n]
        places = np.repeat(starts, counts)
        places += self._counting[:total]
        np.take(table.reshape(-1), places, out=self._host_indices[:total])
        used = 2 * self._max + 1 + total
        self._metadata[:used].copy_(self._staging[:used], non_blocking=True)
        self._wrapper = self._eager if graph_size is None else self._graph_wrappers[graph_size]
        self._plan_kernels(self._wrapper, batch, graph=graph_size is not None)
        self._staged.record()

    def prepare(self, batch: DecodeBatch) -> None:
        self._batch = batch

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        batch = self._batch
        assert batch is not None, "prepare() comes before forward()"
        n = batch.padded_size
        self._append(
            k,
            v,
            self._arange[:n],
            self._zeros[:n],
            self._slot_keys[layer],
            self._slot_values[layer],
            batch.out_slots,
            self._arange[: n + 1],
            self._ones[:n],
            _NHD,
        )
        if out is None:
            return self._wrapper.run(q, self._caches[layer]).flatten(1)
        self._wrapper.run(q, self._caches[layer], out=out.view_as(q))
        return out

    def _split(self, ints: Ints) -> tuple[Ints, Ints, Ints]:
        """Offsets (max + 1), last page lengths (max) and page indices of one step in the shared array."""
        return ints[: self._max + 1], ints[self._max + 1 : 2 * self._max + 1], ints[2 * self._max + 1 :]

    def _public_plan(self, wrapper: flashinfer.BatchDecodeWithPagedKVCacheWrapper, size: int) -> None:
        """The public plan, once per wrapper: it picks and loads the kernel module whose planner each step calls."""
        shape = self._shape
        wrapper.plan(
            torch.arange(size + 1, dtype=torch.int32),
            torch.zeros(size, dtype=torch.int32),
            torch.ones(size, dtype=torch.int32),
            shape.heads,
            shape.kv_heads,
            shape.head_size,
            shape.page_size,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )

    def _plan_kernels(
        self, wrapper: flashinfer.BatchDecodeWithPagedKVCacheWrapper, batch: DecodeBatch, *, graph: bool
    ) -> None:
        """What the public plan ends in, given host arrays: fills the integer workspace and returns the launch shape."""
        n, shape = batch.padded_size, self._shape
        workspaces = (
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
        )
        offsets = self._host_offsets_tensor[: n + 1]
        heads = (shape.heads, shape.kv_heads, shape.page_size, graph)
        if self._tensor_cores:
            lens = batch.seq_lens_host
            causal, window, split, no_split, colocated = False, -1, -1, False, 0
            wrapper._plan_info = wrapper._cached_module.plan(
                *workspaces, self._query_offsets[: n + 1], offsets, lens, n, n, *heads,
                shape.head_size, shape.head_size, causal, window, split, no_split, colocated,
            )  # fmt: skip
        else:
            window, soft_cap = -1, 0.0
            wrapper._plan_info = wrapper._cached_module.plan(
                *workspaces, offsets, n, *heads, window, soft_cap,
                shape.head_size, shape.head_size, self._no_data, self._no_data,
            )  # fmt: skip
        if not graph:
            # An eager step's wrapper has no buffers of its own; it reads the step's metadata where it was copied.
            wrapper._qo_indptr_buf = self._arange[: n + 1]
            wrapper._paged_kv_indptr_buf = self._offsets[: n + 1]
            wrapper._paged_kv_indices_buf = self._indices
            wrapper._paged_kv_last_page_len_buf = self._last_page_lens[:n]
