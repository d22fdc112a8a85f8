"""Records what a capture asks of the allocator, so that the pool of any list can be worked out from its sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from graphtune.allocation_events import encode
from graphtune.results import AllocationTrace
from graphtune.worker.graphs.backend import GraphBackend
from graphtune.worker.graphs.breakable import BreakableBackend
from graphtune.worker.graphs.shape_key import ShapeKey
from graphtune.worker.graphs.tape_backend import TapeBackend
from graphtune.worker.graphs.tape_breakable import TapeBreakable

Events = list[tuple[int, int]]


class AllocationRecorder(Protocol):
    """Made before a list of one size is captured into an empty pool; ``take`` ends it once the size is captured."""

    def take(self, key: ShapeKey) -> AllocationTrace:
        """What the capture of ``key`` asked for."""


def allocation_recorder(backend: GraphBackend) -> AllocationRecorder:
    """A recorder for what ``backend`` captures next, which must be its first capture."""
    if isinstance(backend, (TapeBackend, TapeBreakable)):
        return _TapeAllocations(backend)
    return _CudaAllocations(backend if isinstance(backend, BreakableBackend) else None)


class _TapeAllocations:
    def __init__(self, backend: TapeBackend | TapeBreakable) -> None:
        self._backend = backend

    def take(self, key: ShapeKey) -> AllocationTrace:
        pool = self._backend.pool
        pool.in_use()  # lets it learn of what died last
        return AllocationTrace(0, encode(pool.history))


class _CudaAllocations:
    """Reads torch's own history of its allocator, without stacks; one process records for one device and stream."""

    def __init__(self, breakable: BreakableBackend | None) -> None:
        self._breakable = breakable
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._stream = torch.cuda.current_stream().cuda_stream
        segments = [
            segment
            for segment in torch.cuda.memory_snapshot()
            if segment["stream"] == self._stream and not _is_private(segment)
        ]
        self._holes = {kind: holes_of(segments, kind) for kind in ("large", "small")}
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", clear_history=True)

    def take(self, key: ShapeKey) -> AllocationTrace:
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
        spans = [
            (int(segment["address"]), int(segment["address"]) + int(segment["total_size"]))
            for segment in snapshot["segments"]
            if _is_private(segment)
        ]
        pool, beside = split_events(snapshot["device_traces"][torch.cuda.current_device()], spans)
        room, pool = _room(pool)
        rows = self._breakable.owned(key).get("output_rows") if self._breakable else None
        if rows is not None:
            beside = without(beside, rows.untyped_storage().data_ptr())
        return AllocationTrace(
            room_bytes=room,
            pool=encode(pool),
            beside=encode(beside),
            holes=self._holes["large"],
            small_holes=self._holes["small"],
            shared_output_bytes=rows.untyped_storage().nbytes() if rows is not None else 0,
        )


def holes_of(segments: Iterable[Any], kind: str) -> tuple[tuple[int, int], ...]:
    """Free blocks in segments of one kind (``large`` or ``small``) as (bytes, how many)."""
    sizes = Counter(
        int(block["size"])
        for segment in segments
        if segment["segment_type"] == kind
        for block in segment["blocks"]
        if block["state"] == "inactive"
    )
    return tuple(sorted(sizes.items()))


def _is_private(segment: Any) -> bool:
    """True for a segment of a graph pool; torch's own pool is (0, 0)."""
    return tuple(segment["segment_pool_id"]) != (0, 0)


def split_events(entries: Sequence[Any], pool_spans: Sequence[tuple[int, int]]) -> tuple[Events, Events]:
    """Requests and frees of torch's history, in a graph pool's address spans and beside them. What lay at a span's
    addresses before the pool took its segment, which may be one that was just given back, is beside it."""
    taken = [(at, int(entry["addr"])) for at, entry in enumerate(entries) if entry["action"] == "segment_alloc"]
    since = {
        (start, stop): max((at for at, address in taken if start <= address < stop), default=-1)
        for start, stop in pool_spans
    }
    pool: Events = []
    beside: Events = []
    for at, entry in enumerate(entries):
        if entry["action"] not in ("alloc", "free_completed"):
            continue
        address = int(entry["addr"])
        size = int(entry["size"]) if entry["action"] == "alloc" else 0
        inside = any(start <= address < stop and at > since[start, stop] for start, stop in pool_spans)
        (pool if inside else beside).append((address, size))
    return pool, beside


def without(events: Events, address: int) -> Events:
    """``events`` without the last request at ``address``, which is still live."""
    last = max(index for index, (at, size) in enumerate(events) if at == address and size > 0)
    return events[:last] + events[last + 1 :]


def _room(pool: Events) -> tuple[int, Events]:
    """The block that a full capture takes and gives back before anything else, and the events after it."""
    if len(pool) > 1 and pool[0][1] > 0 and pool[1] == (pool[0][0], 0):
        return pool[0][1], pool[2:]
    return 0, pool
