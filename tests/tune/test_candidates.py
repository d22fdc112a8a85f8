from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.results import CaptureList, Point
from graphtune.tune.candidates import (
    Candidate,
    Evaluation,
    Evaluator,
    Step,
    bucket_for,
    choose,
    eager_candidate,
    measured_candidates,
    pareto,
)
from graphtune.tune.latency_model import LatencyModel, latency_model
from graphtune.tune.memory_model import GraphCost, memory_model
from tests.synthetic import MIB, captured_list, cell_result, point

sizes_lists = st.lists(st.integers(1, 64), min_size=1, max_size=8, unique=True).map(lambda s: tuple(sorted(s)))
paddings = st.sampled_from(["always", "capped", "exact"])


@given(st.integers(1, 80), sizes_lists, paddings)
def test_the_bucket_is_the_smallest_that_the_rule_allows(raw: int, sizes: tuple[int, ...], padding: str) -> None:
    bucket = bucket_for(raw, sizes, padding, 2.0)  # type: ignore[arg-type]
    allowed = {
        "always": [s for s in sizes if s >= raw],
        "capped": [s for s in sizes if s >= raw][:1],
        "exact": [s for s in sizes if s == raw],
    }[padding]
    if padding == "capped":
        allowed = [s for s in allowed if s <= 2 * raw]
    assert bucket == min(allowed, default=None)


def flat_model(top: int = 80, contexts: tuple[int, ...] = (64, 1024)) -> LatencyModel:
    """Every size measured: graphs pay for rows and for KV tokens, eager has a floor."""
    points: list[Point] = []
    for context in contexts:
        for size in range(1, top + 1):
            graph = 100.0 + 7 * size + 0.01 * size * context
            points.append(point(size, context, "graph", graph))
            points.append(point(size, context, "eager", max(400.0, graph)))
    of = CaptureList("all", "decode", "full", tuple(range(1, top + 1)))
    return latency_model([cell_result([captured_list(of)], points)])


MODEL = flat_model()

steps_of = st.lists(
    st.tuples(st.integers(1, 80), st.floats(0.01, 100), st.sampled_from([64, 512, 1024])), min_size=1, max_size=12
)


@given(steps_of, sizes_lists, paddings)
def test_figures_follow_their_definitions(
    rows: list[tuple[int, float, int]], sizes: tuple[int, ...], padding: str
) -> None:
    steps = [Step(*row) for row in rows]
    found = Evaluator(steps, MODEL, 2.0).evaluate(sizes, padding)  # type: ignore[arg-type]
    buckets = [bucket_for(s.requests, sizes, padding, 2.0) for s in steps]  # type: ignore[arg-type]
    total = sum(s.weight for s in steps)
    served = [(s, b) for s, b in zip(steps, buckets, strict=True) if b is not None]
    assert found.coverage == pytest.approx(sum(s.weight for s, _ in served) / total)
    assert 0 <= found.coverage <= 1 + 1e-12
    if served:
        waste = sum(s.weight * (b - s.requests) for s, b in served) / sum(s.weight * b for s, b in served)
        assert found.padding_waste == pytest.approx(waste)
        assert 0 <= (found.padding_waste or 0) < 1
    else:
        assert found.padding_waste is None
    us = 0.0
    for step, bucket in zip(steps, buckets, strict=True):
        if bucket is None:
            figure = MODEL.eager(step.requests, step.context_tokens)
        else:
            figure = MODEL.replay(step.requests, bucket, step.context_tokens)
        assert figure is not None
        us += step.weight * figure.us
    assert found.expected_step_us == pytest.approx(us / total)


@given(st.integers(1, 80), st.integers(0, 20), st.sampled_from([64, 300, 1024]))
def test_padded_rows_read_no_kv(raw: int, padding: int, context: int) -> None:
    """With two contexts, a bucket serving fewer requests costs its rows and only the KV tokens of the live ones."""
    bucket = min(raw + padding, 80)
    figure = MODEL.replay(raw, bucket, context)
    assert figure is not None
    held = raw * context if raw == bucket else max(raw * context, 64 * bucket)
    assert figure.us == pytest.approx(100.0 + 7 * bucket + 0.01 * held)


def test_with_one_context_padded_rows_are_charged_as_full_ones() -> None:
    model = flat_model(8, (1024,))
    padded, full = model.replay(5, 8, 1024), model.graph(8, 1024)
    assert padded is not None and full is not None
    assert padded.us == full.us and padded.provenance == "interpolated"


def test_steps_without_a_figure_are_named_and_leave_no_average() -> None:
    found = Evaluator([Step(4, 1.0, 1024), Step(200, 1.0, 1024)], MODEL).evaluate((4, 8), "always")
    assert found.expected_step_us is None and found.provenance is None
    assert found.without_figure == (200,)


def test_steps_of_no_weight_do_not_count() -> None:
    found = Evaluator([Step(4, 1.0, 1024), Step(200, 0.0, 1024)], MODEL).evaluate((4, 8), "always")
    assert found.expected_step_us is not None and found.provenance == "measured"


