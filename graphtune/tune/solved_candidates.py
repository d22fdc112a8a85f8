"""Candidate lists from the exact solver: the best sizes for each number of graphs.

Where bytes are not predicted, they are chosen out of each list that a sweep captured: a shorter list is known to take
at most the bytes of a measured list that contains it, so that among the sizes of one measured list bytes and seconds do
not tell lists apart. Where they are, out of all sizes that were captured and checked, for the largest of them and for
some smaller ones, since a list takes more memory the larger its top. A limit on bytes has a search of its own: for each
top the best list that is within it.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from graphtune.engines.base import Padding
from graphtune.tune.bucket_solver import MOST_GRAPHS, BestLists, StepCosts, solve, step_costs
from graphtune.tune.candidates import COVERAGE_TOLERANCE, NEAR, Candidate, Evaluator
from graphtune.tune.memory_model import MeasuredList, MemoryModel

# Stands for a step that was not measured: no list that needs it can win, and none that does is kept.
UNKNOWN_US = 1e9
# Tops beside the largest, where bytes are predicted.
TOPS = 5
# Sums that differ by less are the same: the order in which they were added up must not decide.
ROUNDING = 1e-9


def solved_candidates(
    evaluator: Evaluator,
    memory: MemoryModel,
    padding: Padding,
    *,
    cap_factor: float | None = None,
    largest_size: int | None = None,
    max_graphs: int = MOST_GRAPHS,
    max_graph_bytes: int | None = None,
    below_us: float = math.inf,
    without: frozenset[int] = frozenset(),
) -> tuple[Candidate, ...]:
    """The sizes with the least expected step for each number of graphs, where one more graph helps; with
    ``max_graph_bytes``, where bytes are predicted, also those for each top within it. Only lists whose expected step is
    below ``below_us``: predicting bytes is what takes time.

    Only sizes whose outputs were checked and passed are used, none above ``largest_size`` or in ``without``; equal
    sizes appear once.
    """
    found: dict[tuple[int, ...], Candidate] = {}
    every = tuple(size for size in checked_sizes(memory, largest_size) if size not in without)
    usable = {tuple(size for size in _checked(of, largest_size) if size not in without) for of in memory.lists}
    if not every or not evaluator.steps:
        return ()
    raw, weights, graph, eager = figures_of(evaluator, every)
    tops = TOPS if memory.predictor is not None else 0
    for sizes in [every] if memory.predictor is not None else sorted({*usable, every} - {()}):
        columns = np.searchsorted(every, sizes)
        costs = step_costs(raw, weights, sizes, graph[:, columns], eager, padding=padding, cap_factor=cap_factor)
        best = solve(costs, max_graphs)
        lists = _best_of_each(costs, best, tops, below_us)
        if max_graph_bytes is not None and memory.predictor is not None:
            lists += _within(best, memory, max_graph_bytes, below_us)
        for chosen in lists:
            if chosen in found:
                continue
            evaluation, cost = evaluator.evaluate(chosen, padding), memory.cost(chosen)
            if cost is not None and evaluation.expected_step_us is not None:
                found[chosen] = Candidate(chosen, cost, evaluation)
    return tuple(found.values())


def _within(best: BestLists, memory: MemoryModel, max_graph_bytes: int, below_us: float) -> list[tuple[int, ...]]:
    """For each top, the best list of the most graphs that helps and is within the bytes, and those tried before it: one
    more graph takes no less memory. Long lists take long to predict, so the search begins with short ones."""
    found: list[tuple[int, ...]] = []
    for top in range(1, best.expected_us.shape[1]):
        helping = _helping(best.expected_us[:, top])
        if not helping or best.expected_us[helping[-1], top] >= below_us:
            continue
        within, beyond, at = -1, len(helping), 0
        while within + 1 < beyond:
            sizes = best.sizes(helping[at], top)
            cost = memory.cost(sizes)
            if cost is not None and cost.graph_bytes <= max_graph_bytes:
                found.append(sizes)
                within = at
            else:
                beyond = at
            at = min(2 * within + 1, beyond - 1) if beyond == len(helping) else (within + beyond) // 2
    return found


def _helping(expected_us: np.ndarray) -> list[int]:
    """Numbers of graphs, from 1, of which each has a shorter expected step than all before; one figure for each number,
    that of none included."""
    least, helping = math.inf, []
    for graphs, expected in enumerate(expected_us[1:].tolist(), start=1):
        if expected < least * (1 - ROUNDING):
            least = expected
            helping.append(graphs)
    return helping


def checked_sizes(memory: MemoryModel, largest_size: int | None = None) -> tuple[int, ...]:
    """All sizes, ascending, whose outputs were checked and passed in some list that was captured whole."""
    return tuple(sorted({size for measured in memory.lists for size in _checked(measured, largest_size)}))


def _checked(measured: MeasuredList, largest_size: int | None) -> tuple[int, ...]:
    return tuple(
        size
        for size in measured.list.sizes
        if measured.serves((size,)) and (largest_size is None or size <= largest_size)
    )


def _best_of_each(costs: StepCosts, best: BestLists, tops: int, below_us: float) -> list[tuple[int, ...]]:
    """The best list for each number of graphs, the best of those whose top leaves the fewest steps above it, and the
    best up to each of ``tops`` sizes."""
    above = np.array([costs.weights[costs.raw_sizes > size].sum() for size in (0, *costs.sizes)])
    covering = above <= above.min() + COVERAGE_TOLERANCE
    found: dict[tuple[int, ...], None] = {}
    limits = {round(at * len(costs.sizes) / (tops + 1)) for at in range(1, tops + 1)} - {0}
    up_to = [np.arange(len(covering)) <= limit for limit in sorted(limits)]
    for allowed in (np.ones_like(covering), covering, *up_to):
        expected = np.where(allowed, best.expected_us, np.inf)
        least = expected.min(axis=1)
        for graphs in _helping(least):
            if least[graphs] < below_us:
                top = int(np.argmax(expected[graphs] <= least[graphs] * (1 + ROUNDING)))
                found[best.sizes(graphs, top)] = None
    # One graph of another size may be as good within what counts and take fewer bytes.
    alone = best.expected_us[1]
    for top in np.flatnonzero(alone <= min(alone.min() * (1 + NEAR), below_us)).tolist():
        found[best.sizes(1, top)] = None
    return list(found)


def figures_of(evaluator: Evaluator, sizes: tuple[int, ...]) -> tuple[list[int], list[float], np.ndarray, list[float]]:
    """Raw sizes, their weights, and the mean step over their contexts in each size (n, m) and eager (n)."""
    model = evaluator.model
    by_raw = defaultdict(list)
    for step in evaluator.steps:
        by_raw[step.requests].append(step)
    raw = sorted(by_raw)
    weights = [sum(step.weight for step in by_raw[n]) for n in raw]
    graph = np.full((len(raw), len(sizes)), UNKNOWN_US)
    eager = []
    for row, requests in enumerate(raw):
        contexts = [(step.context_tokens, step.weight / weights[row]) for step in by_raw[requests]]
        for column, size in enumerate(sizes):
            if size >= requests:
                figures = [(model.step(requests, size, context), share) for context, share in contexts]
                graph[row, column] = sum(UNKNOWN_US if one is None else one.us * share for one, share in figures)
        alone = [(model.step(requests, None, context), share) for context, share in contexts]
        eager.append(sum(UNKNOWN_US if one is None else one.us * share for one, share in alone))
    return raw, weights, graph, eager
