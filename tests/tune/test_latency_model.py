from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.decode_cells import padded_steps
from graphtune.errors import Finding
from graphtune.plan import PaddedTo
from graphtune.results import Point
from graphtune.tune.latency_model import LatencyModel, latency_model
from tests.synthetic import cell_result, h200_sweep, padded_points, point, small_sweep


def model_of(points: list[Point], **settings: float) -> LatencyModel:
    lists = small_sweep((1,)).cells[0].captured_lists
    return latency_model([cell_result(lists, points)], **settings)  # type: ignore[arg-type]


def test_measured_sizes_are_looked_up_and_sizes_between_interpolated() -> None:
    model = model_of([point(4, 1024, "graph", 1000.0), point(8, 1024, "graph", 1400.0)])
    at_four, at_five = model.graph(4, 1024), model.graph(5, 1024)
    assert at_four is not None and (at_four.us, at_four.provenance) == (1000.0, "measured")
    assert at_five is not None and (at_five.us, at_five.provenance) == (1100.0, "interpolated")


@pytest.mark.parametrize("size", [1, 3, 9, 512])
def test_nothing_is_extrapolated_in_size(size: int) -> None:
    model = model_of([point(4, 1024, "graph", 1000.0), point(8, 1024, "graph", 1400.0)])
    assert model.graph(size, 1024) is None
    assert model.eager(4, 1024) is None


def test_contexts_between_are_interpolated_and_beyond_are_not_answered() -> None:
    points = [point(s, c, "graph", 1000.0 + s + c) for s in (4, 8) for c in (512, 1024)]
    model = model_of(points)
    between = model.graph(8, 768)
    assert between is not None and between.provenance == "interpolated"
    assert between.us == pytest.approx(1776.0)
    assert model.graph(8, 2048) is None and model.graph(8, 100) is None
    assert model.nearest_context(2048) == 1024 and model.nearest_context(100) == 512
    assert model.nearest_context(600) == 600


def test_a_measured_context_with_an_unmeasured_size_is_interpolated() -> None:
    points = [point(s, c, "graph", 1000.0 + s) for s in (4, 8) for c in (512, 1024)]
    points.append(point(6, 1024, "graph", 1006.0))
    model = model_of(points)
    sparse = model.graph(6, 512)
    assert sparse is not None and sparse.provenance == "interpolated"
    exact = model.graph(6, 1024)
    assert exact is not None and exact.provenance == "measured"


def kernels_and_kv(size: int, context: int) -> float:
    """Kernels that jump from size to size, and KV tokens that cost the same each."""
    return {1: 1530.0, 2: 1520.0, 3: 1600.0, 4: 1450.0}.get(size, 1440.0 + 5 * size) + 0.02 * size * context


def test_a_size_measured_at_the_main_context_keeps_its_kernels_at_another() -> None:
    points = [point(s, 1024, "graph", kernels_and_kv(s, 1024)) for s in range(1, 9)]
    points += [point(s, c, "graph", kernels_and_kv(s, c)) for c in (512, 4096) for s in (1, 4, 8)]
    model = model_of(points)
    for size in range(1, 9):
        for context in (512, 700, 1024, 2000, 4096):
            figure = model.graph(size, context)
            assert figure is not None and figure.us == pytest.approx(kernels_and_kv(size, context))
    at_main, inner = model.without(3, 1024).graph(3, 1024), model.without(4, 512).graph(4, 512)
    assert at_main is not None and inner is not None
    assert at_main.us == pytest.approx((kernels_and_kv(2, 1024) + kernels_and_kv(4, 1024)) / 2)
    assert inner.us == pytest.approx(kernels_and_kv(4, 512))
    assert model_of([point(4, 512, "graph", 1000.0)]).without(4, 512).contexts() == ()


KERNELS = partial(kernels_and_kv, context=0)
SIZES = (1, 2, 3, 4, 5, 6, 7, 8)


def padded_us(raw: int, bucket: int, context: int) -> float:
    """The bucket's kernels and the KV of the batch."""
    return KERNELS(bucket) + 0.02 * raw * context


