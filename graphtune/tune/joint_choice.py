"""One list for decode and one for prefill out of one device: limits are shared, and the best pair within them wins.

Where an engine has two lists, pairs are made of the best lists of each phase and those that no other beats in step,
bytes, seconds and graphs at once. Where one common list serves both, it is solved for both at once: a size that either
phase needs is captured for both, so that only sizes checked in both phases are candidates, and above the largest decode
batch those of prefill alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphtune.tune.bucket_solver import solve, step_costs
from graphtune.tune.candidates import COVERAGE_TOLERANCE, NEAR, Candidate, Evaluator, choose
from graphtune.tune.measurements import Measurements
from graphtune.tune.prefill_choice import PrefillLists, losing_buckets
from graphtune.tune.recommendation import Limits
from graphtune.tune.solved_candidates import checked_sizes, figures_of

MOST_OF_A_PHASE = 48


@dataclass(frozen=True)
class Pair:
    """Lists of both phases; ``us`` is the time of all steps of the traffic, decode and prefill."""

    decode: Candidate
    prefill: Candidate
    us: float

    @property
    def graph_bytes(self) -> int:
        return self.decode.graph_bytes + self.prefill.graph_bytes

    @property
    def graphs(self) -> int:
        return len(self.decode.sizes) + len(self.prefill.sizes)


Fits = Callable[[Candidate, Candidate], bool]


def less(limits: Limits, taken: Candidate) -> Limits:
    """The limits that are left beside a list."""
    return replace(
        limits,
        max_graph_bytes=None if limits.max_graph_bytes is None else max(0, limits.max_graph_bytes - taken.graph_bytes),
        max_capture_s=None if limits.max_capture_s is None else max(0.0, limits.max_capture_s - taken.capture_s),
        max_graphs=None if limits.max_graphs is None else max(0, limits.max_graphs - len(taken.sizes)),
    )


def pair_of_two_lists(
    decode: Sequence[Candidate], eager: Candidate | None, prefill: PrefillLists, weight: float, fits: Fits
) -> Pair | None:
    """The best pair within the limits, where each phase has a list of its own; ``weight`` is how many decode steps
    there are. The best of each by itself where both fit. None where no pair does."""
    best = choose(decode, eager)
    alone = prefill.choice.chosen
    if best is not None and fits(best.chosen, alone):
        return _pair(best.chosen, alone, weight, prefill)
    prefills = [alone, prefill.eager, *_thinned(prefill.lists)]
    decodes = [*([best.chosen] if best is not None else []), *_thinned(decode)]
    pairs = (_pair(one, other, weight, prefill) for one in decodes for other in prefills if fits(one, other))
    return _best(pairs)


def pairs_of_one_list(
    decode_alone: Sequence[Candidate], evaluator: Evaluator, prefill: PrefillLists, of: Measurements, weight: float
) -> list[Pair]:
    """Common lists for both phases, one for each number of graphs and backend, and lists that decode has alone."""
    found = [_pair(decode, prefill.eager, weight, prefill) for decode in decode_alone]
    decode_checked = checked_sizes(of.memory)
    for backend, prefill_evaluator in prefill.evaluators.items():
        memory = of.prefill_memory[backend]
        checked = set(checked_sizes(memory)) - losing_buckets(of.prefill[backend])
        top = max(decode_checked, default=0)
        sizes = tuple(sorted(size for size in checked if size in decode_checked or size > top))
        for chosen in _solved(evaluator, prefill_evaluator, sizes, top, weight, prefill.weight):
            for_decode = tuple(size for size in chosen if size <= top)
            costs = of.memory.cost(for_decode), memory.cost(chosen)
            evaluation = evaluator.evaluate(for_decode, prefill.engine.dispatch.decode)
            if costs[0] is None or costs[1] is None or evaluation.expected_step_us is None:
                continue
            decode = Candidate(for_decode, costs[0], evaluation)
            found.append(_pair(decode, prefill.with_cost(chosen, backend, costs[1]), weight, prefill))
    return found


def best_of(pairs: Iterable[Pair], fits: Fits) -> Pair | None:
    """The best pair within the limits."""
    return _best(pair for pair in pairs if fits(pair.decode, pair.prefill))


def _solved(
    decode: Evaluator,
    prefill: Evaluator,
    sizes: tuple[int, ...],
    decode_top: int,
    decode_weight: float,
    prefill_weight: float,
) -> list[tuple[int, ...]]:
    """The best common list for each number of graphs, over rows of both phases. Decode steps run eager above the
    largest decode size, whatever is captured for prefill."""
    if not sizes:
        return []
    figures = [
        (figures_of(decode, sizes), decode_weight, decode_top),
        (figures_of(prefill, sizes), prefill_weight, sizes[-1]),
    ]
    every = np.unique([raw for (rows, *_), *_ in figures for raw in rows])
    total, eager_us = np.zeros(len(every)), np.zeros(len(every))
    graph_us = np.zeros((len(every), len(sizes)))
    for (rows, weights, graph, eager), weight, top in figures:
        at, steps = np.searchsorted(every, rows), np.array(weights) * weight / sum(weights)
        runs_eager = np.array(sizes) > top
        total[at] += steps
        graph_us[at] += steps[:, None] * np.where(runs_eager, np.array(eager)[:, None], graph)
        eager_us[at] += steps * np.array(eager)
    costs = step_costs(every, total, sizes, graph_us / total[:, None], eager_us / total, padding="always")
    best = solve(costs)
    found, least = [], float("inf")
    for graphs in range(1, best.max_graphs + 1):
        us = float(best.expected_us[graphs].min())
        if us < least:
            least = us
            found.append(best.sizes(graphs, int(np.argmin(best.expected_us[graphs]))))
    return found


def _pair(decode: Candidate, prefill: Candidate, weight: float, lists: PrefillLists) -> Pair:
    return Pair(decode, prefill, weight * decode.step_us + lists.weight * prefill.step_us)


def _thinned(lists: Sequence[Candidate]) -> list[Candidate]:
    """At most so many lists that no other beats in step, bytes, seconds and graphs at once, fastest first."""
    front: list[Candidate] = []
    for one in sorted(lists, key=_price):
        if not any(all(a <= b for a, b in zip(_price(other), _price(one), strict=True)) for other in front):
            front.append(one)
    if len(front) <= MOST_OF_A_PHASE:
        return front
    return [front[round(at * (len(front) - 1) / (MOST_OF_A_PHASE - 1))] for at in range(MOST_OF_A_PHASE)]


def _price(of: Candidate) -> tuple[float, int, float, int]:
    return of.step_us, of.graph_bytes, of.capture_s, len(of.sizes)


def _best(pairs: Iterable[Pair]) -> Pair | None:
    """Of the pairs that leave the fewest decode steps eager (which a server's eager path makes dearer): the one of the
    least time, or one near it in all and in decode alone with fewer bytes, then fewer graphs."""
    found = list(pairs)
    if not found:
        return None
    most = max(pair.decode.evaluation.coverage for pair in found)
    covering = [pair for pair in found if pair.decode.evaluation.coverage >= most - COVERAGE_TOLERANCE]
    best = min(covering, key=lambda pair: pair.us)
    good = [pair for pair in covering if _near(pair.us, best.us) and _near(pair.decode.step_us, best.decode.step_us)]
    return min(good, key=lambda pair: (pair.graph_bytes, pair.graphs, pair.us))


def _near(us: float, least_us: float) -> bool:
    return us <= least_us * (1 + NEAR)
