"""Torch's allocator history, as it comes from a GPU, turned into the requests of one capture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphtune.results import EventRun
from graphtune.worker.allocations import allocation_recorder, holes_of, split_events, without
from graphtune.worker.graphs.eager import EagerBackend
from graphtune.worker.graphs.shape_key import ShapeKey

MIB = 1 << 20


def entry(action: str, address: int, size: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0}


def test_requests_are_told_apart_by_the_spans_of_graph_pools() -> None:
    entries = [
        entry("segment_alloc", 1000, 500),
        entry("alloc", 1000, 64),
        entry("alloc", 9000, 32),
        entry("free_requested", 1000, 64),
        entry("free_completed", 1000, 64),
        entry("snapshot", 0),
        entry("free_completed", 9000, 32),
    ]
    pool, beside = split_events(entries, [(900, 1500)])
    assert pool == [(1000, 64), (1000, 0)]
    assert beside == [(9000, 32), (9000, 0)]


def test_what_used_the_addresses_before_the_pool_took_them_is_beside_it() -> None:
    entries = [
        entry("segment_alloc", 1000, 500),
        *(entry("alloc", 1000, 64), entry("free_completed", 1000)),
        entry("segment_free", 1000, 500),
        entry("segment_alloc", 1000, 500),
        entry("alloc", 1000, 32),
        *(entry("segment_alloc", 9000, 500), entry("alloc", 9000, 16)),
    ]
    assert split_events(entries, [(1000, 1500)]) == ([(1000, 32)], [(1000, 64), (1000, 0), (9000, 16)])


def test_a_buffer_that_is_still_live_is_taken_out_and_earlier_users_of_its_address_stay() -> None:
    events = [(5, 10), (5, 0), (7, 3), (5, 20)]
    assert without(events, 5) == [(5, 10), (5, 0), (7, 3)]


def test_free_blocks_by_kind_of_segment() -> None:
    def segment(kind: str, *blocks: tuple[int, str]) -> dict[str, Any]:
        return {"segment_type": kind, "blocks": [{"size": size, "state": state} for size, state in blocks]}

    segments = [
        segment("large", (8 * MIB, "active_allocated"), (12 * MIB, "inactive")),
        segment("small", (512, "active_allocated"), (2 * MIB - 512, "inactive")),
        segment("large", (12 * MIB, "inactive"), (8 * MIB, "active_awaiting_free")),
    ]
    assert holes_of(segments, "large") == ((12 * MIB, 2),)
    assert holes_of(segments, "small") == ((2 * MIB - 512, 1),)


class FakeCuda:
    """What the recorder asks of torch.cuda: two segments before, a graph pool and a history after."""

    def __init__(self) -> None:
        self.recording: list[Any] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        stream = SimpleNamespace(cuda_stream=7)
        own = {"stream": 7, "segment_pool_id": (0, 0), "segment_type": "large", "address": 0, "total_size": 20 * MIB}
        blocks = [{"size": 8 * MIB, "state": "active_allocated"}, {"size": 12 * MIB, "state": "inactive"}]
        other = {**own, "stream": 0, "blocks": [{"size": 5 * MIB, "state": "inactive"}]}
        pool = {**own, "segment_pool_id": (0, 3), "address": 10**9, "total_size": 6 * MIB, "blocks": []}
        at = 10**9
        history = [
            *(entry("alloc", at, 4 * MIB), entry("free_completed", at)),
            *(entry("alloc", 8 * MIB, 8 * MIB), entry("alloc", at, 2 * MIB), entry("free_completed", at)),
        ]
        for name, made in (
            ("synchronize", lambda: None),
            ("empty_cache", lambda: None),
            ("current_stream", lambda: stream),
            ("current_device", lambda: 1),
            ("memory_snapshot", lambda: [{**own, "blocks": blocks}, other]),
        ):
            patch.setattr(torch.cuda, name, made)
        patch.setattr(torch.cuda.memory, "_record_memory_history", lambda *a, **k: self.recording.append((a, k)))
        snapshot = {"segments": [{**own, "blocks": blocks}, pool], "device_traces": [[], history]}
        patch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)


def test_a_recording_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    recorder = allocation_recorder(EagerBackend())
    trace = recorder.take(ShapeKey(4))
    assert trace.room_bytes == 4 * MIB
    assert trace.pool == (EventRun(1, (2 * MIB, -1)),)
    assert trace.beside == (EventRun(1, (8 * MIB,)),)
    assert trace.holes == ((12 * MIB, 1),) and trace.small_holes == ()
    assert [arguments[0][0] for arguments in cuda.recording] == ["all", None]
