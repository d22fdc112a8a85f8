"""The host's part of replays: what one size's bad luck may not decide, and what stays as measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.results import CaptureList, Execution
from graphtune.tune.host_part import steadied
from graphtune.tune.latency_model import At, latency_model
from tests.synthetic import captured_list, cell_result, point

HOSTS = {15: 200.0, 16: 500.0, 17: 190.0}
SIZES = st.sets(st.integers(1, 512), min_size=1, max_size=40)


def at(size: int, execution: Execution = "graph", context: int = 1024) -> At:
    return At(execution, context, size)


@given(SIZES, st.floats(50.0, 900.0), st.data())
def test_a_constant_host_part_leaves_steps_as_they_were(sizes: set[int], host: float, data: st.DataObject) -> None:
    device = {at(size): {1: data.draw(st.floats(500.0, 30_000.0))} for size in sizes}
    steps = {key: {1: by[1] + host} for key, by in device.items()}
    for key, by in steadied(steps, device).items():
        assert by[1] == pytest.approx(steps[key][1])


@given(SIZES.filter(lambda sizes: len(sizes) > 2), st.data())
def test_each_host_part_is_one_that_was_measured_nearby(sizes: set[int], data: st.DataObject) -> None:
    device = {at(size): {1: 1000.0 + 10 * size} for size in sizes}
    host = {size: data.draw(st.floats(0.0, 5_000.0)) for size in sizes}
    steps = {at(size): {1: device[at(size)][1] + host[size]} for size in sizes}
    for key, by in steadied(steps, device).items():
        near = [host[size] for size in sizes if abs(size - key.size) <= max(4, 0.25 * key.size)]
        assert min(near) - 1e-6 <= by[1] - device[key][1] <= max(near) + 1e-6


def test_one_slow_size_does_not_stand_out() -> None:
    device = {at(size): {1: 1000.0 + size} for size in (15, 16, 17, 18)}
    steps = {key: {1: by[1] + (600.0 if key.size == 16 else 200.0)} for key, by in device.items()}
    steady = steadied(steps, device)
    assert steady[at(16)][1] == pytest.approx(1216.0)
    assert steady[at(16)][1] < steady[at(17)][1]


def test_processes_and_contexts_keep_their_own_hosts() -> None:
    keys = [at(size, context=context) for size in (1, 2, 3) for context in (512, 1024)]
    device = {key: {1: 1000.0, 2: 1000.0} for key in keys}
    steps = {key: {1: 1100.0 + key.context_tokens, 2: 1300.0} for key in keys}
    assert steadied(steps, device) == {key: pytest.approx(by) for key, by in steps.items()}


def test_eager_steps_and_steps_without_a_device_time_stay() -> None:
    steps = {at(8, "eager"): {1: 4000.0}, at(8): {1: 1500.0}, at(9): {1: 2500.0, 2: 1700.0}}
    device = {at(8, "eager"): {1: 3800.0}, at(9): {1: 1400.0}}
    assert steadied(steps, device) == {**steps, at(9): {1: 2500.0, 2: 1700.0}}


def test_the_latency_model_steadies_steps_and_not_device_times() -> None:
    of = captured_list(CaptureList("some", "decode", "full", (15, 16, 17)))
    points = [point(size, 1024, "graph", 1000.0 + size + host, gpu_us=1000.0 + size) for size, host in HOSTS.items()]
    cells = [cell_result([of], points)]
    steps = latency_model(cells).table["graph", 1024]
    assert steps == {15: pytest.approx(1215.0), 16: pytest.approx(1216.0), 17: pytest.approx(1217.0)}
    assert latency_model(cells, time="gpu_us").table["graph", 1024] == {15: 1015.0, 16: 1016.0, 17: 1017.0}
