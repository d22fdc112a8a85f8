from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.results import Samples
from graphtune.stats import (
    ASSUMED_NOISE,
    combined_us,
    key_of,
    median_us,
    noise_between_processes,
    process_medians,
    spread_us,
)
from tests.synthetic import captured_list, cell_result, point, small_sweep

times = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=20)


@given(times)
def test_median_and_quartiles_lie_in_order(us: list[float]) -> None:
    samples = Samples(us=tuple(us), taken=len(us), stop="count")
    low, high = spread_us(samples) or (0.0, 0.0)
    median = median_us(samples)
    assert median == statistics.median(us)
    assert min(us) <= low <= median * (1 + 1e-12)
    assert median <= high * (1 + 1e-12) and high <= max(us) * (1 + 1e-12)


@pytest.mark.parametrize("missing", [None, Samples(us=(), taken=0, stop="time")])
def test_nothing_measured_is_none(missing: Samples | None) -> None:
    assert median_us(missing) is None
    assert spread_us(missing) is None


def test_each_process_counts_once() -> None:
    of = small_sweep((4,)).cells[0].captured_lists
    first = cell_result(of, [point(4, 1024, "graph", 1000.0)], process=1)
    again = cell_result(of, [point(4, 1024, "graph", 1200.0)], process=1)
    second = cell_result(of, [point(4, 1024, "graph", 2000.0)], process=2)
    (by,) = process_medians([first, again, second]).values()
    assert by == {1: 1100.0, 2: 2000.0}
    assert combined_us(by) == 1550.0


def test_sides_of_a_cliff_are_different_points() -> None:
    exact = point(8, 1024, "graph", 1000.0)
    assert key_of(exact) != key_of(point(8, 1024, "eager", 1000.0))
    assert key_of(exact) != key_of(point(8, 512, "graph", 1000.0))


def test_noise_is_what_nine_of_ten_points_stay_below() -> None:
    lists = [captured_list(small_sweep((1,)).cells[0].captured_lists[0].list)]
    sizes = range(1, 12)
    first = cell_result(lists, [point(s, 64, "graph", 1000.0) for s in sizes], process=1)
    second = cell_result(lists, [point(s, 64, "graph", 1000.0 * (1 + s / 1000)) for s in sizes], process=2)
    noise = noise_between_processes([first, second])
    assert not noise.assumed and noise.points == 11
    below = [s for s in sizes if 2 * (s / 1000) / (2 + s / 1000) <= noise.relative + 1e-9]
    assert len(below) == 10
    assert "nine of ten" in noise.words


def test_one_process_has_no_noise_of_its_own() -> None:
    noise = noise_between_processes(small_sweep(processes=1).cells)
    assert noise.assumed and noise.relative == ASSUMED_NOISE
    assert "assumed" in noise.words
    assert not noise_between_processes(small_sweep(processes=2).cells).assumed