@given(st.sampled_from(SIZES), st.sampled_from(SIZES), st.sampled_from((64, 200, 1024, 4000)))
def test_a_padded_step_runs_the_kernels_of_its_bucket(raw: int, bucket: int, context: int) -> None:
    raw, bucket = sorted((raw, bucket))
    points = [point(s, c, "graph", kernels_and_kv(s, c)) for s in SIZES for c in (64, 1024, 4096)]
    host_us = 90.0  # of every synthetic step
    all_raw = [PaddedTo(raw, tuple(range(raw + 1, 9))) for raw in (1, 2, 4)]
    points += padded_points(all_raw, 1024, lambda raw, bucket: padded_us(raw, bucket, 1024) - host_us)
    figure = model_of(points).replay(raw, bucket, context)
    assert figure is not None
    # No bucket takes longer with fewer requests, whatever kernels are between.
    assert figure.us == pytest.approx(min(padded_us(raw, bucket, context), kernels_and_kv(bucket, context)))


def test_a_padded_step_is_known_where_its_bucket_cannot_be_filled() -> None:
    points = [point(s, 1024, "graph", kernels_and_kv(s, 1024)) for s in SIZES]
    points += [point(s, 4096, "graph", kernels_and_kv(s, 4096)) for s in (1, 2, 4)]
    host_us = 90.0
    points += padded_points([PaddedTo(4, (8,))], 1024, lambda raw, bucket: padded_us(raw, bucket, 1024) - host_us)
    model = model_of(points)
    figure = model.replay(4, 8, 4096)
    assert model.graph(8, 4096) is None
    assert figure is not None and figure.us == pytest.approx(padded_us(4, 8, 4096))


def test_padding_is_taken_from_the_processes_that_timed_it() -> None:
    """The second process runs at another pace; what padding takes in the first is not mixed with its full buckets."""
    lists = small_sweep((1,)).cells[0].captured_lists
    first = [point(s, 1024, "graph", us, gpu_us=us - 100) for s, us in ((4, 1100.0), (8, 1300.0))]
    first += padded_points([PaddedTo(4, (8,))], 1024, lambda raw, bucket: 1150.0)
    second = [point(s, 1024, "graph", us, gpu_us=us - 100) for s, us in ((4, 2100.0), (8, 2500.0))]
    model = latency_model([cell_result(lists, first, process=1), cell_result(lists, second, process=2)])
    for of, own in ((model.processes[1], 1100.0), (model.processes[2], 2100.0)):
        figure = of.replay(4, 8, 1024)
        assert figure is not None and figure.us == pytest.approx(own + 150.0)


def test_a_difference_does_not_take_more_than_half_of_a_step() -> None:
    points = [point(s, 1024, "graph", us) for s, us in ((1, 5000.0), (2, 10.0), (4, 5000.0))]
    points += [point(s, 512, "graph", 1000.0) for s in (1, 4)]
    figure = model_of(points).graph(2, 512)
    assert figure is not None and figure.us == pytest.approx(500.0)


def test_a_size_that_the_main_context_lacks_counts_at_its_own() -> None:
    points = [point(s, 1024, "graph", 1000.0 + s) for s in (1, 2, 4, 8, 16)]
    points += [point(s, 64, "graph", us) for s, us in ((1, 900.0), (3, 3000.0), (16, 916.0))]
    model = model_of(points)
    known = [model.graph(size, 64) for size in (1, 2, 3, 4, 16)]
    us = [figure.us for figure in known if figure is not None]
    assert us[0] == 900.0 and us[2] == 3000.0 and us[4] == 916.0
    assert us[1] == pytest.approx(1950.0) and us[3] == pytest.approx(3000.0 + (916.0 - 3000.0) / 13, rel=1e-3)


