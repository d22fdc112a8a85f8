"""Decode steps: the eager path, and replay of captured sizes with the eager path behind it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from graphtune.results import CaptureList
from graphtune.worker.addresses import AddressBook
from graphtune.worker.attention.base import AttentionBackend
from graphtune.worker.graphs.backend import CaptureError, CaptureTiming, GraphBackend
from graphtune.worker.graphs.shape_key import ShapeKey
from graphtune.worker.kv_cache import PagedKVCache, RequestTable
from graphtune.worker.runners.admission import Admission, admit_decode
from graphtune.worker.runners.buffers import DecodeBatch, LiveBatch, StaticBuffers, decode_slots

if TYPE_CHECKING:
    from graphtune.worker.models.decoder import Decoder


class DecodeStep(Protocol):
    """One decode step in the three host parts that are timed apart."""

    def fill(self, live: LiveBatch) -> None:
        """Copy the step's inputs into the static buffers."""

    def plan(self) -> None:
        """The attention backend's out-of-graph half."""

    def launch(self) -> torch.Tensor:
        """Launch the forward; returns logits (raw size, vocabulary)."""


@dataclass(frozen=True)
class CaptureFailure:
    """A size that could not be recorded."""

    size: int
    reason: str


class EagerDecode:
    """Runs every decode step without graphs. Built first: it owns the static buffers at their maximum."""

    def __init__(
        self, model: Decoder, attention: AttentionBackend, cache: PagedKVCache, table: RequestTable, max_requests: int
    ) -> None:
        self.model = model
        self.attention = attention
        self.cache = cache
        self.table = table
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
        """The forward over static buffers; graphs record exactly this."""
        self.attention.prepare(batch)
        return self.model.forward(batch.input_ids, batch.positions, self.attention.forward)

    def warm_up(self, sizes: tuple[int, ...]) -> None:
        """Run every size eagerly on sink rows, largest first: lazy loading and tuning are never charged to graphs."""
        for size in sorted(sizes, reverse=True):
            self.buffers.reset()
            self._batch = self.buffers.batch(size, size)
            self.plan()
            self.launch()

    def owners(self) -> Mapping[str, torch.Tensor]:
        """Everything outside the pool and the weights that a step reads or writes, by name."""
        return {
            **self.buffers.tensors,
            **self.attention.private_tensors(),
            "kv_cache": self.cache.pool,
            "page_table": self.table.page_table,
        }


class GraphDecode:
    """Captured sizes of one capture list over an eager runner's buffers."""

    def __init__(self, eager: EagerDecode, backend: GraphBackend, capture_list: CaptureList) -> None:
        self.eager = eager
        self.backend = backend
        self.list = capture_list
        self.sizes: tuple[int, ...] = ()
        self.admitted: Counter[str] = Counter()
        self._addresses: AddressBook | None = None
        self._weights: AddressBook | None = None
        self._batch: DecodeBatch | None = None

    def capture(self) -> Iterator[tuple[int, CaptureTiming | CaptureFailure]]:
        """Capture the list in its order, yielding (size, timing or failure).

        Consume it to the end: the address book is written after the last size. A size that fails is left out and the
        next one is tried; device memory errors pass through.
        """
        order = sorted(self.list.sizes, reverse=self.list.order == "descending")
        with self.backend.capture_session():
            for size in order:
                yield size, self._capture_size(size)
        self.eager.buffers.reset()
        self._addresses = AddressBook(self.eager.owners())
        self._weights = AddressBook(self.eager.model.named_tensors())

    def _capture_size(self, size: int) -> CaptureTiming | CaptureFailure:
        eager = self.eager
        # Live requests may have left their rows in the slots; the warm-ups really run and must write to the sink.
        eager.buffers.reset()
        batch = eager.buffers.batch(size, size)
        started = time.perf_counter()
        eager.attention.bind(size, per_size=self.list.workspace == "per_size")
        eager.attention.plan(batch, graph_size=size)
        prepared_s = time.perf_counter() - started
        try:
            timing = self.backend.capture_one(ShapeKey(size), lambda: eager.forward(batch))
        except CaptureError as error:
            return CaptureFailure(size, str(error))
        self.sizes = tuple(sorted((*self.sizes, size)))
        # Making what the size needs is paid at start-up too, and belongs to what comes before recording.
        return replace(timing, warmup_s=timing.warmup_s + prepared_s)

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
        self._batch = self.eager.buffers.fill(live, admission.padded_size)

    def plan(self) -> None:
        assert self._batch is not None, "fill() comes before plan()"
        self.eager.attention.plan(self._batch, graph_size=self._batch.padded_size)

    def launch(self) -> torch.Tensor:
        assert self._batch is not None and self._addresses is not None, "capture() and fill() come before launch()"
        self._addresses.check(self.eager.owners())
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
        return self.eager.forward(self._batch)[: self._batch.raw_size]

    def check_weights(self) -> None:
        """The address check over the weights, which are too many for every replay."""
        assert self._weights is not None, "capture() comes first"
        self._weights.check(self.eager.model.named_tensors())

    def tear_down(self) -> None:
        """Drop graphs, pool, outputs and per-size workspaces."""
        self.backend.cleanup()
        self.eager.attention.unbind()
        self.sizes = ()
        self._batch = None
        self._addresses = self._weights = None
