"""The byte pool: blocks are disjoint, come back exactly when they die, and fit again."""

from __future__ import annotations

import gc
import itertools
import queue
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphtune.worker.graphs.tape_pool import ALIGNMENT_BYTES, BytePool, round_up


def address(block: np.ndarray) -> int:
    return int(block.ctypes.data)


@given(
    segment_bytes=st.sampled_from([64, 1024, 64 * 1024]),
    steps=st.lists(st.one_of(st.integers(1, 5000), st.integers(-8, -1)), max_size=60),
)
def test_blocks_are_disjoint_and_all_come_back(segment_bytes: int, steps: list[int]) -> None:
    """A positive step allocates that many bytes, a negative one drops a live block."""
    pool = BytePool(segment_bytes)
    live: list[np.ndarray] = []
    peak = 0
    for step in steps:
        if step > 0:
            live.append(pool.allocate(step))
            assert live[-1].nbytes == step
            assert address(live[-1]) % ALIGNMENT_BYTES == 0
        elif live:
            del live[step % len(live)]
        spans = sorted((address(block), address(block) + block.nbytes) for block in live)
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
        assert all(pool.contains(start) and pool.contains(stop - 1) for start, stop in spans)
        in_use = sum(round_up(block.nbytes, ALIGNMENT_BYTES) for block in live)
        peak = max(peak, in_use)
        assert pool.in_use() == in_use <= pool.bytes()
    reserved = pool.bytes()
    assert pool.peak == peak
    assert reserved % segment_bytes == 0
    live.clear()
    assert pool.in_use() == 0
    assert pool.bytes() == reserved, "segments are never given back"
    # Everything is free and merged again: each segment's worth fits without a new one.
    again = [pool.allocate(segment.nbytes) for segment in sorted(pool._segments, key=lambda s: -s.nbytes)]
    assert pool.bytes() == reserved
    del again


def test_the_best_fit_is_split_and_merged() -> None:
    pool = BytePool(64)
    large, small = pool.allocate(1024), pool.allocate(256)
    starts = address(large), address(small)
    del large, small
    first = pool.allocate(200)
    assert address(first) == starts[1], "the smaller segment fits better"
    second, third = pool.allocate(512), pool.allocate(512)
    assert (address(second), address(third)) == (starts[0], starts[0] + 512)
    del second, third
    assert address(pool.allocate(1000)) == starts[0]
    assert pool.bytes() == 1280


def test_a_block_lives_as_long_as_any_view_over_it() -> None:
    pool = BytePool()
    block = pool.allocate(400)
    tensor = torch.from_numpy(block).view(torch.float32)
    view = tensor[3:7]
    del block, tensor
    assert pool.in_use() == 448
    storage = view.untyped_storage()
    del view
    assert pool.in_use() == 448
    del storage
    assert pool.in_use() == 0


def test_a_block_in_a_cycle_comes_back_at_the_collection() -> None:
    pool = BytePool()
    cycle: list[object] = [pool.allocate(64)]
    cycle.append(cycle)
    del cycle
    assert pool.in_use() == 64
    gc.collect()
    assert pool.in_use() == 0


def test_blocks_may_die_on_another_thread() -> None:
    pool = BytePool(64)
    dying: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()

    def drop() -> None:
        while dying.get() is not None:
            pass

    other = threading.Thread(target=drop)
    other.start()
    for size in range(1, 400):
        dying.put(pool.allocate(size))
    dying.put(None)
    other.join()
    assert pool.in_use() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_poison_is_nan(dtype: torch.dtype) -> None:
    pool = BytePool()
    block = pool.allocate(128)
    neighbour = pool.allocate(64)
    neighbour[:] = 1
    pool.poison(address(block), 128)
    assert torch.from_numpy(block).view(dtype).isnan().all()
    assert (neighbour == 1).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_poison_is_no_index(dtype: torch.dtype) -> None:
    pool = BytePool()
    block = pool.allocate(128)
    pool.poison(address(block), 128)
    with pytest.raises(IndexError):
        torch.zeros(1000).index_select(0, torch.from_numpy(block).view(dtype))
    assert int(torch.from_numpy(block).view(dtype)[0]) > 2**30


def test_refusals() -> None:
    for wrong in (0, -64, 100):
        with pytest.raises(ValueError, match="segment_bytes"):
            BytePool(wrong)
    pool = BytePool()
    with pytest.raises(ValueError, match="at least one byte"):
        pool.allocate(0)
    with pytest.raises(ValueError, match="not in the pool"):
        pool.poison(64, 64)
    assert not pool.contains(0)
