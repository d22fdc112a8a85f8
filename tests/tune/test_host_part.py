"""The host's part of replays: what one size's bad luck may not decide, and what stays as measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.results import CaptureList, Execution
from graphtune.stats import Median
from graphtune.tune.host_part import steadied
from graphtune.tune.latency_model import At, latency_model
from tests.synthetic import captured_list, cell_result, point

HOSTS = {15: 200.0, 16: 500.0, 17: 190.0}
RUNS: tuple[Execution, ...] = ("graph", "eager")
SIZES = st.sets(st.integers(1, 512), min_size=1, max_size=40)


def at(size: int, execution: Execution = "graph", context: int = 1024) -> At:
    return At(execution, context, size)


def good(us: float) -> Median:
    return Median(us, False)


def bad(us: float) -> Median:
    return Median(us, True)


@given(SIZES, st.floats(50.0, 900.0), st.data())
def test_a_constant_host_part_leaves_steps_as_they_were(sizes: set[int], host: float, data: st.DataObject) -> None:
    device = {at(size): {1: good(data.draw(st.floats(500.0, 30_000.0)))} for size in sizes}
    steps = {key: {1: good(by[1].us + host)} for key, by in device.items()}
    for key, by in steadied(steps, device).items():
        assert by[1] == pytest.approx(steps[key][1].us)


@given(SIZES.filter(lambda sizes: len(sizes) > 2), st.data())
def test_each_host_part_lies_among_the_undisturbed_ones_nearby(sizes: set[int], data: st.DataObject) -> None:
    device = {at(size): {1: good(1000.0 + 10 * size)} for size in sizes}
    host = {size: data.draw(st.tuples(st.floats(0.0, 5_000.0), st.booleans())) for size in sizes}
    steps = {at(size): {1: Median(device[at(size)][1].us + us, flag)} for size, (us, flag) in host.items()}
    for key, by in steadied(steps, device).items():
        near = [us for size, (us, flag) in host.items() if abs(size - key.size) <= max(4, key.size / 4) and not flag]
        rest = by[1] - device[key][1].us
        if near:
            assert min(near) - 1e-6 <= rest <= max(near) + 1e-6
        else:
            assert by[1] == steps[key][1].us


def test_one_slow_size_does_not_stand_out() -> None:
    device = {at(size): {1: good(1000.0 + size)} for size in (15, 16, 17, 18)}
    steps = {key: {1: good(by[1].us + (600.0 if key.size == 16 else 200.0))} for key, by in device.items()}
    steady = steadied(steps, device)
    assert steady[at(16)][1] == pytest.approx(1216.0)
    assert steady[at(16)][1] < steady[at(17)][1]


def test_a_disturbed_step_counts_by_the_host_part_of_its_neighbours() -> None:
    device = {at(size): {1: good(1000.0), 2: good(1010.0)} for size in (16, 17)}
    steps = {at(16): {1: bad(1900.0), 2: bad(1950.0)}, at(17): {1: good(1200.0), 2: bad(1900.0)}}
    assert steadied(steps, device) == {at(16): {1: 1200.0}, at(17): {1: 1200.0}}


def test_disturbed_steps_count_as_measured_where_nothing_else_does() -> None:
    steps = {at(16): {1: bad(1900.0), 2: bad(1950.0)}, at(99): {1: bad(2900.0), 2: good(2500.0)}}
    assert steadied(steps, {}) == {at(16): {1: 1900.0, 2: 1950.0}, at(99): {2: 2500.0}}


def test_processes_contexts_and_executions_keep_their_own_hosts() -> None:
    keys = [at(size, run, context) for size in (1, 2, 3) for context in (512, 1024) for run in RUNS]
    device = {key: {1: good(1000.0), 2: good(1000.0)} for key in keys}
    steps = {key: {1: good(1100.0 + key.context_tokens), 2: good(1300.0 + len(key.execution))} for key in keys}
    assert steadied(steps, device) == {key: {p: one.us for p, one in by.items()} for key, by in steps.items()}


def test_steps_without_a_device_time_stay() -> None:
    steps = {at(8): {1: good(1500.0)}, at(9): {1: good(2500.0), 2: good(1700.0)}}
    device = {at(9): {1: good(1400.0), 2: bad(1000.0)}}
    assert steadied(steps, device) == {at(8): {1: 1500.0}, at(9): {1: 2500.0, 2: 1700.0}}


def test_the_latency_model_steadies_steps_and_not_device_times() -> None:
    of = captured_list(CaptureList("some", "decode", "full", (15, 16, 17)))
    points = [point(size, 1024, "graph", 1000.0 + size + host, gpu_us=1000.0 + size) for size, host in HOSTS.items()]
    cells = [cell_result([of], points)]
    steps = latency_model(cells).table["graph", 1024]
    assert steps == {15: pytest.approx(1215.0), 16: pytest.approx(1216.0), 17: pytest.approx(1217.0)}
    assert latency_model(cells, time="gpu_us").table["graph", 1024] == {15: 1015.0, 16: 1016.0, 17: 1017.0}
