"""Lists that a recommendation chooses among, each evaluated on the same traffic with the same figures.

For a step of ``raw`` requests an engine replays the bucket that its padding rule picks, or runs eager at the raw size.
Over steps with probability p:

    expected step   = sum of p * step time / sum of p
    graph coverage  = sum of p over steps that a graph serves / sum of p
    padding waste   = sum of p * (bucket - raw) / sum of p * bucket, over steps that a graph serves
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from graphtune.engines.base import Padding
from graphtune.tune.latency_model import LatencyModel, Provenance
from graphtune.tune.memory_model import GraphCost, MemoryModel


@dataclass(frozen=True)
class Step:
    """Decode steps of ``requests`` requests holding ``context_tokens`` KV tokens each on average."""

    requests: int
    weight: float
    context_tokens: float

    @property
    def kv_tokens(self) -> float:
        return self.requests * self.context_tokens


def bucket_for(raw: int, sizes: Sequence[int], padding: Padding, cap_factor: float | None = None) -> int | None:
    """The size in ascending ``sizes`` that serves ``raw`` rows, None when the step runs eager."""
    index = bisect_left(sizes, raw)
    if index == len(sizes):
        return None
    bucket = sizes[index]
    if padding == "exact" and bucket != raw:
        return None
    if padding == "capped" and cap_factor is not None and bucket > cap_factor * raw:
        return None
    return bucket


@dataclass(frozen=True)
class Evaluation:
    """A list on some traffic. ``expected_step_us`` is null when a step has no figure; ``without_figure`` lists those.

    ``padding_waste`` is null when no step is served by a graph: there is then nothing to pad.
    """

    expected_step_us: float | None
    provenance: Provenance | None
    coverage: float
    padding_waste: float | None
    without_figure: tuple[int, ...]


@dataclass(frozen=True)
class Candidate:
    """A list with what it costs and what it gives. No sizes and no cost: everything runs eager."""

    sizes: tuple[int, ...]
    cost: GraphCost | None
    evaluation: Evaluation

    @property
    def graph_bytes(self) -> int:
        return self.cost.graph_bytes if self.cost else 0

    @property
    def capture_s(self) -> float:
        """Seconds of capture; unknown seconds count as no less than any limit."""
        if self.cost is None:
            return 0.0
        return math.inf if self.cost.capture_s is None else self.cost.capture_s

    @property
    def step_us(self) -> float:
        assert self.evaluation.expected_step_us is not None
        return self.evaluation.expected_step_us


class Evaluator:
    """Evaluates lists on fixed traffic; figures are looked up once. Steps of no weight are left out."""

    def __init__(self, steps: Iterable[Step], model: LatencyModel, cap_factor: float | None = None) -> None:
        self.steps = tuple(step for step in steps if step.weight > 0)
        self._cap_factor = cap_factor
        self._replay = cache(model.replay)
        self._eager = cache(lambda size, context: model.eager(size, model.nearest_context(context)))

    def evaluate(self, sizes: tuple[int, ...], padding: Padding) -> Evaluation:
        """``sizes`` ascend."""
        weight = served = waste = computed = 0.0
        total_us = 0.0
        missing = set()
        measured = True
        for step in self.steps:
            bucket = bucket_for(step.requests, sizes, padding, self._cap_factor)
            if bucket is None:
                figure = self._eager(step.requests, step.context_tokens)
            else:
                figure = self._replay(step.requests, bucket, step.context_tokens)
                served += step.weight
                waste += step.weight * (bucket - step.requests)
                computed += step.weight * bucket
            weight += step.weight
            if figure is None:
                missing.add(step.requests)
                continue
            measured = measured and figure.provenance == "measured"
            total_us += step.weight * figure.us
        known = bool(self.steps) and not missing
        return Evaluation(
            expected_step_us=total_us / weight if known else None,
            provenance=("measured" if measured else "interpolated") if known else None,
            coverage=served / weight if weight else 0.0,
            padding_waste=waste / computed if computed else None,
            without_figure=tuple(sorted(missing)),
        )


def measured_candidates(
    evaluator: Evaluator, memory: MemoryModel, padding: Padding, largest_size: int | None = None
) -> tuple[Candidate, ...]:
    """Every measured list and every prefix of one (all sizes up to some top) with a figure for each step.

    Only sizes that were checked and passed are used, none above ``largest_size``, and equal sizes appear once, with
    the setting that takes the fewest bytes.
    """
    found: dict[tuple[int, ...], Candidate] = {}
    for measured in memory.lists:
        sizes = measured.list.sizes
        for top in range(1, len(sizes) + 1):
            prefix = sizes[:top]
            if not measured.serves(prefix) or (largest_size is not None and prefix[-1] > largest_size):
                break
            if prefix in found:
                continue
            evaluation = evaluator.evaluate(prefix, padding)
            cost = memory.cost(prefix)
            if cost is not None and evaluation.expected_step_us is not None:
                found[prefix] = Candidate(prefix, cost, evaluation)
    return tuple(found.values())


def eager_candidate(evaluator: Evaluator) -> Candidate | None:
    """No graphs at all; None when eager steps lack a figure."""
    evaluation = evaluator.evaluate((), "always")
    return Candidate((), None, evaluation) if evaluation.expected_step_us is not None else None


@dataclass(frozen=True)
class Choice:
    """The answer among candidates. ``ties`` are as good within noise; ``runner_up`` is the best of the others."""

    chosen: Candidate
    ties: tuple[Candidate, ...]
    runner_up: Candidate | None


def choose(lists: Iterable[Candidate], eager: Candidate | None, noise: float) -> Choice | None:
    """The list to capture, or ``eager`` when no list beats it by more than ``noise``. None without lists.

    Lists within ``noise`` of the best expected step tie. Among them the highest coverage wins, then the fewest bytes,
    then the expected step, then the fewest graphs. Coverage comes first because eager figures are a lower bound: a
    difference that noise could make must not leave steps to a server's slower eager path.
    """
    by_step = sorted(lists, key=lambda c: (c.step_us, c.graph_bytes, len(c.sizes), c.sizes))
    if not by_step:
        return None
    best = by_step[0]
    if eager is not None and eager.step_us <= best.step_us * (1 + noise):
        return Choice(eager, (), best)
    good = [c for c in by_step if c.step_us <= best.step_us * (1 + noise)]
    most = max(c.evaluation.coverage for c in good)
    covering = [c for c in good if c.evaluation.coverage >= most - 1e-12]
    chosen = min(covering, key=lambda c: (c.graph_bytes, c.step_us, len(c.sizes), c.sizes))
    others = [c for c in by_step if c is not chosen]
    ties = tuple(c for c in good if c is not chosen)
    return Choice(chosen, ties, others[0] if others else eager)


def pareto(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Candidates that no other beats in both graph bytes and expected step, fewest bytes first."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.graph_bytes, c.step_us, len(c.sizes), c.sizes)):
        if not front or candidate.step_us < front[-1].step_us:
            front.append(candidate)
    return tuple(front)
