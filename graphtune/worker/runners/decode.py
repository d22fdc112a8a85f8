"""Decode steps: the eager path, and replay of captured sizes with the eager path behind it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from graphtune.results import CaptureList
from graphtune.worker.attention.base import AttentionBackend
from graphtune.worker.graphs.backend import CaptureError, CaptureTiming, GraphBackend
from graphtune.worker.graphs.shape_key import ShapeKey
from graphtune.worker.kv_cache import PagedKVCache, RequestTable
from graphtune.worker.runners.admission import Admission, admit_decode
from graphtune.worker.runners.base import CaptureFailure, EagerRunner, GraphRunner
from graphtune.worker.runners.buffers import DecodeBatch, LiveBatch, StaticBuffers, decode_slots

if TYPE_CHECKING:
    from graphtune.worker.models.decoder import Decoder


class EagerDecode(EagerRunner):
    """Runs every decode step without graphs. Built first: it owns the static buffers at their maximum."""

    attention: AttentionBackend
    buffers: StaticBuffers

    def __init__(
        self, model: Decoder, attention: AttentionBackend, cache: PagedKVCache, table: RequestTable, max_requests: int
    ) -> None:
        super().__init__(model, attention, cache, table)
        self.buffers = StaticBuffers(decode_slots(attention.seq_len_fill), max_requests, cache.pool.device)
        self._batch: DecodeBatch | None = None

    def fill(self, live: LiveBatch) -> None:
        self._batch = self.buffers.fill(live, live.size)

    def plan(self) -> None:
        assert self._batch is not None, "fill() comes before plan()"
        self.attention.plan(self._batch, graph_size=None)

    def launch(self) -> torch.Tensor:
        assert self._batch is not None, "fill() comes before launch()"
        return self.forward(self._batch)

    def run(self, live: LiveBatch) -> torch.Tensor:
        """One whole eager step: logits (n, vocabulary)."""
        self.fill(live)
        self.plan()
        return self.launch()

    def forward(self, batch: DecodeBatch) -> torch.Tensor:
        """The forward over static buffers; full graphs record exactly this."""
        self.attention.prepare(batch)
        return self.model.forward(batch.input_ids, batch.positions, self.attention.forward)

    def forward_with_breaks(self, batch: DecodeBatch) -> torch.Tensor:
        """The same with attention as eager breaks; ``prepare`` is then part of every step's plan."""
        return self.model.forward(batch.input_ids, batch.positions, self._attend)

    def warm_up(self, sizes: tuple[int, ...]) -> None:
        """Run every size eagerly on sink rows, largest first: lazy loading and tuning are never charged to graphs."""
        for size in sorted(sizes, reverse=True):
            self.buffers.reset()
            self._batch = self.buffers.batch(size, size)
            self.plan()
            self.launch()


class GraphDecode(GraphRunner):
    """Captured sizes of one capture list over an eager runner's buffers.

    In a breakable recording attention runs between the segments, planned for the padded size as an eager step is.
    """

    eager: EagerDecode

    def __init__(self, eager: EagerDecode, backend: GraphBackend, capture_list: CaptureList) -> None:
        super().__init__(eager, backend, capture_list)
        self._breaks = capture_list.backend == "breakable"
        self._batch: DecodeBatch | None = None

    def _capture_size(self, size: int) -> CaptureTiming | CaptureFailure:
        eager = self.eager
        # Live requests may have left their rows in the slots; the warm-ups really run and must write to the sink.
        eager.buffers.reset()
        batch = eager.buffers.batch(size, size)
        started = time.perf_counter()
        if not self._breaks:
            eager.attention.bind(size, per_size=self.list.workspace == "per_size")
        self._plan(batch)
        prepared_s = time.perf_counter() - started
        try:
            timing = self.backend.capture_one(ShapeKey(size), lambda: self._forward(batch))
        except CaptureError as error:
            return CaptureFailure(size, str(error))
        # Making what the size needs is paid at start-up too, and belongs to what comes before recording.
        return replace(timing, warmup_s=timing.warmup_s + prepared_s)

    def _reset(self) -> None:
        self.eager.buffers.reset()

    def admit(self, live: LiveBatch) -> Admission:
        """Whether this batch may be replayed; needs only host data, so it can be asked before the batch exists."""
        table = self.eager.table
        return admit_decode(
            live.size,
            int(live.seq_lens_host.max()),
            sizes=self.sizes,
            max_context=table.pages_per_request * table.page_size,
        )

    def fill(self, live: LiveBatch) -> None:
        admission = self.admit(live)
        self.admitted[admission.reason] += 1
        if admission.padded_size is None:
            raise RuntimeError(f"not admitted: {admission.reason}; run() falls back to eager")
        self.pad(live, admission.padded_size)

    def pad(self, live: LiveBatch, size: int) -> None:
        """Fill the buffers for the captured ``size``, whatever admission would choose."""
        self._batch = self.eager.buffers.fill(live, size)

    def plan(self) -> None:
        assert self._batch is not None, "fill() comes before plan()"
        self._plan(self._batch)

    def _forward(self, batch: DecodeBatch) -> torch.Tensor:
        return self.eager.forward_with_breaks(batch) if self._breaks else self.eager.forward(batch)

    def _plan(self, batch: DecodeBatch) -> None:
        attention = self.eager.attention
        attention.plan(batch, graph_size=None if self._breaks else batch.padded_size)
        if self._breaks:
            attention.prepare(batch)

    def launch(self) -> torch.Tensor:
        assert self._batch is not None, "fill() comes before launch()"
        self.check_addresses()
        return self.backend.replay(ShapeKey(self._batch.padded_size))[: self._batch.raw_size]

    def run(self, live: LiveBatch) -> torch.Tensor:
        """One whole step: replayed when admitted, else eager with the same result; both are counted by reason.

        The returned rows are valid until the next replay.
        """
        admission = self.admit(live)
        if admission.padded_size is None:
            self.admitted[admission.reason] += 1
            return self.eager.run(live)
        self.fill(live)
        self.plan()
        return self.launch()

    def run_padded_eagerly(self) -> torch.Tensor:
        """The forward of the batch that was filled and planned last, at its padded size, without the graph."""
        assert self._batch is not None, "fill() and plan() come first"
        return self._forward(self._batch)[: self._batch.raw_size]

    def tear_down(self) -> None:
        """Drop graphs, pool, outputs and per-size workspaces."""
        super().tear_down()
        self.eager.attention.unbind()
        self._batch = None
