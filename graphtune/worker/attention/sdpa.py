"""Reference attention in plain torch, one custom operator per layer.

The decode operator reads lengths and the page table itself, so a recording holds one entry per layer. On the CPU it
costs what the real lengths cost; on a GPU it gathers every request's whole page row and masks, which is capturable and
slow. The prefill operator reads lengths on the host wherever it runs: it belongs between segments.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from graphtune.worker.attention.base import AttentionBackend, PrefillAttention
from graphtune.worker.kv_cache import PagedKVCache, RequestTable
from graphtune.worker.runners.buffers import DecodeBatch
from graphtune.worker.runners.prefill_buffers import PrefillBatch


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


@torch.library.custom_op("graphtune::paged_prefill", mutates_args=("keys", "values", "out"))
def paged_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    out_slots: torch.Tensor,
    req_rows: torch.Tensor,
    extend_starts: torch.Tensor,
    extend_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    """Write the real tokens' k and v at ``out_slots``, then attend each request's new tokens over its pages.

    Shapes as in ``PrefillAttention.forward``; the request axis may end in rows of no tokens. Lengths are read from the
    tensors, so on a GPU this waits for the device and cannot be captured.
    """
    rows, starts, lengths, prefixes = (t.tolist() for t in (req_rows, extend_starts, extend_lens, prefix_lens))
    real, page_size = sum(lengths), keys.shape[1]
    _write(k[:real], v[:real], keys, values, out_slots[:real])
    out[real:] = 0
    for row, start, length, prefix in zip(rows, starts, lengths, prefixes, strict=True):
        if length == 0:
            continue
        total = prefix + length
        pages = page_table[row, : -(-total // page_size)].long()
        past_k = keys[pages].flatten(0, 1)[:total].transpose(0, 1).unsqueeze(0)
        past_v = values[pages].flatten(0, 1)[:total].transpose(0, 1).unsqueeze(0)
        seen = torch.arange(total, device=q.device)
        mask = seen <= seen[prefix:].unsqueeze(1)
        mine = q[start : start + length].transpose(0, 1).unsqueeze(0)
        attended = F.scaled_dot_product_attention(mine, past_k, past_v, attn_mask=mask, enable_gqa=True)
        out[start : start + length] = attended[0].transpose(0, 1).flatten(1)


@paged_prefill.register_fake
def _paged_prefill_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    out_slots: torch.Tensor,
    req_rows: torch.Tensor,
    extend_starts: torch.Tensor,
    extend_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    page_table: torch.Tensor,
) -> None:
    return None


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

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
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
        attended = attended.flatten(1)
        return attended if out is None else out.copy_(attended)


class SdpaPrefill(PrefillAttention):
    """No workspace and nothing to plan: the operator reads the batch that was named last."""

    name = "sdpa"
    kernels = "torch scaled_dot_product_attention"

    def __init__(self, cache: PagedKVCache, table: RequestTable) -> None:
        self._cache = cache
        self._table = table
        self._batch: PrefillBatch | None = None

    def private_tensors(self) -> dict[str, torch.Tensor]:
        return {"page_table": self._table.page_table}

    def plan(self, batch: PrefillBatch) -> None:
        self._batch = batch

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        batch = self._batch
        assert batch is not None, "plan() comes before forward()"
        torch.ops.graphtune.paged_prefill(
            q,
            k,
            v,
            self._cache.keys[layer],
            self._cache.values[layer],
            out,
            batch.out_slots,
            batch.req_rows,
            batch.extend_starts,
            batch.extend_lens,
            batch.prefix_lens,
            self._table.page_table,
        )
