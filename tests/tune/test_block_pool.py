"""The pool that plays recorded requests back: torch's rules, what it reuses, and events in their compact form."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graphtune.allocation_events import decode, encode
from graphtune.results import EventRun
from graphtune.tune.block_pool import TAPE_RULES, TORCH_RULES, BlockPool
from graphtune.units import MIB
from graphtune.worker.graphs.tape_pool import BytePool
from tests.tune import memory_shapes

STEPS = st.lists(st.tuples(st.booleans(), st.integers(1, 30 * MIB), st.integers(0, 10**6)), max_size=60)


def events_of(steps: list[tuple[bool, int, int]]) -> list[tuple[int, int]]:
    """Requests at addresses of their own, and frees of live ones."""
    live: list[int] = []
    events = []
    for number, (frees, size, pick) in enumerate(steps):
        if frees and live:
            events.append((live.pop(pick % len(live)), 0))
        else:
            live.append(number)
            events.append((number, size))
    return events


@given(STEPS, st.integers(1, 9))
def test_compact_events_hold_every_request_and_free_in_order(steps: list[tuple[bool, int, int]], repeats: int) -> None:
    events = events_of(steps)
    again = [(address + 1000 * n, size) for n in range(repeats) for address, size in events]
    asked: list[int] = []
    back = []
    for number in decode(encode(again)):
        if number > 0:
            asked.append(len(asked))
            back.append((asked[-1], number))
        else:
            back.append((asked[number], 0))
    names: dict[int, int] = {}
    expected = [(names.setdefault(a, len(names)), size) for a, size in again if size] or []
    assert [entry for entry in back if entry[1]] == expected
    assert [n for n, size in back if not size] == [names[a] for a, size in again if not size]


def test_layers_are_one_run() -> None:
    layer = [(1, 100), (2, 200), (1, 0), (3, 50), (2, 0), (3, 0), (4, 70), (5, 80), (4, 0), (5, 0)]
    runs = encode([(9, 4096), *layer * 32, (9, 0)])
    assert [run.repeats for run in runs] == [1, 32, 1]
    assert runs[2].events == (-(32 * 5 + 1),)


@given(STEPS)
def test_the_tapes_pool_takes_the_same_bytes(steps: list[tuple[bool, int, int]]) -> None:
    real, live = BytePool(), {}
    for address, size in events_of([(frees, size // 64 + 1, pick) for frees, size, pick in steps]):
        if size:
            live[address] = real.allocate(size)
        else:
            del live[address]
            real.in_use()
    played = BlockPool(TAPE_RULES)
    played.play(encode(real.history))
    assert played.reserved_bytes == real.bytes()


@given(STEPS, st.integers(4, 40))
def test_repeats_that_give_all_back_are_not_played_out(steps: list[tuple[bool, int, int]], repeats: int) -> None:
    events = events_of(steps)
    freed = {address for address, size in events if not size}
    period = encode([*events, *((a, 0) for a, size in events if size and a not in freed)])
    numbers = tuple(decode(period))
    if not numbers:
        return
    short, whole = BlockPool(TORCH_RULES), BlockPool(TORCH_RULES)
    tail = EventRun(1, (5 * MIB, -1))
    short.play((EventRun(repeats, numbers), tail))
    whole.play((EventRun(1, numbers),) * repeats + (tail,))
    assert short.reserved_bytes == whole.reserved_bytes


def test_torchs_segments() -> None:
    for request, segment in ((1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 1, 12)):
        pool = BlockPool(TORCH_RULES)
        pool.allocate(request)
        assert pool.reserved_bytes == segment * MIB


def test_a_rest_of_up_to_one_mib_stays_with_its_block() -> None:
    pool = BlockPool(TORCH_RULES)
    pool.allocate(19 * MIB)  # a segment of 20
    pool.allocate(MIB + 1)  # the last MiB was not cut off
    assert pool.reserved_bytes == 40 * MIB


def test_holes_are_used_before_the_device_is_asked() -> None:
    pool = BlockPool(TORCH_RULES, holes=[12 * MIB])
    pool.allocate(8 * MIB)
    assert pool.reserved_bytes == 0
    pool.allocate(8 * MIB)
    pool.allocate(8 * MIB)
    assert pool.reserved_bytes == 20 * MIB


def test_emptying_gives_back_segments_without_a_live_block() -> None:
    pool = BlockPool(TORCH_RULES, holes=[3 * MIB])
    kept, gone = pool.allocate(30 * MIB), pool.allocate(40 * MIB)
    pool.free(gone)
    pool.release_free_segments()
    assert pool.reserved_bytes == 30 * MIB
    pool.free(kept)
    pool.release_free_segments()
    assert pool.reserved_bytes == 0
    pool.allocate(3 * MIB)
    assert pool.reserved_bytes == 0


def test_growth_of_a_captured_list_size_by_size() -> None:
    """Readings of an H200: SGLang's 36 sizes of Llama 3.1 8B, outputs per size, small to large, MiB of pool growth."""
    shape = memory_shapes.LLAMA_8B
    pool, grown, before = BlockPool(TORCH_RULES), [], 0
    for index, size in enumerate(memory_shapes.SGLANG):
        memory_shapes.capture(pool, shape, size, first=index == 0, hold_output=True)
        grown.append((pool.reserved_bytes - before) // MIB)
        before = pool.reserved_bytes
    assert grown == memory_shapes.GROWTH_PER_SIZE_ASCENDING


def test_a_hole_in_a_segment_for_small_requests_serves_no_large_one() -> None:
    pool = BlockPool(TORCH_RULES, small_holes=[2 * MIB - 512])
    pool.allocate(MIB)
    assert pool.reserved_bytes == 0
    pool.allocate(MIB + 512)
    assert pool.reserved_bytes == 20 * MIB
