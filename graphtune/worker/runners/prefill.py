"""Prefills: the eager path, and replay of captured token counts with the eager path behind it.

What is captured is the model's body, token ids to hidden states: its size depends on tokens only. The LM head is an
eager tail over each request's last token; inside, it would need rows for every token and tie a graph to a number of
requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from graphtune.results import CaptureList
from graphtune.worker.attention.base import PrefillAttention
from graphtune.worker.graphs.backend import CaptureError, CaptureTiming, GraphBackend
from graphtune.worker.graphs.shape_key import ShapeKey
from graphtune.worker.kv_cache import PagedKVCache, RequestTable
from graphtune.worker.runners.admission import Admission, PrefillLimits, PrefillShape, admit_prefill
from graphtune.worker.runners.base import CaptureFailure, EagerRunner, GraphRunner
from graphtune.worker.runners.prefill_buffers import LivePrefill, PrefillBatch, PrefillBuffers, sink_prefill

if TYPE_CHECKING:
    from graphtune.worker.models.decoder import Decoder


class EagerPrefill(EagerRunner):
    """Runs every prefill without graphs. Built first: it owns the static buffers at their maximum."""

    attention: PrefillAttention
    buffers: PrefillBuffers

    def __init__(
        self,
        model: Decoder,
        attention: PrefillAttention,
        cache: PagedKVCache,
        table: RequestTable,
        *,
        max_tokens: int,
        max_requests: int,
    ) -> None:
        super().__init__(model, attention, cache, table)
        self.buffers = PrefillBuffers(max_tokens, max_requests, cache.pool.device)
        self._batch: PrefillBatch | None = None

    @property
    def max_context(self) -> int:
        """Tokens of the longest request that the table and the model's positions hold."""
        return min(self.table.pages_per_request * self.table.page_size, self.model.config.max_position_embeddings)

    def fill(self, live: LivePrefill) -> None:
        self._batch = self.buffers.fill(live, live.tokens)

    def plan(self) -> None:
        assert self._batch is not None, "fill() comes before plan()"
        self.attention.plan(self._batch)

    def launch(self) -> torch.Tensor:
        assert self._batch is not None, "fill() comes before launch()"
        return self.tail(self.body(self._batch), self._batch)

    def run(self, live: LivePrefill) -> torch.Tensor:
        """One whole eager prefill: logits (requests, vocabulary) of each request's last token."""
        self.fill(live)
        self.plan()
        return self.launch()

    def run_hidden(self, live: LivePrefill) -> torch.Tensor:
        """The hidden states (tokens, hidden) of an eager prefill, without the tail."""
        self.fill(live)
        self.plan()
        assert self._batch is not None
        return self.body(self._batch)

    def body(self, batch: PrefillBatch) -> torch.Tensor:
        """Hidden states (padded tokens, hidden) over static buffers; graphs record exactly this."""
        return self.model.forward(batch.input_ids, batch.positions, self._attend, head=False)

    def tail(self, hidden: torch.Tensor, batch: PrefillBatch) -> torch.Tensor:
        """Logits (requests, vocabulary) of each request's last token."""
        return self.model.logits(hidden.index_select(0, batch.last_rows[: batch.requests]))

    def warm_up(self, sizes: tuple[int, ...]) -> None:
        """Run every size eagerly on the sink, largest first: lazy loading and tuning are never charged to graphs."""
        for size in sorted(sizes, reverse=True):
            self.run(sink_prefill(size, self.max_context, self.cache.pool.device))


