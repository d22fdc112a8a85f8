"""The solver against every list there is, on instances small enough to try them all."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.engines.base import Padding
from graphtune.errors import InputError
from graphtune.tune.bucket_solver import (
    BYTES_UNIT,
    BestLists,
    FrontPoint,
    StepCosts,
    front,
    merged,
    solve,
    solve_within,
    step_costs,
    whole_units,
)

INSTANCES = 1000


@dataclass
class Instance:
    """Made-up traffic and figures, with the rules of a made-up engine."""

    raw: np.ndarray
    weights: np.ndarray
    sizes: np.ndarray
    graph_us: np.ndarray
    eager_us: np.ndarray
    padding: Padding
    cap_factor: float | None
    alignment: int

    @property
    def costs(self) -> StepCosts:
        return step_costs(
            self.raw,
            self.weights,
            self.sizes,
            self.graph_us,
            self.eager_us,
            padding=self.padding,
            cap_factor=self.cap_factor,
            alignment=self.alignment,
        )

    def allowed(self) -> list[int]:
        return [int(size) for size in self.sizes if size % self.alignment == 0]

    def step_us(self, raw_at: int, captured: tuple[int, ...]) -> float:
        """One step from the words of the dispatch, not from the solver's arrays."""
        raw = int(self.raw[raw_at])
        bucket = min((size for size in captured if size >= raw), default=None)
        if bucket is None:
            return float(self.eager_us[raw_at])
        if self.padding == "exact" and bucket != raw:
            return float(self.eager_us[raw_at])
        if self.padding == "capped" and self.cap_factor is not None and bucket > self.cap_factor * raw:
            return float(self.eager_us[raw_at])
        at = list(self.sizes).index(bucket)
        return float(self.graph_us[at] if self.graph_us.ndim == 1 else self.graph_us[raw_at, at])

    def every_list(self) -> dict[tuple[int, ...], float]:
        """The expected step of every subset of the candidates."""
        sizes = np.array(self.allowed(), dtype=np.int64)
        count = len(sizes)
        chosen = (np.arange(2**count)[:, None] >> np.arange(count)) & 1 == 1
        total = np.zeros(2**count)
        for at, raw in enumerate(self.raw):
            reached = chosen & (sizes >= raw)
            first = np.where(reached.any(axis=1), reached.argmax(axis=1) if count else 0, count)
            by_next = [self.step_us(at, (int(size),)) if size >= raw else np.nan for size in sizes]
            total += self.weights[at] * np.array([*by_next, self.eager_us[at]])[first]
        lists = [tuple(sizes[row].tolist()) for row in chosen]
        return dict(zip(lists, (total / self.weights.sum()).tolist(), strict=True))


def made_up(seed: int) -> Instance:
    rng = np.random.default_rng(seed)
    most = int(rng.choice([1, 3, 5, 7, 8, 9, 12], p=[0.05, 0.1, 0.2, 0.25, 0.2, 0.15, 0.05]))
    sizes = np.sort(rng.choice(np.arange(1, 3 * most + 1), size=most, replace=False))
    raw = np.sort(rng.choice(np.arange(1, 3 * most + 4), size=int(rng.integers(1, most + 3)), replace=False))
    shape = (len(raw), most) if rng.random() < 0.3 else (most,)
    graph = rng.integers(1, 40, size=shape).astype(float)
    if rng.random() < 0.6:
        graph = np.sort(graph, axis=-1)
    eager = rng.integers(1, 80, size=len(raw)).astype(float)
    weights = rng.integers(0, 5, size=len(raw)).astype(float)
    weights[rng.integers(len(raw))] += 1
    padding = cast(Padding, rng.choice(["always", "capped", "exact"]))
    cap = float(rng.choice([1.0, 1.5, 2.0])) if padding == "capped" else None
    return Instance(raw, weights, sizes, graph, eager, padding, cap, int(rng.choice([1, 1, 1, 2, 3])))


def test_every_number_of_graphs_and_top_is_optimal() -> None:
    halved = 0
    for seed in range(INSTANCES):
        instance = made_up(seed)
        costs, lists = instance.costs, instance.every_list()
        best = solve(costs)
        halved += costs.grows_with_size
        found = {}
        for graphs, top in zip(*np.nonzero(np.isfinite(best.expected_us)), strict=True):
            sizes = best.sizes(graphs, top)
            assert len(sizes) == graphs
            assert costs.expected_us(sizes) == pytest.approx(lists[sizes], abs=1e-9)
            assert best.expected_us[graphs, top] == pytest.approx(lists[sizes], abs=1e-9)
            found[len(sizes), max(sizes, default=0)] = lists[sizes]
        least: dict[tuple[int, int], float] = {}
        for sizes, us in lists.items():
            key = (len(sizes), max(sizes, default=0))
            least[key] = min(us, least.get(key, np.inf))
        assert found == pytest.approx(least, abs=1e-9), seed
        limit = int(np.random.default_rng(seed).integers(0, 5))
        assert solve(costs, limit).best()[0] == pytest.approx(
            min(us for sizes, us in lists.items() if len(sizes) <= limit), abs=1e-9
        )
    assert 200 < halved < 800, "both ways of solving have to be tried"


