from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.results import CellResult, Execution, Point, Samples
from graphtune.stats import (
    LEAST_TOLERANCE,
    Disturbances,
    Ratio,
    combined_us,
    disturbances,
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
    assert combined_us(by) == pytest.approx(math.sqrt(1100 * 2000))


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=5), st.floats(0.1, 10))
def test_a_slower_process_changes_no_ratio(us: list[float], factor: float) -> None:
    by = dict(enumerate(us))
    slowed = {process: one * factor if process == 0 else one for process, one in by.items()}
    assert combined_us(slowed) / combined_us(by) == pytest.approx(factor ** (1 / len(us)))


def test_sides_of_a_cliff_are_different_points() -> None:
    exact = point(8, 1024, "graph", 1000.0)
    assert key_of(exact) != key_of(point(8, 1024, "eager", 1000.0))
    assert key_of(exact) != key_of(point(8, 512, "graph", 1000.0))


def flagged(of: Point) -> Point:
    assert of.step_us is not None
    return replace(of, step_us=replace(of.step_us, flags=("host slowed down 1.8x",)))


def cells_of(*processes: list[Point]) -> list[CellResult]:
    lists = [captured_list(small_sweep((1,)).cells[0].captured_lists[0].list)]
    return [cell_result(lists, points, process=number) for number, points in enumerate(processes, start=1)]


def test_a_disturbed_process_counts_only_where_no_other_measured() -> None:
    first = [flagged(point(1, 64, "graph", 1800.0)), flagged(point(2, 64, "graph", 1900.0))]
    second = [point(1, 64, "graph", 1000.0), flagged(point(2, 64, "graph", 2100.0))]
    cells = cells_of(first, second)
    found = {key.raw_size: by for key, by in process_medians(cells).items()}
    assert found == {1: {2: 1000.0}, 2: {1: 1900.0, 2: 2100.0}}
    assert disturbances(cells) == Disturbances(medians=4, disturbed=3, used=2)
    assert disturbances(cells, "gpu_us") == Disturbances(medians=4, disturbed=0, used=0)


@given(st.lists(st.floats(0.01, 100), max_size=4), st.floats(0.01, 100))
def test_faster_means_by_more_than_the_tolerance_in_every_process(ratios: list[float], combined: float) -> None:
    found = Ratio(combined, tuple(ratios))
    apart = max(ratios, default=0) - min(ratios, default=0)
    assert found.tolerance == max(LEAST_TOLERANCE, apart)
    assert found.assumed == (len(ratios) < 2)
    assert found.faster == all(1 - one > found.tolerance for one in [*ratios, combined])
    assert found.slower == all(one - 1 > found.tolerance for one in [*ratios, combined])
    assert not (found.faster and found.slower)


def noise_sweep(execution: Execution) -> list[CellResult]:
    sizes = range(1, 12)
    return cells_of(
        [point(s, 64, execution, 1100.0, gpu_us=1000.0) for s in sizes],
        [point(s, 64, execution, 2100.0, gpu_us=1000.0 * (1 + s / 1000)) for s in sizes],
    )


def test_noise_is_what_nine_of_ten_device_times_of_replays_stay_below() -> None:
    noise = noise_between_processes(noise_sweep("graph"))
    assert not noise.assumed and noise.points == 11
    below = [s for s in range(1, 12) if (s / 1000) / math.sqrt(1 + s / 1000) <= noise.relative + 1e-9]
    assert len(below) == 10
    assert "nine in ten" in noise.words and "gpu_us" in noise.words
    assert noise_between_processes(noise_sweep("eager")).assumed


def test_one_process_has_no_noise_of_its_own() -> None:
    noise = noise_between_processes(small_sweep(processes=1).cells)
    assert noise.assumed and noise.relative == LEAST_TOLERANCE
    assert "assumed" in noise.words
    assert not noise_between_processes(small_sweep(processes=2).cells).assumed
