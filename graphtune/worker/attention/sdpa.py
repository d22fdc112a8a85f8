"""Reference attention in plain torch, one custom operator per layer.

The operator reads lengths and the page table itself, so a recording holds one entry per layer. On the CPU it costs
what the real lengths cost; on a GPU it gathers every request's whole page row and masks, which is capturable and slow.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from graphtune.worker.attention.base import AttentionBackend
from graphtune.worker.kv_cache import PagedKVCache, RequestTable
from graphtune.worker.runners.buffers import DecodeBatch


@torch.library.custom_op("graphtune::paged_decode", mutates_args=("keys", "values"), device_types="cpu")
def paged_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out_slots: torch.Tensor,
    req_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
) -> torch.Tensor:
    """Write k and v (n, kv heads, head size) at ``out_slots``, then attend each row over its pages.

    ``keys`` and ``values`` are one layer's (pages, page size, kv heads, head size). Returns (n, heads, head size).
    """
    _write(k, v, keys, values, out_slots)
    page_size = keys.shape[1]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lengths, rows = seq_lens.tolist(), req_rows.tolist()
    for i, (length, row) in enumerate(zip(lengths, rows, strict=True)):
        pages = page_table[row, : -(-length // page_size)].long()
        past_k = keys[pages].flatten(0, 1)[:length].transpose(0, 1).unsqueeze(0)
        past_v = values[pages].flatten(0, 1)[:length].transpose(0, 1).unsqueeze(0)
        attended = F.scaled_dot_product_attention(q[i].unsqueeze(1).unsqueeze(0), past_k, past_v, enable_gqa=True)
        out[i] = attended[0, :, 0]
    return out


@paged_decode.register_kernel("cuda")
def _paged_decode_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out_slots: torch.Tensor,
    req_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
) -> torch.Tensor:
    _write(k, v, keys, values, out_slots)
    pages = page_table.index_select(0, req_rows).long()
    past_k = keys[pages].flatten(1, 2).transpose(1, 2)
    past_v = values[pages].flatten(1, 2).transpose(1, 2)
    # Slots beyond a request's length may hold anything, NaN included, and a masked NaN value still spreads.
    inside = torch.arange(past_k.shape[2], device=q.device) < seq_lens.unsqueeze(1)
    past_v = past_v.masked_fill(~inside[:, None, :, None], 0.0)
    past_k = past_k.masked_fill(~inside[:, None, :, None], 0.0)
    attended = F.scaled_dot_product_attention(
        q.unsqueeze(2), past_k, past_v, attn_mask=inside[:, None, None, :], enable_gqa=True
    )
    return attended.squeeze(2).contiguous()


@paged_decode.register_fake
def _paged_decode_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out_slots: torch.Tensor,
    req_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _write(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out_slots: torch.Tensor) -> None:
    slots = out_slots.long()
    keys.flatten(0, 1).index_copy_(0, slots, k)
    values.flatten(0, 1).index_copy_(0, slots, v)


class SdpaAttention(AttentionBackend):
    """No plan, no workspace: everything it needs is in the batch, the cache and the request table."""

    name = "sdpa"
    kernels = "torch scaled_dot_product_attention"
    seq_len_fill = 1

    def __init__(self, cache: PagedKVCache, table: RequestTable) -> None:
        self._cache = cache
        self._table = table
        self._batch: DecodeBatch | None = None

    def private_tensors(self) -> dict[str, torch.Tensor]:
        return {"page_table": self._table.page_table}

    def bind(self, size: int, *, per_size: bool) -> None:
        return None

    def unbind(self) -> None:
        return None

    def plan(self, batch: DecodeBatch, *, graph_size: int | None) -> None:
        return None

    def prepare(self, batch: DecodeBatch) -> None:
        self._batch = batch

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch = self._batch
        assert batch is not None, "prepare() comes before forward()"
        attended = torch.ops.graphtune.paged_decode(
            q,
            k,
            v,
            self._cache.keys[layer],
            self._cache.values[layer],
            batch.out_slots,
            batch.req_rows,
            batch.seq_lens,
            self._table.page_table,
        )
        return attended.flatten(1)