def test_every_budget_is_optimal() -> None:
    for seed in range(INSTANCES):
        instance = made_up(seed)
        rng = np.random.default_rng(seed + INSTANCES)
        costs, lists = instance.costs, instance.every_list()
        units = rng.integers(0, 6, size=len(costs.sizes))
        of = dict(zip(costs.sizes.tolist(), units.tolist(), strict=True))
        budget, limit = int(rng.integers(0, 16)), int(rng.choice([1, 2, 3, 128]))
        found = solve_within(costs, units, budget, limit)
        for left in range(budget + 1):
            chosen = found.sizes(left)
            assert len(chosen) <= limit and sum(of[size] for size in chosen) <= left
            fitting = [us for s, us in lists.items() if len(s) <= limit and sum(of[size] for size in s) <= left]
            assert lists[chosen] == pytest.approx(min(fitting), abs=1e-9), seed
            assert found.expected_us[left] == pytest.approx(min(fitting), abs=1e-9)


def priced(seed: int) -> tuple[BestLists, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    best = solve(made_up(seed).costs)
    shape = best.expected_us.shape
    return best, rng.integers(0, 9, size=shape).astype(float), rng.integers(0, 9, size=shape).astype(float)


@given(st.integers(0, 10_000))
def test_front_is_what_nothing_dominates(seed: int) -> None:
    best, amounts, seconds = priced(seed)
    points = [
        (float(best.expected_us[at]), float(amounts[at]), float(seconds[at]))
        for at in zip(*np.nonzero(np.isfinite(best.expected_us)), strict=True)
    ]

    def beaten(point: tuple[float, float, float]) -> bool:
        return any(o != point and all(a <= b for a, b in zip(o, point, strict=True)) for o in points)

    found = front(best, amounts, seconds)
    figures = [(p.expected_us, p.graph_bytes, p.capture_s) for p in found]
    assert sorted(figures) == sorted({point for point in points if not beaten(point)})
    assert all(a.expected_us <= b.expected_us for a, b in pairwise(found))
    assert all(p.expected_us == pytest.approx(best.costs.expected_us(p.sizes)) for p in found)


def test_padding_off_joins_the_front_only_where_it_is_better() -> None:
    raw, sizes = [1, 2, 3, 4], [1, 2, 3, 4]
    graph, eager = [10.0, 11.0, 30.0, 31.0], [20.0, 20.0, 20.0, 40.0]

    def of(padding: Padding) -> tuple[FrontPoint, ...]:
        best = solve(step_costs(raw, [1, 1, 1, 1], sizes, graph, eager, padding=padding))
        graphs = np.arange(best.max_graphs + 1)[:, None] + np.zeros(len(sizes) + 1)
        return front(best, graphs, np.zeros_like(graphs), padding)

    both = merged(of("always"), of("exact"))
    assert both[0].padding == "exact" and both[0].sizes == (1, 2, 4), "three requests run faster eager"
    assert both[0].expected_us == (10 + 11 + 20 + 31) / 4
    assert both[-1].sizes == () and both[-1].padding == "always", "equal in everything: the earlier one stays"


def test_noise_in_the_figures_is_noticed() -> None:
    smooth = step_costs([1, 2], [1, 1], [1, 2], [5.0, 6.0], [9.0, 9.0])
    rough = step_costs([1, 2], [1, 1], [1, 2], [6.0, 5.0], [9.0, 9.0])
    assert smooth.grows_with_size and not rough.grows_with_size
    assert solve(rough).best() == (5.0, (2,))


def test_units_are_rounded_up_so_that_a_budget_holds() -> None:
    assert whole_units([0, 1, BYTES_UNIT, BYTES_UNIT + 1], BYTES_UNIT).tolist() == [0, 1, 1, 2]
    assert whole_units([0.1, 0.3, 0.31], 0.1).tolist() == [1, 3, 4]


def test_no_sizes_leave_eager() -> None:
    costs = step_costs([3], [1.0], [], [], [7.0])
    assert solve(costs).best() == (7.0, ())
    assert solve_within(costs, [], 4).sizes() == ()


def test_figures_per_raw_size_are_used() -> None:
    costs = step_costs([1, 2], [1, 1], [2], [[4.0], [6.0]], [9.0, 9.0])
    assert solve(costs).best() == (5.0, (2,))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"raw_sizes": [2, 1]}, "raw sizes must be whole numbers that ascend"),
        ({"sizes": [0, 2]}, "sizes must be whole numbers that ascend from at least 1"),
        ({"weights": [1.0, -1.0]}, "weights must be numbers of at least 0"),
        ({"weights": [0.0, 0.0]}, "not all 0"),
        ({"weights": [1.0]}, "1 weights"),
        ({"graph_us": [1.0, float("nan")]}, "graph times must be finite"),
        ({"graph_us": [1.0]}, "fit neither sizes"),
        ({"eager_us": [1.0, float("inf")]}, "eager times must be finite"),
        ({"padding": "capped"}, "cap factor"),
        ({"alignment": 0}, "alignment of 0"),
    ],
)
def test_senseless_input_is_refused(change: dict[str, object], says: str) -> None:
    given_: dict[str, object] = {
        "raw_sizes": [1, 2],
        "weights": [1.0, 1.0],
        "sizes": [1, 2],
        "graph_us": [3.0, 4.0],
        "eager_us": [9.0, 9.0],
    }
    with pytest.raises(InputError, match=says):
        step_costs(**{**given_, **change})  # type: ignore[arg-type]


def test_senseless_questions_are_refused() -> None:
    costs = step_costs([1], [1.0], [1], [3.0], [9.0])
    for ask in (
        lambda: solve(costs, -1),
        lambda: solve(costs).sizes(1, 0),
        lambda: solve_within(costs, [1, 2], 3),
        lambda: solve_within(costs, [1], -1),
        lambda: costs.expected_us((2,)),
        lambda: front(solve(costs), [[0.0]], [[0.0]]),
        lambda: whole_units([-1.0], 0.1),
    ):
        with pytest.raises(InputError):
            ask()