class GraphPrefill(GraphRunner):
    """Captured token counts of one capture list over an eager runner's buffers.

    The list's ``waste_cap`` is the factor of padded to real tokens up to which a prefill is replayed, None for any.
    With ``request_slots`` every batch has that many requests (never more than tokens), those at its end without tokens:
    a recording that holds the attention too needs a request axis of fixed length. Between segments attention takes any
    number, so None is right.
    """

    eager: EagerPrefill

    def __init__(
        self,
        eager: EagerPrefill,
        backend: GraphBackend,
        capture_list: CaptureList,
        *,
        padding: bool = True,
        mixed: bool = False,
    ) -> None:
        if max(capture_list.sizes) > eager.buffers.max_tokens:
            raise ValueError(f"{max(capture_list.sizes)} tokens do not fit buffers of {eager.buffers.max_tokens}")
        super().__init__(eager, backend, capture_list)
        self.waste_cap = capture_list.waste_cap
        self.padding = padding
        self.mixed = mixed
        self._request_slots = capture_list.request_slots
        self._max_requests = min(eager.buffers.max_requests, self._request_slots or eager.buffers.max_requests)
        self._batch: PrefillBatch | None = None

    def _capture_size(self, size: int) -> CaptureTiming | CaptureFailure:
        eager = self.eager
        # Bodies run at capture as well as in the warm-ups; all they write must go to the sink.
        live = sink_prefill(size, eager.max_context, eager.cache.pool.device)
        if live.requests > self._max_requests:
            reason = f"{live.requests} requests of {eager.max_context} tokens are needed, above the most there may be"
            return CaptureFailure(size, reason)
        batch = eager.buffers.fill(live, size, self._slots(size))
        eager.attention.plan(batch)
        try:
            return self.backend.capture_one(ShapeKey(size), lambda: eager.body(batch))
        except CaptureError as error:
            return CaptureFailure(size, str(error))

    def _reset(self) -> None:
        eager = self.eager
        eager.buffers.reset()
        # The breaks ran on unwritten memory, which may be NaN, and wrote it to the sink.
        eager.cache.write_slots(torch.arange(eager.cache.page_size, device=eager.cache.pool.device), 0.0)

    @property
    def limits(self) -> PrefillLimits:
        """What admission goes by."""
        return PrefillLimits(
            sizes=self.sizes,
            max_requests=self._max_requests,
            max_context=self.eager.max_context,
            waste_cap=self.waste_cap,
            padding=self.padding,
            mixed=self.mixed,
        )

    def admit(self, shape: PrefillShape, *, others_admit: bool = True) -> Admission:
        """Whether such a prefill may be replayed; needs no batch, so ranks can vote before there is one."""
        return admit_prefill(shape, self.limits, others_admit=others_admit)

    def fill(self, live: LivePrefill) -> None:
        admission = self.admit(shape_of(live))
        self.admitted[admission.reason] += 1
        if admission.padded_size is None:
            raise RuntimeError(f"not admitted: {admission.reason}; run() falls back to eager")
        self.pad(live, admission.padded_size)

    def pad(self, live: LivePrefill, size: int) -> None:
        """Fill the buffers for the captured ``size``, whether or not admission would choose it."""
        self._batch = self.eager.buffers.fill(live, size, self._slots(size))

    def _slots(self, size: int) -> int | None:
        """Requests of every batch of ``size`` tokens: each real one has a token at least."""
        return None if self._request_slots is None else min(self._request_slots, size)

    def plan(self) -> None:
        assert self._batch is not None, "fill() comes before plan()"
        self.eager.attention.plan(self._batch)

    def launch(self) -> torch.Tensor:
        """Replay, then the tail: logits (requests, vocabulary)."""
        hidden = self.launch_body()
        assert self._batch is not None
        return self.eager.tail(hidden, self._batch)

    def launch_body(self) -> torch.Tensor:
        """The replay alone: hidden states (raw tokens, hidden), valid until the next replay."""
        assert self._batch is not None, "fill() comes before launch()"
        self.check_addresses()
        with self.backend.replay_session():
            return self.backend.replay(ShapeKey(self._batch.padded_tokens))[: self._batch.raw_tokens]

    def run(self, live: LivePrefill, shape: PrefillShape | None = None, *, others_admit: bool = True) -> torch.Tensor:
        """One whole prefill: replayed when admitted, else eager with the same result; both are counted by reason.

        ``shape`` says more of the batch than its tensors do: drafts to verify, decode requests in it.
        """
        admission = self.admit(shape or shape_of(live), others_admit=others_admit)
        self.admitted[admission.reason] += 1
        if admission.padded_size is None:
            return self.eager.run(live)
        self.pad(live, admission.padded_size)
        self.plan()
        return self.launch()

    def run_padded_eagerly(self) -> torch.Tensor:
        """Hidden states of the batch that was filled and planned last, at its padded size, without the graph."""
        assert self._batch is not None, "fill() and plan() come first"
        return self.eager.body(self._batch)[: self._batch.raw_tokens]

    def tear_down(self) -> None:
        """Drop graphs, pool and outputs."""
        super().tear_down()
        self._batch = None


def shape_of(live: LivePrefill) -> PrefillShape:
    """What admission must know of a batch that exists."""
    return PrefillShape(tokens=live.tokens, requests=live.requests, longest=live.longest)