@given(st.data())
def test_every_figure_passes_through_what_was_measured_and_is_a_time(data: st.DataObject) -> None:
    sizes = st.lists(st.integers(1, 64), min_size=1, max_size=8, unique=True)
    points = [point(s, c, "graph", data.draw(st.floats(100, 1e4))) for c in (64, 512, 1024) for s in data.draw(sizes)]
    model = model_of(points)
    for one in points:
        figure = model.graph(one.raw_size, one.context_tokens)
        assert figure is not None and one.step_us is not None
        assert figure.us == pytest.approx(one.step_us.us[0]) and figure.provenance == "measured"
    context = data.draw(st.sampled_from((64, 512, 1024)))
    column = model.sizes("graph", context)
    size = data.draw(st.integers(1, 64))
    found = model.graph(size, context)
    if column[0] <= size <= column[-1]:
        assert found is not None and found.us >= 49.0


def test_a_context_that_lacks_the_size_does_not_answer_for_it() -> None:
    points = [point(s, 1024, "graph", 1000.0 + s) for s in (4, 256)] + [point(4, 16384, "graph", 2000.0)]
    model = model_of(points)
    assert model.graph(256, 8000) is None
    assert model.graph(4, 8000) is not None


def test_eager_overhead_is_added_to_eager_only() -> None:
    points = [point(4, 1024, "graph", 1000.0), point(4, 1024, "eager", 5000.0)]
    model = model_of(points, eager_overhead_us=700.0)
    graph, eager = model.graph(4, 1024), model.eager(4, 1024)
    assert graph is not None and graph.us == 1000.0
    assert eager is not None and eager.us == 5700.0


def test_processes_are_combined_and_failed_points_left_out() -> None:
    lists = small_sweep((1,)).cells[0].captured_lists
    good = point(4, 1024, "graph", 1000.0)
    broken = replace(point(8, 1024, "graph", 1.0), status="failed", reason="illegal access")
    cells = [
        cell_result(lists, [good, broken], process=1),
        cell_result(lists, [point(4, 1024, "graph", 1100.0)], process=2),
    ]
    model = latency_model(cells)
    assert model.sizes("graph", 1024) == (4,)
    figure = model.graph(4, 1024)
    assert figure is not None and figure.us == pytest.approx((1000 * 1100) ** 0.5)
    assert set(model.cell_ids) == {cell.cell_id for cell in cells}


def test_of_two_graph_backends_the_one_with_shorter_replays_is_taken() -> None:
    """Their times are not mixed, whichever the recipe named first."""
    full = [point(s, 1024, "graph", 1000.0 + s) for s in (1, 2, 4)]
    breakable = [replace(point(s, 1024, "graph", 1200.0 + s), backend="breakable") for s in (1, 2, 4, 8)]
    other = [replace(of, padded_size=4, gpu_us=None, step_us=None) for of in breakable[:1]]
    eager = [point(s, 1024, "eager", 3000.0) for s in (1, 2, 4)]
    for points in (full + breakable + other + eager, other + breakable + full + eager):
        model = model_of(points)
        assert model.backend == "full" and model.sizes("graph", 1024) == (1, 2, 4)
        assert model.table["graph", 1024] == {1: 1001.0, 2: 1002.0, 4: 1004.0} and model.sizes("eager", 1024) == (
            1,
            2,
            4,
        )
    faster = [replace(of, step_us=replace(of.step_us, us=(900.0,)), gpu_us=None) for of in breakable if of.step_us]
    assert model_of(full + faster).backend == "breakable"
    apart = [replace(point(16, 1024, "graph", 10.0), backend="breakable")]
    assert model_of(full + apart).backend == "full", "timed most"


def test_a_bucket_that_was_timed_padded_but_not_full_tells_nothing() -> None:
    padded = padded_points([PaddedTo(1, (4,))], 1024, lambda raw, bucket: 100.0)
    model = model_of([point(1, 1024, "graph", 1000.0), replace(point(4, 1024, "graph", 1100.0), gpu_us=None), *padded])
    assert model.padded is None and not model.knows_padding(1, 4)


def test_the_attention_backend_with_the_most_points_is_taken() -> None:
    points = [point(s, 1024, "graph", 1000.0) for s in (1, 2, 4)]
    other = [replace(p, attention="sdpa") for p in points[:1]]
    assert model_of(points + other).attention == "flashinfer"


