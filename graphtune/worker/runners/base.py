"""What the runners of both phases share: the capture loop, the address checks and tear-down of one capture list."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from graphtune.results import CaptureList
from graphtune.worker.addresses import AddressBook
from graphtune.worker.graphs.backend import CaptureTiming, GraphBackend
from graphtune.worker.graphs.breaks import eager_break
from graphtune.worker.kv_cache import PagedKVCache, RequestTable

if TYPE_CHECKING:
    from graphtune.worker.models.decoder import Decoder


@dataclass(frozen=True)
class CaptureFailure:
    """A size that could not be recorded."""

    size: int
    reason: str


class Buffers(Protocol):
    """Static buffers by name."""

    tensors: dict[str, torch.Tensor]


class Attention(Protocol):
    """What both phases' attention has: private buffers, and a call per layer that attends into ``out``."""

    def private_tensors(self) -> dict[str, torch.Tensor]: ...

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, /) -> Any: ...


class EagerRunner:
    """The eager path that a graph runner stands on: it owns the static ``buffers``, which a subclass makes."""

    buffers: Buffers

    def __init__(self, model: Decoder, attention: Attention, cache: PagedKVCache, table: RequestTable) -> None:
        self.model = model
        self.attention = attention
        self.cache = cache
        self.table = table
        self._attend_into = self.attend_into  # bound once: a layer would pay for binding it

    def owners(self) -> Mapping[str, torch.Tensor]:
        """Everything outside the pool and the weights that a step reads or writes, by name."""
        return {
            **self.buffers.tensors,
            **self.attention.private_tensors(),
            "kv_cache": self.cache.pool,
            "page_table": self.table.page_table,
        }

    @eager_break
    def attend_into(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """The break of a layer: attention over the batch that was planned or prepared last."""
        self.attention.forward(layer, q, k, v, out)

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Made inside the segment, so it is memory of the pool that the next layer uses again; a result that the break
        # made itself would be held once per layer and size.
        out = q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))
        self._attend_into(layer, q, k, v, out)
        return out


class GraphRunner(ABC):
    """Captured sizes of one capture list. ``admitted`` counts steps by what admission said of them."""

    def __init__(self, eager: EagerRunner, backend: GraphBackend, capture_list: CaptureList) -> None:
        self.eager = eager
        self.backend = backend
        self.list = capture_list
        self.sizes: tuple[int, ...] = ()
        self.admitted: Counter[str] = Counter()
        self._addresses: AddressBook | None = None
        self._weights: AddressBook | None = None

    @abstractmethod
    def _capture_size(self, size: int) -> CaptureTiming | CaptureFailure:
        """Record one size; device memory errors pass through."""

    @abstractmethod
    def _reset(self) -> None:
        """Put the static buffers in order after the last capture."""

    @abstractmethod
    def pad(self, live: Any, size: int) -> None:
        """Fill the buffers for the captured ``size``, whatever admission would choose."""

    @abstractmethod
    def plan(self) -> None:
        """The attention backend's part of a step that runs before each replay."""

    @abstractmethod
    def launch(self) -> torch.Tensor:
        """Replay what was filled and planned; returns the live rows' logits, valid until the next replay."""

    def capture(self) -> Iterator[tuple[int, CaptureTiming | CaptureFailure]]:
        """Capture the list in its order, yielding (size, timing or failure).

        Consume it to the end: the address book is written after the last size. A size that fails is left out and the
        next one is tried; device memory errors pass through.
        """
        order = sorted(self.list.sizes, reverse=self.list.order == "descending")
        with self.backend.capture_session():
            for size in order:
                outcome = self._capture_size(size)
                if not isinstance(outcome, CaptureFailure):
                    self.sizes = tuple(sorted((*self.sizes, size)))
                yield size, outcome
        self._reset()
        self._addresses = AddressBook(self.eager.owners())
        self._weights = AddressBook(self.eager.model.named_tensors())

    def check_addresses(self) -> None:
        """What graphs read must still be where it was at capture; checked before each replay."""
        assert self._addresses is not None, "capture() comes first"
        self._addresses.check(self.eager.owners())

    def check_weights(self) -> None:
        """The address check over the weights, which are too many for every replay."""
        assert self._weights is not None, "capture() comes first"
        self._weights.check(self.eager.model.named_tensors())

    def tear_down(self) -> None:
        """Drop graphs, pool and outputs."""
        self.backend.cleanup()
        self.sizes = ()
        self._addresses = self._weights = None


class PaddedReplay:
    """Replays of one captured size for any batch that fits it: a step that can be timed, admission left out."""

    def __init__(self, runner: GraphRunner, size: int) -> None:
        self._runner = runner
        self._size = size

    def fill(self, live: Any) -> None:
        self._runner.pad(live, self._size)

    def plan(self) -> None:
        self._runner.plan()

    def launch(self) -> torch.Tensor:
        return self._runner.launch()
