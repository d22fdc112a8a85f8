"""FlashInfer paged prefill attention: one wrapper outside any graph, planned once per step from host arrays.

Written against flashinfer-python 0.6.13. Nothing of it is recorded: it runs between the segments of a recording, so the
wrapper has no fixed buffers and every step may have other requests.
"""

from __future__ import annotations

import flashinfer
import numpy as np
import torch
from flashinfer.page import get_page_module

from graphtune.worker.attention.base import PrefillAttention
from graphtune.worker.kv_cache import PagedKVCache, RequestTable
from graphtune.worker.runners.prefill_buffers import PrefillBatch

FLOAT_WORKSPACE_BYTES = 384 << 20
INT_WORKSPACE_BYTES = 8 << 20
KERNELS = "fa2"
_NHD = 0


class FlashInferPrefill(PrefillAttention):
    """Prefill attention of FlashInfer with its kernels named (``fa2``).

    ``float_workspace`` may be that of the decode attention: the two phases never run at once.
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
        float_workspace: torch.Tensor | None = None,
    ) -> None:
        device = cache.pool.device
        self._cache = cache
        self._table = table
        self._heads = heads
        self._kv_heads = kv_heads
        self._head_size = head_size
        if float_workspace is None:
            float_workspace = torch.zeros(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._float_workspace = float_workspace
        self._int_workspace = torch.zeros(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(float_workspace, "NHD", backend=KERNELS)
        self._wrapper.reset_workspace_buffer(float_workspace, self._int_workspace)
        # Appending through a view with pages of one slot makes the write address exactly ``out_slots``.
        self._arange = torch.arange(max_tokens + 1, dtype=torch.int32, device=device)
        self._zeros = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._ones = torch.ones(max_tokens, dtype=torch.int32, device=device)
        self._append = get_page_module().append_paged_kv_cache
        self._slot_keys = [keys.flatten(0, 1).unsqueeze(1) for keys in cache.keys]
        self._slot_values = [values.flatten(0, 1).unsqueeze(1) for values in cache.values]
        self._batch: PrefillBatch | None = None

    @property
    def workspace_bytes(self) -> int:
        """Device bytes of the private buffers."""
        return sum(t.numel() * t.element_size() for t in self.private_tensors().values())

    def private_tensors(self) -> dict[str, torch.Tensor]:
        return {
            "prefill_attention.float_workspace": self._float_workspace,
            "prefill_attention.int_workspace": self._int_workspace,
            "prefill_attention.arange": self._arange,
            "prefill_attention.zeros": self._zeros,
            "prefill_attention.ones": self._ones,
        }

    def plan(self, batch: PrefillBatch) -> None:
        n, page_size, dtype = batch.requests, self._cache.page_size, self._cache.pool.dtype
        lengths = batch.host["extend_lens"][:n].numpy()
        totals = lengths + batch.host["prefix_lens"][:n].numpy()
        counts = -(-totals // page_size)
        table = self._table.page_table_host
        rows = batch.host["req_rows"][:n].tolist()
        pages = np.concatenate([table[row, :count] for row, count in zip(rows, counts.tolist(), strict=True)])
        # Host arrays of this step alone: the planner reads them here, and copies of them go to the device.
        self._wrapper.plan(
            offsets(lengths),
            offsets(counts),
            torch.from_numpy(pages),
            torch.from_numpy((totals - (counts - 1) * page_size).astype(np.int32)),
            self._heads,
            self._kv_heads,
            self._head_size,
            page_size,
            causal=True,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        self._batch = batch

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        batch = self._batch
        assert batch is not None, "plan() comes before forward()"
        n = batch.raw_tokens
        self._append(
            k[:n],
            v[:n],
            self._arange[:n],
            self._zeros[:n],
            self._slot_keys[layer],
            self._slot_values[layer],
            batch.out_slots[:n],
            self._arange[: n + 1],
            self._ones[:n],
            _NHD,
        )
        caches = (self._cache.keys[layer], self._cache.values[layer])
        self._wrapper.run(q[:n], caches, out=out[:n].view(n, self._heads, self._head_size))
        out[n:].zero_()


def offsets(counts: np.ndarray) -> torch.Tensor:
    """(n + 1,) int32: where each of n stretches of ``counts`` begins, and where the last ends."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
