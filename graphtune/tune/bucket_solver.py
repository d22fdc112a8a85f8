"""The list of capture sizes with the least expected step time, exactly, under an engine's dispatch.

A step of ``raw`` rows is served by the smallest captured size at or above it, its *next size*. What that costs depends
on ``raw`` and the next size alone: the replay where the engine takes the graph, the eager step where its padding rule
refuses it (a hole). Above the largest captured size everything is eager. So the expected step of a list is a sum over
neighbouring sizes, and the best list with ``k`` graphs up to each top follows from the best ones with ``k - 1``:

    best[k, top] = min over below < top of best[k - 1, below] + sum of p(raw) * us(raw, top), below < raw <= top

Where no raw size is served faster by a larger next size (checked on the figures), these sums are Monge: the best
``below`` never falls as ``top`` grows, and each of the ``k`` layers takes O(m log m) steps by divide and conquer over
``m`` candidate sizes. Otherwise, as with noisy figures, each layer looks at all O(m^2) pairs.

What a list costs is priced in one of two ways. Where bytes and seconds depend on the number of graphs and the top only,
``front`` is the whole non-dominated set. Where every size retains its own bytes (or seconds), ``solve_within`` is exact
for one budget, in whole units (2 MiB, 0.1 s; every size rounded up).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from graphtune.engines.base import Padding, replays
from graphtune.errors import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_GRAPHS = 128
BYTES_UNIT = 2 << 20
SECONDS_UNIT = 0.1
# Rows of the pair matrix that are looked at together when all pairs are: about as much as fits a cache.
_BLOCK_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class StepCosts:
    """What each step costs by the captured size next to it.

    ``raw_sizes`` (n, ascending) with ``weights`` (n, positive, adding up to 1); ``sizes`` (m, ascending) may be
    captured. ``step_us[raw, size]`` (n, m) is the step when that size is the next one (meaningless where the size is
    smaller), ``eager_us`` (n) the eager step. Rows are in the unit that the engine dispatches in.
    """

    raw_sizes: Ints
    weights: Floats
    sizes: Ints
    step_us: Floats
    eager_us: Floats

    @property
    def expected_eager_us(self) -> float:
        """The expected step without any graph."""
        return float(self.weights @ self.eager_us)

    @cached_property
    def grows_with_size(self) -> bool:
        """True when no raw size is served faster by a larger next size: the sums are then Monge."""
        holds = self.raw_sizes[:, None] <= self.sizes[None, :-1]
        return bool(np.all((self.step_us[:, 1:] >= self.step_us[:, :-1]) | ~holds))

    @cached_property
    def above_us(self) -> Floats:
        """(m + 1): part of the expected step that is above the top: entry t for the t-th size, 0 for no graph."""
        eager = np.concatenate([[0.0], np.cumsum((self.weights * self.eager_us)[::-1])])[::-1]
        return eager[self._reached]

    @cached_property
    def between_us(self) -> Floats:
        """(m, m + 1): entry [top, below] is the part of the expected step above the below-th size (0: none) and up to
        ``sizes[top]``; infinite where below is not smaller."""
        sums = np.zeros((len(self.sizes), len(self.raw_sizes) + 1))
        np.cumsum((self.weights[:, None] * self.step_us).T, axis=1, out=sums[:, 1:])
        upto = np.take_along_axis(sums, self._reached[1:, None], axis=1)
        found = np.ascontiguousarray(upto - sums[:, self._reached])
        found[np.arange(len(self.sizes) + 1)[None, :] > np.arange(len(self.sizes))[:, None]] = np.inf
        return found

    @cached_property
    def _reached(self) -> Ints:
        """(m + 1): how many raw sizes are at most the t-th size; 0 for none."""
        return np.concatenate([[0], np.searchsorted(self.raw_sizes, self.sizes, side="right")])

    def expected_us(self, captured: tuple[int, ...]) -> float:
        """The expected step of one list, from the definition. Raises InputError for a size not in ``sizes``."""
        columns = np.searchsorted(self.sizes, captured)
        if any(at == len(self.sizes) or self.sizes[at] != size for at, size in zip(columns, captured, strict=True)):
            raise InputError(f"{list(captured)} holds a size that is no candidate")
        following = np.searchsorted(np.asarray(captured, dtype=np.int64), self.raw_sizes)
        total = 0.0
        for raw, after in enumerate(following):
            us = self.eager_us[raw] if after == len(captured) else self.step_us[raw, columns[after]]
            total += float(self.weights[raw] * us)
        return total


def step_costs(
    raw_sizes: ArrayLike,
    weights: ArrayLike,
    sizes: ArrayLike,
    graph_us: ArrayLike,
    eager_us: ArrayLike,
    *,
    padding: Padding = "always",
    cap_factor: float | None = None,
    alignment: int = 1,
) -> StepCosts:
    """Costs under an engine's dispatch.

    ``graph_us`` is the replay of each size (m), or of each raw size in each size (n, m); ``eager_us`` (n) the eager
    step. ``capped`` refuses a size above ``cap_factor`` times the raw one, ``exact`` all but equal sizes; both then run
    eager. Sizes that are no multiple of ``alignment`` are no candidates. Raw sizes of no weight are left out. Raises
    InputError for shapes that do not fit, sizes that do not ascend from 1, or figures that are no finite times.
    """
    raw, size = _ascending(raw_sizes, "raw sizes"), _ascending(sizes, "sizes")
    weight, eager = np.asarray(weights, dtype=float), np.asarray(eager_us, dtype=float)
    graph = np.asarray(graph_us, dtype=float)
    if weight.shape != raw.shape or eager.shape != raw.shape:
        raise InputError(f"{len(raw)} raw sizes, {weight.size} weights and {eager.size} eager times do not fit")
    if graph.shape not in (size.shape, (len(raw), len(size))):
        raise InputError(f"graph times of shape {graph.shape} fit neither sizes nor raw sizes by sizes")
    if not np.all(np.isfinite(weight)) or np.any(weight < 0) or not weight.sum() > 0:
        raise InputError("weights must be numbers of at least 0, not all 0")
    for figures, name in ((graph, "graph"), (eager, "eager")):
        if not np.all(np.isfinite(figures)) or np.any(figures < 0):
            raise InputError(f"{name} times must be finite and at least 0")
    if padding == "capped" and (cap_factor is None or not cap_factor >= 1):
        raise InputError(f"a cap factor of {cap_factor} caps nothing sensibly", action="Give at least 1.")
    if alignment < 1:
        raise InputError(f"an alignment of {alignment} makes no sense", action="Give at least 1.")
    kept, aligned = weight > 0, size % alignment == 0
    raw, weight, eager = raw[kept], weight[kept], eager[kept]
    size = size[aligned]
    graph = graph[aligned] if graph.ndim == 1 else graph[np.ix_(kept, aligned)]
    replayed = replays(raw[:, None], size[None, :], padding, cap_factor)
    taken = np.where(replayed, np.broadcast_to(graph, (len(raw), len(size))), eager[:, None])
    return StepCosts(raw, weight / weight.sum(), size, np.ascontiguousarray(taken), eager)


def _ascending(values: ArrayLike, name: str) -> Ints:
    found = np.asarray(values, dtype=np.int64)
    if found.ndim != 1 or np.any(np.diff(found) <= 0) or (len(found) and found[0] < 1):
        raise InputError(f"{name} must be whole numbers that ascend from at least 1")
    return found


@dataclass(frozen=True)
class BestLists:
    """The best list for every number of graphs and every top.

    ``expected_us[k, t]`` is the least expected step with exactly ``k`` graphs of which the t-th candidate (from 1) is
    the largest; infinite where there is no such list. ``[0, 0]`` is no graph at all.
    """

    costs: StepCosts
    expected_us: Floats
    _below: NDArray[np.int32]

    @property
    def max_graphs(self) -> int:
        return len(self.expected_us) - 1

    def sizes(self, graphs: int, top: int) -> tuple[int, ...]:
        """The best list with that many graphs whose largest is the top-th candidate, ascending."""
        if not np.isfinite(self.expected_us[graphs, top]):
            raise InputError(f"there is no list of {graphs} sizes up to candidate {top}")
        found = []
        while graphs:
            found.append(int(self.costs.sizes[top - 1]))
            graphs, top = graphs - 1, int(self._below[graphs, top])
        return tuple(reversed(found))

    def best(self, max_graphs: int | None = None) -> tuple[float, tuple[int, ...]]:
        """The least expected step with at most ``max_graphs`` graphs, and the shortest list that gives it."""
        table = self.expected_us[: None if max_graphs is None else max_graphs + 1]
        graphs, top = np.unravel_index(int(np.argmin(table)), table.shape)
        return float(table[graphs, top]), self.sizes(int(graphs), int(top))


def solve(costs: StepCosts, max_graphs: int = MOST_GRAPHS) -> BestLists:
    """The best list for every number of graphs up to ``max_graphs`` and every top."""
    if max_graphs < 0:
        raise InputError(f"{max_graphs} graphs make no sense", action="Give at least 0.")
    count = len(costs.sizes)
    layers = min(max_graphs, count)
    served = np.full((layers + 1, count + 1), np.inf)
    served[0, 0] = 0.0
    below = np.zeros((layers + 1, count + 1), dtype=np.int32)
    for graphs in range(1, layers + 1):
        least, at = _next_layer(served[graphs - 1 : graphs], costs)
        served[graphs, 1:], below[graphs, 1:] = least[0], at[0]
    return BestLists(costs, served + costs.above_us, below)


@dataclass(frozen=True)
class FrontPoint:
    """A list that no other beats in expected step, bytes and seconds at once. ``padding`` is the dispatch it is for."""

    sizes: tuple[int, ...]
    expected_us: float
    graph_bytes: float
    capture_s: float
    padding: Padding = "always"


def front(
    best: BestLists, graph_bytes: ArrayLike, capture_s: ArrayLike, padding: Padding = "always"
) -> tuple[FrontPoint, ...]:
    """All non-dominated lists, fastest first, where bytes and seconds depend on the number of graphs and the top only.

    ``graph_bytes`` and ``capture_s`` have the shape of ``best.expected_us``. Of lists that are equal in all three, the
    one with fewer graphs stays.
    """
    shape = best.expected_us.shape
    amounts, seconds = np.asarray(graph_bytes, dtype=float), np.asarray(capture_s, dtype=float)
    if amounts.shape != shape or seconds.shape != shape:
        raise InputError(f"bytes of shape {amounts.shape} and seconds of shape {seconds.shape} do not fit {shape}")
    if np.any(np.isnan(amounts)) or np.any(np.isnan(seconds)):
        raise InputError("bytes and seconds must be numbers")
    flat = best.expected_us.ravel(), amounts.ravel(), seconds.ravel()
    kept = _non_dominated(*flat)
    return tuple(
        FrontPoint(
            best.sizes(*divmod(at, shape[1])), float(flat[0][at]), float(flat[1][at]), float(flat[2][at]), padding
        )
        for at in kept
    )


def merged(*fronts: tuple[FrontPoint, ...]) -> tuple[FrontPoint, ...]:
    """The front of several: of an engine that may also turn padding off, say. Earlier ones win where all is equal."""
    points = [point for one in fronts for point in one]
    columns = (np.array([getattr(p, name) for p in points]) for name in ("expected_us", "graph_bytes", "capture_s"))
    return tuple(points[at] for at in _non_dominated(*columns))


def _non_dominated(expected: Floats, amounts: Floats, seconds: Floats) -> list[int]:
    """Indices that no other point beats or equals in all three, fastest first; the first of equal ones."""
    order = np.lexsort((np.arange(len(expected)), seconds, amounts, expected))
    order = order[np.isfinite(expected[order])]
    kept: list[int] = []
    # A staircase over those so far: bytes ascend, seconds descend.
    steps: list[float] = []
    lowest: list[float] = []
    for at, amount, second in zip(order.tolist(), amounts[order].tolist(), seconds[order].tolist(), strict=True):
        place = bisect_right(steps, amount)
        if place and lowest[place - 1] <= second:
            continue
        end = place
        while end < len(steps) and lowest[end] >= second:
            end += 1
        start = place - 1 if place and steps[place - 1] == amount else place
        steps[start:end], lowest[start:end] = [amount], [second]
        kept.append(at)
    return kept


@dataclass(frozen=True)
class WithinBudget:
    """The best list for every budget of up to ``budget`` units. ``expected_us[u]`` is the least with at most u units
    and at most the graphs asked for; it never rises."""

    costs: StepCosts
    units: Ints
    expected_us: Floats
    _lists: tuple[tuple[int, ...], ...]

    def sizes(self, budget: int | None = None) -> tuple[int, ...]:
        """The best list within ``budget`` units (all of them by default), ascending."""
        return self._lists[-1 if budget is None else budget]


def whole_units(amounts: ArrayLike, unit: float) -> Ints:
    """Amounts in whole units, each rounded up, so that a list never takes more than its units say."""
    found = np.asarray(amounts, dtype=float) / unit
    if not np.all(np.isfinite(found)) or np.any(found < 0):
        raise InputError("amounts must be finite and at least 0")
    return np.ceil(found - 1e-9).astype(np.int64)


def solve_within(costs: StepCosts, units: ArrayLike, budget: int, max_graphs: int = MOST_GRAPHS) -> WithinBudget:
    """The best lists where capturing a size takes ``units`` (m) of one resource and ``budget`` units are there."""
    taken = np.asarray(units, dtype=np.int64)
    if taken.shape != costs.sizes.shape or np.any(taken < 0):
        raise InputError(f"{taken.size} amounts of at least 0 are needed for {len(costs.sizes)} sizes")
    if budget < 0 or max_graphs < 0:
        raise InputError("a budget and a number of graphs are at least 0")
    count = len(costs.sizes)
    served = np.full((budget + 1, count + 1), np.inf)
    served[:, 0] = 0.0
    tops = [np.zeros(budget + 1, dtype=np.int64)]
    expected = [np.full(budget + 1, costs.above_us[0])]
    below = [np.zeros((budget + 1, count + 1), dtype=np.int32)]
    left = np.arange(budget + 1)[:, None] - taken[None, :]
    fits, left = left >= 0, np.maximum(left, 0)
    for _ in range(min(max_graphs, count)):
        least, at = _next_layer(served, costs)
        served[:, 0] = np.inf
        served[:, 1:] = np.where(fits, np.take_along_axis(least, left, axis=0), np.inf)
        if not np.isfinite(served).any():
            break
        follows = np.zeros_like(below[0])
        follows[:, 1:] = np.take_along_axis(at, left, axis=0)
        below.append(follows)
        whole = served + costs.above_us
        tops.append(np.argmin(whole, axis=1))
        expected.append(np.min(whole, axis=1))
    return _within(costs, taken, np.array(expected), np.array(tops), below)


def _within(
    costs: StepCosts, units: Ints, expected: Floats, tops: Ints, below: list[NDArray[np.int32]]
) -> WithinBudget:
    """Follows the best list of every budget from its top down; ``expected`` and ``tops`` are (graphs, budget)."""
    best = np.argmin(expected, axis=0)
    lists = []
    for budget, most in enumerate(best.tolist()):
        found, left, top = [], budget, int(tops[most, budget])
        for graphs in range(most, 0, -1):
            found.append(int(costs.sizes[top - 1]))
            top, left = int(below[graphs][left, top]), left - int(units[top - 1])
        lists.append(tuple(reversed(found)))
    return WithinBudget(costs, units, expected[best, np.arange(expected.shape[1])], tuple(lists))


def _next_layer(served: Floats, costs: StepCosts) -> tuple[Floats, NDArray[np.int32]]:
    """For each row of ``served`` (rows, m + 1) and each top: the least sum with one more graph, and the one below it.

    Both are (rows, m). Infinite entries of ``served`` are sizes that cannot be the one below.
    """
    if costs.grows_with_size:
        return _by_halves(served, costs.between_us)
    return _by_all_pairs(served, costs.between_us)


def _by_all_pairs(served: Floats, between: Floats) -> tuple[Floats, NDArray[np.int32]]:
    count = len(between)
    least, at = np.empty((len(served), count)), np.empty((len(served), count), dtype=np.int32)
    block = max(1, _BLOCK_ELEMENTS // (count + 1))
    for row, known in enumerate(served):
        for start in range(0, count, block):
            end = min(start + block, count)
            sums = between[start:end, :end] + known[None, :end]
            found = np.argmin(sums, axis=1)
            at[row, start:end] = found
            least[row, start:end] = sums[np.arange(end - start), found]
    return least, at


def _by_halves(served: Floats, between: Floats) -> tuple[Floats, NDArray[np.int32]]:
    """Middle tops first: the best one below a top bounds those below smaller and larger tops. Level by level, so that
    all tops of a level are looked at in one go."""
    rows, count = len(served), len(between)
    width = count + 1
    least, at = np.full((rows, count), np.inf), np.zeros((rows, count), dtype=np.int32)
    row_base = np.arange(rows)
    flat_served, flat_between = served.ravel(), between.ravel()
    # Tops -1 and count are sentinels: nothing below the first, everything below the last.
    bound = np.zeros((rows, count + 2), dtype=np.int64)
    bound[:, -1] = count
    starts, ends = np.array([-1]), np.array([count])
    while len(starts):
        tops = (starts + ends) // 2
        low = bound[:, starts + 1]
        high = np.minimum(bound[:, ends + 1], tops[None, :])
        low = np.minimum(low, high)
        lengths = (high - low + 1).ravel()
        offsets = np.cumsum(lengths) - lengths
        total = int(offsets[-1] + lengths[-1])
        column = np.arange(total) + np.repeat(low.ravel() - offsets, lengths)
        served_at = np.repeat(row_base * width, len(tops))
        between_at = np.tile(tops * width, rows)
        sums = flat_served[np.repeat(served_at, lengths) + column]
        sums += flat_between[np.repeat(between_at, lengths) + column]
        minima = np.minimum.reduceat(sums, offsets)
        hits = np.flatnonzero(sums == np.repeat(minima, lengths))
        owner = np.searchsorted(offsets, hits, side="right") - 1
        chosen = np.empty(len(offsets), dtype=np.int64)
        chosen[owner[::-1]] = column[hits[::-1]]
        least[:, tops] = minima.reshape(rows, -1)
        at[:, tops] = bound[:, tops + 1] = chosen.reshape(rows, -1)
        starts, ends = np.concatenate([starts, tops]), np.concatenate([tops, ends])
        going = ends - starts > 1
        starts, ends = starts[going], ends[going]
    return least, at