def test_prefixes_of_checked_sizes_only_each_once_at_the_cheapest_setting() -> None:
    dear = CaptureList("a", "decode", "full", (1, 2, 4, 8), output="per_size", workspace="per_size")
    cheap = CaptureList("a", "decode", "full", (1, 2, 4, 8))
    other = CaptureList("b", "decode", "full", (2, 4))
    lists = [
        captured_list(dear, first_bytes=500 * MIB),
        captured_list(cheap, first_bytes=90 * MIB, failing=(8,)),
        captured_list(other, first_bytes=10 * MIB),
    ]
    memory = memory_model([cell_result(lists, [])])
    found = {c.sizes: c for c in measured_candidates(Evaluator([Step(1, 1.0, 1024)], MODEL), memory, "always")}
    assert set(found) == {(1,), (1, 2), (1, 2, 4), (1, 2, 4, 8), (2,), (2, 4)}
    by_setting = {sizes: (c.cost.of.output, c.cost.provenance) for sizes, c in found.items() if c.cost}
    assert by_setting[(1, 2, 4)] == ("shared", "bound")
    assert by_setting[(1, 2, 4, 8)] == ("per_size", "measured")
    assert by_setting[(2, 4)] == ("shared", "measured")
    assert found[(2,)].graph_bytes == found[(2, 4)].graph_bytes == 11 * MIB


def test_a_largest_size_cuts_lists() -> None:
    of = CaptureList("a", "decode", "full", (1, 2, 4, 8))
    memory = memory_model([cell_result([captured_list(of)], [])])
    found = measured_candidates(Evaluator([Step(1, 1.0, 1024)], MODEL), memory, "always", largest_size=5)
    assert {c.sizes for c in found} == {(1,), (1, 2), (1, 2, 4)}


def candidate(step_us: float, graph_bytes: int, coverage: float = 1.0, graphs: int = 3) -> Candidate:
    of = CaptureList("x", "decode", "full", tuple(range(1, graphs + 1)))
    cost = GraphCost(of, "measured", graph_bytes, (graph_bytes, graph_bytes), None, None, 1.0, ())
    return Candidate(of.sizes, cost, Evaluation(step_us, "measured", coverage, 0.0, ()))


candidates = st.lists(
    st.builds(
        candidate,
        st.floats(100, 1000),
        st.integers(0, 10),
        st.sampled_from([0.5, 0.9, 1.0]),
        st.integers(1, 4),
    ),
    max_size=10,
)


@given(candidates, st.none() | st.floats(100, 1000), st.floats(0, 0.2))
def test_the_choice_is_the_optimum_by_brute_force(lists: list[Candidate], eager_us: float | None, noise: float) -> None:
    eager = None if eager_us is None else Candidate((), None, Evaluation(eager_us, "measured", 0.0, None, ()))
    choice = choose(lists, eager, noise)
    if not lists:
        assert choice is None
        return
    assert choice is not None
    best = min(c.step_us for c in lists)
    if eager is not None and eager.step_us <= best * (1 + noise):
        assert choice.chosen is eager and not choice.ties
        return
    chosen = choice.chosen
    assert chosen in lists and chosen.step_us <= best * (1 + noise)
    for other in lists:
        if other.step_us > best * (1 + noise):
            continue
        assert chosen.evaluation.coverage >= other.evaluation.coverage
        if chosen.evaluation.coverage == other.evaluation.coverage:
            assert (chosen.graph_bytes, chosen.step_us) <= (other.graph_bytes, other.step_us)
    tied = [c for c in lists if c is not chosen and c.step_us <= best * (1 + noise)]
    assert sorted(map(id, choice.ties)) == sorted(map(id, tied))
    rest = [c for c in lists if c is not chosen]
    if rest:
        assert choice.runner_up is not None
        assert choice.runner_up.step_us == min(c.step_us for c in rest)
    else:
        assert choice.runner_up is eager


@given(candidates)
def test_the_front_beats_everything_else(lists: list[Candidate]) -> None:
    front = pareto(lists)
    for one in lists:
        beaten = [f for f in front if f.graph_bytes <= one.graph_bytes and f.step_us <= one.step_us]
        assert beaten
    for first, second in itertools.pairwise(front):
        assert first.graph_bytes < second.graph_bytes and first.step_us > second.step_us


def test_no_candidate_is_an_eager_step_when_eager_was_not_measured() -> None:
    points = [point(s, 1024, "graph", 1000.0) for s in (1, 2)]
    of = CaptureList("a", "decode", "full", (1, 2))
    model = latency_model([cell_result([captured_list(of)], points)])
    evaluator = Evaluator([Step(1, 1.0, 1024)], model)
    assert eager_candidate(evaluator) is None
    assert not math.isnan(evaluator.evaluate((1, 2), "always").expected_step_us or 0.0)
