"""Batches to step through, made before the clock starts: a scheduler's work is not part of a step."""

from __future__ import annotations

import numpy as np
import torch

from graphtune.plan import STEP_TOKENS as STEPS
from graphtune.worker.kv_cache import RequestTable
from graphtune.worker.runners.buffers import LiveBatch
from graphtune.worker.runners.prefill_buffers import LivePrefill, live_prefill

PREFILLS = 2
"""Prefills of one series: the same lengths and pages, other token ids."""


class BatchSeries:
    """``STEPS`` consecutive decode steps of ``size`` requests, all of one length, around ``context`` tokens.

    Lengths advance by one each step from ``context − STEPS/2 + 1`` and start over after the last step, so their mean
    stays at ``context`` however many steps are taken; pages are held for the longest. ``close`` returns them.
    """

    def __init__(self, table: RequestTable, *, size: int, context: int, vocab_size: int, seed: int) -> None:
        self._table = table
        self.size = size
        self.context = context
        first = max(1, context - STEPS // 2 + 1)
        lengths = np.arange(first, first + STEPS, dtype=np.int32)
        self.rows = table.admit([int(lengths[-1])] * size)
        self._batches = make_batches(
            table, rows=self.rows, lengths=np.repeat(lengths[:, None], size, axis=1), vocab_size=vocab_size, seed=seed
        )
        self._next = 0

    @property
    def middle(self) -> LiveBatch:
        """The step at which every request has ``context`` tokens."""
        return self._batches[min(self.context, STEPS // 2) - 1]

    def next(self) -> LiveBatch:
        batch = self._batches[self._next]
        self._next = (self._next + 1) % len(self._batches)
        return batch

    def close(self) -> None:
        self._table.release(self.rows)


class PrefillSeries:
    """Prefills of ``tokens`` new tokens in ``requests`` parts that differ by one token at most, each behind
    ``prefix_tokens`` cached ones. Requests longer than ``longest`` tokens are split. ``close`` returns the pages.
    """

    def __init__(
        self,
        table: RequestTable,
        *,
        tokens: int,
        requests: int,
        prefix_tokens: int,
        longest: int,
        vocab_size: int,
        seed: int,
    ) -> None:
        self._table = table
        self.tokens = tokens
        self.requests = max(min(requests, tokens), -(-tokens // (longest - prefix_tokens)))
        self.prefix_tokens = prefix_tokens
        lengths = [tokens // self.requests + (i < tokens % self.requests) for i in range(self.requests)]
        self.rows = table.admit([length + prefix_tokens for length in lengths])
        random = np.random.default_rng(seed)
        self._batches = [
            live_prefill(
                table,
                rows=self.rows.tolist(),
                prefix_lens=[prefix_tokens] * self.requests,
                input_ids=[random.integers(0, vocab_size, length) for length in lengths],
            )
            for _ in range(PREFILLS)
        ]
        self._next = 0

    @property
    def middle(self) -> LivePrefill:
        """One prefill of the series; they are all alike."""
        return self._batches[0]

    def next(self) -> LivePrefill:
        batch = self._batches[self._next]
        self._next = (self._next + 1) % len(self._batches)
        return batch

    def close(self) -> None:
        self._table.release(self.rows)


def tokens_needed(context: int) -> int:
    """KV tokens that one request of a series around ``context`` holds."""
    return max(1, context - STEPS // 2 + 1) + STEPS - 1


def make_batches(
    table: RequestTable, *, rows: np.ndarray, lengths: np.ndarray, vocab_size: int, seed: int
) -> list[LiveBatch]:
    """One batch per row of ``lengths`` (steps, n): random ids, the slot of each request's last token."""
    device = table.page_table.device
    steps, size = lengths.shape
    ids = np.random.default_rng(seed).integers(0, vocab_size, (steps, size), dtype=np.int32)
    slots = np.stack([table.slots(rows, step - 1) for step in lengths])
    on_device = torch.from_numpy(np.stack([ids, lengths, slots, np.broadcast_to(rows, lengths.shape)])).to(device)
    rows_host = torch.from_numpy(rows)
    return [
        LiveBatch(
            input_ids=on_device[0, i],
            seq_lens=on_device[1, i],
            out_slots=on_device[2, i],
            req_rows=on_device[3, i],
            seq_lens_host=torch.from_numpy(np.ascontiguousarray(lengths[i])),
            req_rows_host=rows_host,
        )
        for i in range(steps)
    ]
