"""Solved lists against every subset of the measured ones."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtune.engines.base import Padding
from graphtune.results import CaptureList
from graphtune.tune.candidates import Evaluator, pareto
from graphtune.tune.latency_model import LatencyModel, latency_model
from graphtune.tune.memory_model import MemoryModel, memory_model
from graphtune.tune.solved_candidates import checked_sizes, solved_candidates
from graphtune.tune.step_table import Step
from tests.synthetic import MIB, captured_list, cell_result, h200_sweep, latency_points
from tests.tune.test_memory_prediction import gpu_cells

SIZES = (1, 2, 4, 6, 8, 12, 16)


def capture_list(sizes: tuple[int, ...]) -> CaptureList:
    return CaptureList(
        name=f"of {len(sizes)}",
        phase="decode",
        backend="full",
        sizes=sizes,
        order="descending",
        output="shared",
        workspace="shared",
    )


def measured(*lists: tuple[int, ...], failing: tuple[int, ...] = ()) -> tuple[LatencyModel, MemoryModel]:
    points = [*latency_points(SIZES, 1024), *latency_points(SIZES, 256)]
    cells = [cell_result([captured_list(capture_list(sizes), failing=failing) for sizes in lists], points)]
    return latency_model(cells), memory_model(cells)


def some_steps(seed: int) -> list[Step]:
    rng = random.Random(seed)
    return [Step(rng.randint(1, 16), rng.uniform(0.1, 3), rng.choice([256.0, 700.0, 1024.0])) for _ in range(9)]


@pytest.mark.parametrize("padding", ["always", "exact"])
@pytest.mark.parametrize("seed", range(5))
def test_no_subset_of_a_measured_list_is_better(padding: Padding, seed: int) -> None:
    model, memory = measured(SIZES, (1, 4, 16))
    evaluator = Evaluator(some_steps(seed), model)
    for most in (1, 2, 3, 7):
        found = solved_candidates(evaluator, memory, padding, max_graphs=most)
        every = [evaluator.evaluate(some, padding) for k in range(1, most + 1) for some in combinations(SIZES, k)]
        least = min(one.expected_step_us for one in every if one.expected_step_us is not None)
        assert min(candidate.step_us for candidate in found) == pytest.approx(least)
        assert all(len(candidate.sizes) <= most for candidate in found)
        assert len({candidate.sizes for candidate in found}) == len(found)


def test_bytes_are_those_of_the_smallest_list_that_contains_them() -> None:
    model, memory = measured(SIZES, (1, 4, 16))
    found = solved_candidates(Evaluator(some_steps(1), model), memory, "always")
    for candidate in found:
        assert candidate.cost == memory.cost(candidate.sizes)
    assert {candidate.cost.provenance for candidate in found if candidate.cost} == {"measured", "bound"}


def test_sizes_that_failed_or_are_too_large_are_not_used() -> None:
    model, memory = measured(SIZES, failing=(8,))
    found = solved_candidates(Evaluator(some_steps(2), model), memory, "always", largest_size=12)
    used = {size for candidate in found for size in candidate.sizes}
    assert used and 8 not in used and max(used) <= 12


def test_without_lists_or_steps_there_is_nothing_to_solve() -> None:
    model, memory = measured(SIZES)
    assert solved_candidates(Evaluator([], model), memory, "always") == ()
    assert solved_candidates(Evaluator(some_steps(3), model), MemoryModel((), ()), "always") == ()


@cache
def predicted() -> tuple[LatencyModel, MemoryModel]:
    of = h200_sweep()
    return latency_model(of.cells), memory_model((*of.cells, *gpu_cells(1.0)))


def test_with_predicted_bytes_smaller_tops_are_candidates_too() -> None:
    model, memory = predicted()
    evaluator = Evaluator([Step(n, 1.0, 1024.0) for n in range(1, 257)], model)
    found = solved_candidates(evaluator, memory, "always")
    assert {candidate.cost.provenance for candidate in found if candidate.cost} <= {"predicted", "measured"}
    tops = sorted({candidate.sizes[-1] for candidate in found})
    assert len(tops) >= 5 and tops[-1] == 256
    front = pareto(found)
    assert len({candidate.graph_bytes for candidate in front}) > 5


@given(st.integers(8, 160), st.integers(40, 256))
@settings(max_examples=15, deadline=None)
def test_a_limit_on_bytes_has_lists_that_use_it(limit_mib: int, most: int) -> None:
    """Wherever one size alone is within the limit there is a list, and none of one size is faster than the best."""
    model, memory = predicted()
    evaluator = Evaluator([Step(n, 1.0, 1024.0) for n in range(1, most + 1)], model)
    found = solved_candidates(evaluator, memory, "always", max_graph_bytes=limit_mib * MIB)
    within = [one for one in found if one.graph_bytes <= limit_mib * MIB]
    alone = [
        evaluator.evaluate((size,), "always").expected_step_us
        for size in checked_sizes(memory)
        if (cost := memory.cost((size,))) is not None and cost.graph_bytes <= limit_mib * MIB
    ]
    steps = [us for us in alone if us is not None]
    assert bool(steps) <= bool(within)
    assert not steps or min(one.step_us for one in within) <= min(steps) * (1 + 1e-9)


def test_lists_that_cannot_be_fast_enough_are_not_priced() -> None:
    model, memory = measured(SIZES)
    evaluator = Evaluator(some_steps(4), model)
    every = solved_candidates(evaluator, memory, "always")
    least = min(one.step_us for one in every)
    fewer = solved_candidates(evaluator, memory, "always", below_us=least * 1.05)
    assert {one.sizes for one in fewer} == {one.sizes for one in every if one.step_us < least * 1.05}
    assert solved_candidates(evaluator, memory, "always", below_us=least) == ()