def test_a_sweep_without_graph_points_is_a_finding() -> None:
    with pytest.raises(Finding):
        model_of([point(4, 1024, "eager", 5000.0)])


def test_the_main_context_has_the_most_sizes() -> None:
    assert latency_model(h200_sweep().cells).main_context == 1024


@given(
    st.dictionaries(st.integers(1, 300), st.floats(100, 1e5), min_size=1, max_size=12),
    st.integers(1, 300),
)
def test_figures_stay_between_their_measured_neighbours(known: dict[int, float], size: int) -> None:
    model = model_of([point(s, 1024, "graph", us) for s, us in known.items()])
    figure = model.graph(size, 1024)
    if size < min(known) or size > max(known):
        assert figure is None
        return
    assert figure is not None
    assert (figure.provenance == "measured") == (size in known)
    below = known[max(s for s in known if s <= size)]
    above = known[min(s for s in known if s >= size)]
    assert min(below, above) * (1 - 1e-9) <= figure.us <= max(below, above) * (1 + 1e-9)


def flagged(of: Point) -> Point:
    assert of.step_us is not None and of.gpu_us is not None
    flags = ("GPU clock dropped",)
    return replace(of, step_us=replace(of.step_us, flags=flags), gpu_us=replace(of.gpu_us, flags=flags))


def test_another_process_stands_in_for_a_disturbed_one_at_its_own_pace() -> None:
    """Process 2 takes 1.2 times as long at the sizes that both measured; its disturbed figure is not used."""
    lists = small_sweep((1,)).cells[0].captured_lists
    first = [point(s, 64, "graph", us) for s, us in ((1, 1000.0), (2, 1100.0), (4, 1300.0))]
    second = [point(1, 64, "graph", 1200.0), flagged(point(2, 64, "graph", 5000.0)), point(4, 64, "graph", 1560.0)]
    model = latency_model([cell_result(lists, first, process=1), cell_result(lists, second, process=2)])
    stood_in, own = model.processes[2].graph(2, 64), model.processes[1].graph(2, 64)
    assert stood_in is not None and own is not None
    assert stood_in.us == pytest.approx(1320.0) and stood_in.own == 0.0
    assert own.us == 1100.0 and own.own == 1.0
    between = model.processes[2].graph(3, 64)
    assert between is not None and between.own == pytest.approx(0.5)
    combined = model.graph(2, 64)
    assert combined is not None and combined.us == pytest.approx((1100 * 1320) ** 0.5)


def test_only_disturbed_figures_are_figures_too() -> None:
    model = model_of([flagged(point(4, 1024, "graph", 1000.0))])
    figure = model.graph(4, 1024)
    assert figure is not None and figure.us == 1000.0


@given(st.dictionaries(st.integers(1, 40), st.floats(100, 1e4), min_size=2, max_size=10), st.data())
def test_a_padded_step_is_a_time_and_at_most_that_of_the_full_bucket(
    known: dict[int, float], data: st.DataObject
) -> None:
    sizes = tuple(sorted(known))
    points = [point(s, c, "graph", us * (1 + c / 1000)) for s, us in known.items() for c in (64, 1024)]
    timed = data.draw(st.lists(st.sampled_from(padded_steps(sizes)), unique=True)) if padded_steps(sizes) else []
    points += padded_points(timed, 1024, lambda raw, bucket: data.draw(st.floats(1, 1e5)))
    model = model_of(points)
    bucket = data.draw(st.sampled_from(sizes[1:]))
    raw = data.draw(st.integers(sizes[0], bucket))
    padded, full, own = model.replay(raw, bucket, 1024), model.graph(bucket, 1024), model.graph(raw, 1024)
    assert padded is not None and full is not None and own is not None
    assert min(0.5 * own.us, full.us) <= padded.us * (1 + 1e-9) <= full.us * (1 + 2e-9)
    assert padded.provenance == ("measured" if raw == bucket else "interpolated")
