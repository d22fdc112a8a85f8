"""Torch's allocator history, as it comes from a GPU, turned into the requests of one capture."""

from __future__ import annotations

from typing import Any

from graphtune.worker.allocations import holes_of, split_events, without

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
