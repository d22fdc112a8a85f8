from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.engines.base import Padding
from graphtune.plan import PaddedTo
from graphtune.results import CaptureList, Point
from graphtune.tune.candidates import (
    COVERAGE_TOLERANCE,
    Candidate,
    Evaluation,
    Evaluator,
    break_even_us,
    bucket_for,
    buckets_for,
    choose,
    covering_most,
    eager_candidate,
    measured_candidates,
    pareto,
    ratio,
)
from graphtune.tune.latency_model import LatencyModel, latency_model
from graphtune.tune.memory_model import GraphCost, memory_model
from graphtune.tune.step_table import EAGER, Step
from tests.synthetic import MIB, captured_list, cell_result, padded_points, point

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


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), sizes_lists, paddings)
def test_buckets_of_many_steps_are_those_of_each(raws: list[int], sizes: tuple[int, ...], padding: Padding) -> None:
    found = buckets_for(np.array(raws), sizes, padding, 2.0)
    assert found.tolist() == [bucket_for(raw, sizes, padding, 2.0) or EAGER for raw in raws]


def flat_model(top: int = 80, contexts: tuple[int, ...] = (64, 1024), *, padded: bool = True) -> LatencyModel:
    """Every size measured: graphs pay for rows and for the KV tokens of live ones, eager has a floor."""

    def graph_us(raw: int, bucket: int, context: int) -> float:
        return 100.0 + 7 * bucket + 0.01 * raw * context

    points: list[Point] = []
    for context in contexts:
        for size in range(1, top + 1):
            points.append(point(size, context, "graph", graph_us(size, size, context)))
            points.append(point(size, context, "eager", max(400.0, graph_us(size, size, context))))
    if padded:
        every = [PaddedTo(raw, tuple(range(raw + 1, top + 1))) for raw in (1, 2, 16, 64) if raw < top]
        host_us = 90.0  # of every synthetic step
        points += padded_points(every, 1024, lambda raw, bucket: graph_us(raw, bucket, 1024) - host_us)
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


@given(st.integers(1, 80), st.integers(0, 40), st.sampled_from([64, 300, 1024]))
def test_padded_rows_read_no_kv(raw: int, padding: int, context: int) -> None:
    """A bucket serving fewer requests costs its rows and only the KV tokens of the live ones, at every context."""
    bucket = min(raw + padding, 80)
    figure = MODEL.replay(raw, bucket, context)
    assert figure is not None
    assert figure.us == pytest.approx(100.0 + 7 * bucket + 0.01 * raw * context)
    assert (figure.provenance == "measured") == (bucket == raw and context != 300)


def test_without_padded_steps_padded_rows_are_charged_as_full_ones() -> None:
    model = flat_model(8, padded=False)
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


def candidate(by_process: tuple[float, ...], graph_bytes: int, coverage: float = 1.0, graphs: int = 3) -> Candidate:
    of = CaptureList("x", "decode", "full", tuple(range(1, graphs + 1)))
    cost = GraphCost(of, "measured", graph_bytes, (graph_bytes, graph_bytes), None, None, 1.0, ())
    return Candidate(of.sizes, cost, evaluation(by_process, coverage))


def evaluation(by_process: tuple[float, ...], coverage: float) -> Evaluation:
    step_us = math.prod(by_process) ** (1 / len(by_process))
    return Evaluation(step_us, "measured", coverage, 0.0, (), dict(enumerate(by_process)))


def choices(processes: int) -> st.SearchStrategy[tuple[list[Candidate], Candidate | None]]:
    """Lists and eager whose processes agree more or less, and differ in pace."""
    paces = st.lists(st.floats(0.2, 5), min_size=processes, max_size=processes)
    steps = st.tuples(st.floats(100, 130), st.lists(st.floats(0.97, 1.03), min_size=processes, max_size=processes))

    def build(pace: list[float], rows: list[Any], eager: Any) -> tuple[list[Candidate], Candidate | None]:
        def by(step: Any) -> tuple[float, ...]:
            return tuple(step[0] * one * p for one, p in zip(step[1], pace, strict=True))

        lists = [candidate(by(step), *rest) for step, *rest in rows]
        return lists, None if eager is None else Candidate((), None, evaluation(by(eager), 0.0))

    row = st.tuples(steps, st.integers(0, 10), st.sampled_from([0.5, 0.9, 1.0]), st.integers(1, 4))
    return st.builds(build, paces, st.lists(row, max_size=8), st.none() | steps)


cases = st.one_of(choices(1), choices(2), choices(3))


def is_faster(one: Candidate, other: Candidate) -> bool:
    """By its definition: the gain exceeds 1 % and the disagreement about the ratio, in every process."""
    first, second = one.evaluation.by_process, other.evaluation.by_process
    ratios = [first[p] / second[p] for p in first]
    combined = one.step_us / other.step_us
    return all(1 - r > max(0.01, max(ratios) - min(ratios)) for r in [*ratios, combined])


