"""Which sizes a gate checks, and which it names when KV changed outside the slots of a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphtune.results import GateCheck
from graphtune.worker.comparison import check_sizes
from graphtune.worker.kv_cache import PagedKVCache


def a_cache() -> PagedKVCache:
    return PagedKVCache(
        layers=1, kv_heads=1, head_size=4, page_size=2, tokens=8, dtype=torch.float32, device=torch.device("cpu")
    )


def checking(act: Callable[[int], None], seen: list[tuple[int, int]]) -> Callable[[int, int], GateCheck]:
    def check(below: int, size: int) -> GateCheck:
        seen.append((below, size))
        act(size)
        return GateCheck(size, (size,), True, 0.0, 0.0, 1e-5, True, True)

    return check


@given(st.sets(st.integers(1, 500), min_size=1, max_size=60), st.integers(2, 70))
def test_some_of_the_sizes_are_checked_above_their_own_neighbours(chosen: set[int], most: int) -> None:
    sizes = sorted(chosen)
    seen: list[tuple[int, int]] = []
    checks = check_sizes(a_cache(), sizes, checking(lambda size: None, seen), most)
    assert [check.size for check in checks] == [size for _, size in seen]
    assert len(seen) == len(set(seen)) == min(most, len(sizes))
    assert seen == sorted(seen) and set(seen) <= set(zip([0, *sizes], sizes, strict=False))
    assert sizes[-1] in {size for _, size in seen}
    assert len(sizes) == 1 or sizes[0] in {size for _, size in seen}


def test_sizes_that_change_other_pages_are_named() -> None:
    cache = a_cache()

    def act(size: int) -> None:
        if size == 4:
            cache.pool[0, 0, 2] += 1.0

    checks = check_sizes(cache, [2, 4, 8], checking(act, []))
    assert [check.kv_untouched for check in checks] == [True, False, True]
    assert [check.passed for check in checks] == [True, False, True]


def test_the_sink_may_change() -> None:
    cache = a_cache()

    def act(size: int) -> None:
        cache.pool[0, 0, 0] += 1.0

    assert all(check.passed for check in check_sizes(cache, [2, 4], checking(act, [])))


@pytest.mark.parametrize("sizes", [[2], [2, 4, 8]])
def test_a_change_that_does_not_happen_again_is_not_passed_over(sizes: list[int]) -> None:
    cache = a_cache()
    changed: list[int] = []

    def act(size: int) -> None:
        if not changed:
            changed.append(size)
            cache.pool[0, 1, 3] += 1.0

    checks = check_sizes(cache, sizes, checking(act, []))
    assert not any(check.passed for check in checks) and all(check.reason for check in checks)


def test_a_failure_that_does_not_happen_again_is_kept_while_the_change_is_located() -> None:
    cache = a_cache()
    seen: list[int] = []

    def check(below: int, size: int) -> GateCheck:
        cache.pool[0, 0, 2] += 1.0
        seen.append(size)
        wrong = seen.count(4) == 1 and size == 4
        return GateCheck(size, (size,), True, 0.0, 0.0, 1e-5, True, not wrong, "NaN in the output" if wrong else None)

    checks = check_sizes(cache, [2, 4], check)
    assert [one.reason for one in checks] == ["KV outside the written slots changed", "NaN in the output"]
