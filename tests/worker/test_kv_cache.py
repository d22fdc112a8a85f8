"""Paged KV and the request table: sinks stay reserved, pages are never handed out twice, slots follow pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtune.worker.kv_cache import PagedKVCache, RequestTable


def make(page_size: int = 16, tokens: int = 320, max_requests: int = 8) -> tuple[PagedKVCache, RequestTable]:
    cache = PagedKVCache(
        layers=2,
        kv_heads=2,
        head_size=4,
        page_size=page_size,
        tokens=tokens,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return cache, RequestTable(cache=cache, max_requests=max_requests, max_context=tokens)


@given(
    page_size=st.sampled_from([1, 16, 64]),
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=6),
)
@settings(max_examples=50, deadline=None)
def test_live_requests_never_share_a_slot_or_touch_the_sink(page_size: int, lengths: list[int]) -> None:
    _, table = make(page_size, tokens=1024)
    rows = table.admit(lengths)
    assert 0 not in rows
    slots = [table.slots(rows[i : i + 1].repeat(n), np.arange(n)) for i, n in enumerate(lengths)]
    every = np.concatenate(slots)
    assert len(set(every.tolist())) == sum(lengths)
    assert every.min() >= page_size
    assert np.array_equal(table.page_table.numpy(), table.page_table_host)


def test_released_pages_come_back_and_rows_read_the_sink() -> None:
    _, table = make()
    free = table.free_pages
    rows = table.admit([40, 1])
    assert table.free_pages == free - 4
    table.release(rows)
    assert table.free_pages == free
    assert (table.page_table_host == 0).all()


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([16] * 9, "free rows"), ([160, 161], "pages are needed")],
)
def test_what_does_not_fit_takes_nothing(lengths: list[int], message: str) -> None:
    _, table = make()
    free = table.free_pages
    with pytest.raises(ValueError, match=message):
        table.admit(lengths)
    assert table.free_pages == free


def test_a_checksum_sees_a_single_changed_value() -> None:
    cache, _ = make()
    cache.fill_random(1)
    before = cache.page_checksums()
    cache.pool[1, 0, 5, 3, 1, 2] += 1e-6
    changed = (cache.page_checksums() != before).nonzero().flatten().tolist()
    assert changed == [5]


def test_slots_are_written_and_read_back_in_every_layer() -> None:
    cache, _ = make()
    at = torch.tensor([17, 40], dtype=torch.int32)
    content = torch.randn(2, 2, 2, 2, 4)
    cache.write_slots(at, content)
    assert torch.equal(cache.slots(at), content)
    assert torch.equal(cache.keys[1][1, 1], content[1, 0, 0])