def is_slower(one: Candidate, other: Candidate) -> bool:
    """The same of a loss."""
    first, second = one.evaluation.by_process, other.evaluation.by_process
    ratios = [first[p] / second[p] for p in first]
    combined = one.step_us / other.step_us
    return all(r - 1 > max(0.01, max(ratios) - min(ratios)) for r in [*ratios, combined])


@given(cases)
def test_the_choice_is_the_optimum_by_brute_force(case: tuple[list[Candidate], Candidate | None]) -> None:
    lists, eager = case
    choice = choose(lists, eager)
    if not lists:
        assert choice is None
        return
    assert choice is not None
    paying = [c for c in lists if eager is None or is_faster(c, eager)]
    assert choice.within_noise == (not paying and choice.chosen is not eager)
    if not paying and eager is not None:
        most = max(c.evaluation.coverage for c in lists) - COVERAGE_TOLERANCE
        as_fast = [c for c in lists if c.evaluation.coverage >= most and not is_slower(c, eager)]
        paying = [c for c in lists if c.step_us < eager.step_us or c in as_fast]
    if not paying:
        assert choice.chosen is eager and not choice.ties
        assert choice.runner_up is not None and eager is not None
        waits = [us for c in lists if (us := break_even_us(c, eager)) is not None]
        assert break_even_us(choice.runner_up, eager) == min(waits)
        return
    best = min(paying, key=lambda c: (c.step_us, c.graph_bytes))
    tied = [c for c in paying if not is_faster(best, c)]
    chosen = choice.chosen
    assert chosen in tied
    assert all(chosen.evaluation.coverage >= other.evaluation.coverage - COVERAGE_TOLERANCE for other in tied)
    covering = covering_most(tied)
    near = [c for c in covering if c.step_us <= min(other.step_us for other in covering) * 1.005]
    assert chosen in near
    assert all((chosen.graph_bytes, len(chosen.sizes)) <= (other.graph_bytes, len(other.sizes)) for other in near)
    assert sorted(map(id, choice.ties)) == sorted(id(c) for c in tied if c is not chosen)
    worth = [c for c in lists if c.step_us < chosen.step_us or c.graph_bytes < chosen.graph_bytes]
    if worth:
        assert choice.runner_up is not None
        assert choice.runner_up.step_us == min(c.step_us for c in worth)
    else:
        assert choice.runner_up is eager


@given(cases, st.floats(0.1, 10))
def test_a_process_that_is_slower_at_everything_changes_no_choice(
    case: tuple[list[Candidate], Candidate | None], factor: float
) -> None:
    lists, eager = case

    def slowed(of: Candidate) -> Candidate:
        by = of.evaluation.by_process
        return replace(of, evaluation=evaluation((by[0] * factor, *list(by.values())[1:]), of.evaluation.coverage))

    one, other = choose(lists, eager), choose(list(map(slowed, lists)), eager and slowed(eager))
    assert (one is None) == (other is None)
    if one is not None and other is not None and not _close_call(lists, eager):
        assert other.chosen == slowed(one.chosen)
        assert list(other.ties) == list(map(slowed, one.ties))


def _close_call(lists: list[Candidate], eager: Candidate | None) -> bool:
    """True when two figures are equal but for rounding, so that scaling may turn them round."""
    everything = [*lists, *([eager] if eager else [])]
    for one, other in itertools.combinations(everything, 2):
        r = ratio(one, other)
        back = ratio(other, one)
        margins = [1 - x - r.tolerance for x in r.by_process] + [1 - x - back.tolerance for x in back.by_process]
        if min(map(abs, [*margins, 1 - r.combined])) < 1e-9:
            return True
    return False


@given(cases)
def test_break_even_is_where_the_list_starts_to_pay(case: tuple[list[Candidate], Candidate | None]) -> None:
    lists, eager = case
    choice = choose(lists, eager)
    if choice is None or eager is None or choice.chosen is not eager:
        return
    best = choice.runner_up
    assert best is not None
    more = break_even_us(best, eager)
    assert more is not None and more > 0
    covered = best.evaluation.coverage

    def pays(extra_us: float) -> bool:
        mine, theirs = best.evaluation.by_process, eager.evaluation.by_process
        ratios = [(mine[p] + (1 - covered) * extra_us) / (theirs[p] + extra_us) for p in mine]
        return all(1 - one > max(0.01, max(ratios) - min(ratios)) for one in ratios)

    assert pays(more + 1e-6) and not pays(max(0.0, more - 0.2))


@given(cases)
def test_the_front_beats_everything_else(case: tuple[list[Candidate], Candidate | None]) -> None:
    lists, _ = case
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
