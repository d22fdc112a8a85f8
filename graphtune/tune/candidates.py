"""Lists that a recommendation chooses among, each evaluated on the same traffic with the same figures.

For a step of ``raw`` requests an engine replays the bucket that its padding rule picks, or runs eager at the raw size.
Over steps with probability p:

    expected step   = sum of p * step time / sum of p
    graph coverage  = sum of p over steps that a graph serves / sum of p
    padding waste   = sum of p * (bucket - raw) / sum of p * bucket, over steps that a graph serves

Two lists are compared by the ratio of their expected steps within one process: a process on a slow or busy host is
slow for both. How far the processes disagree about that ratio is the tolerance (``stats.Ratio``).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from graphtune.engines.base import Padding, replays
from graphtune.stats import LEAST_TOLERANCE, Ratio
from graphtune.tune.latency_model import Provenance
from graphtune.tune.memory_model import GraphCost, MemoryModel
from graphtune.tune.step_table import EAGER, Step, StepFigures, StepModel, StepTable


def bucket_for(raw: int, sizes: Sequence[int], padding: Padding, cap_factor: float | None = None) -> int | None:
    """The size in ascending ``sizes`` that serves ``raw`` rows, None when the step runs eager."""
    index = bisect_left(sizes, raw)
    if index == len(sizes):
        return None
    bucket = sizes[index]
    return bucket if replays(raw, bucket, padding, cap_factor) else None


def buckets_for(raw: np.ndarray, sizes: Sequence[int], padding: Padding, cap_factor: float | None = None) -> np.ndarray:
    """``bucket_for`` of each of ``raw`` (n,), ``EAGER`` where it is None."""
    if not sizes:
        return np.full(raw.shape, EAGER)
    at = np.searchsorted(sizes, raw)
    buckets = np.asarray(sizes)[np.minimum(at, len(sizes) - 1)]
    return np.where((at < len(sizes)) & replays(raw, buckets, padding, cap_factor), buckets, EAGER)


@dataclass(frozen=True)
class Evaluation:
    """A list on some traffic. ``expected_step_us`` is null when a step has no figure; ``without_figure`` lists those.

    ``padding_waste`` is null when no step is served by a graph: there is then nothing to pad. ``by_process`` is the
    expected step in each process that measured at least half of this traffic itself.
    """

    expected_step_us: float | None
    provenance: Provenance | None
    coverage: float
    padding_waste: float | None
    without_figure: tuple[int, ...]
    by_process: Mapping[int, float] = field(default_factory=dict)


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


def ratio(one: Candidate, other: Candidate) -> Ratio:
    """The expected step of ``one`` over that of ``other``."""
    first, second = one.evaluation.by_process, other.evaluation.by_process
    return Ratio(one.step_us / other.step_us, tuple(first[p] / second[p] for p in first if p in second))


class Evaluator:
    """Evaluates lists on fixed traffic. Steps of no weight are left out."""

    def __init__(self, steps: Iterable[Step], model: StepModel, cap_factor: float | None = None) -> None:
        self.steps = tuple(step for step in steps if step.weight > 0)
        self.weight = math.fsum(step.weight for step in self.steps)
        self._cap_factor = cap_factor
        self.model = model
        self._requests = np.array([step.requests for step in self.steps], dtype=int)
        self._weights = np.array([step.weight for step in self.steps])
        self._table = StepTable(self.steps, model)
        self._processes = {process: StepTable(self.steps, of) for process, of in model.processes.items()}

    def bucket(self, raw: int, sizes: tuple[int, ...], padding: Padding) -> int | None:
        return bucket_for(raw, sizes, padding, self._cap_factor)

    def evaluate(self, sizes: tuple[int, ...], padding: Padding) -> Evaluation:
        """``sizes`` ascend."""
        buckets = buckets_for(self._requests, sizes, padding, self._cap_factor)
        served = buckets != EAGER
        computed = self._sum(buckets * served)
        figures = self._table.of(buckets)
        complete = bool(self.steps) and bool(figures.known.all())
        missing = set(self._requests[~figures.known].tolist())
        return Evaluation(
            expected_step_us=self._mean(figures) if complete else None,
            provenance=("measured" if figures.measured.all() else "interpolated") if complete else None,
            coverage=self._sum(served) / self.weight if self.weight else 0.0,
            padding_waste=self._sum((buckets - self._requests) * served) / computed if computed else None,
            without_figure=tuple(sorted(missing)),
            by_process=self._by_process(buckets) if complete else {},
        )

    def _by_process(self, buckets: np.ndarray) -> dict[int, float]:
        found = {}
        for process, table in self._processes.items():
            figures = table.of(buckets)
            if self._sum(figures.own) >= self.weight / 2:
                found[process] = self._mean(figures)
        return found

    def _mean(self, figures: StepFigures) -> float:
        return self._sum(figures.us) / self.weight

    def _sum(self, values: np.ndarray) -> float:
        """Over steps by weight, the last digit right: lists that are alike must not differ by the order of a sum."""
        return math.fsum((self._weights * values).tolist())


def measured_candidates(
    evaluator: Evaluator, memory: MemoryModel, padding: Padding, largest_size: int | None = None
) -> tuple[Candidate, ...]:
    """Every measured list with a figure for each step, and, where bytes are not predicted, every prefix of one (all
    sizes up to some top).

    Only sizes that were checked and passed are used, none above ``largest_size``, and equal sizes appear once, with
    the setting that takes the fewest bytes.
    """
    found: dict[tuple[int, ...], Candidate] = {}
    for measured in memory.lists:
        sizes = measured.list.sizes
        for top in range(1 if memory.predictor is None else len(sizes), len(sizes) + 1):
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
    """The answer among candidates. ``ties`` are as good within the tolerance, fastest first.

    ``runner_up`` is the fastest of the other lists, a tie or not, that gives something for what it costs: a shorter
    expected step or fewer bytes than the chosen one; without such a list, eager. Where nothing is captured, it is the
    one that pays first as eager steps get longer (``break_even_us``). ``within_noise``: no list gains more over eager
    than can be told, and the chosen one is captured because eager figures are a lower bound.
    """

    chosen: Candidate
    ties: tuple[Candidate, ...]
    runner_up: Candidate | None
    within_noise: bool = False


def choose(lists: Iterable[Candidate], eager: Candidate | None, *, cover: bool = True) -> Choice | None:
    """The list to capture, or ``eager`` when no list is faster than it (``stats.Ratio.faster``). None without lists.

    Where none is, those of a shorter expected step take part, and those of the highest coverage that are not slower
    (``stats.Ratio.slower``): eager figures are a lower bound, so what cannot be told from noise is no reason to serve
    without graphs. Of the lists that take part, those that the one with the least expected step is not faster than tie.
    Of them the highest coverage wins (``covering_most``), then the ``cheapest``.
    Coverage comes first because eager figures are a lower bound: a difference that cannot be told must not leave steps
    to a server's slower eager path. ``cover`` False is for phases in which a server's eager step may be as short:
    coverage is left out, and a gain within noise has to be one in every process (``stats.Ratio.leans``).
    """
    by_step = sorted(lists, key=lambda c: (c.step_us, c.graph_bytes, len(c.sizes), c.sizes))
    if not by_step:
        return None
    paying = [c for c in by_step if eager is None or ratio(c, eager).faster]
    within_noise = not paying
    if within_noise:
        assert eager is not None
        paying = _as_fast_as(eager, by_step) if cover else [c for c in by_step if ratio(c, eager).leans]
    if not paying:
        assert eager is not None
        waits = ((break_even_us(c, eager), c) for c in by_step)
        return Choice(eager, (), min(waits, key=lambda pair: math.inf if pair[0] is None else pair[0])[1])
    good = [c for c in paying if not ratio(paying[0], c).faster]
    chosen = cheapest(covering_most(good) if cover else good, lambda c: c.step_us)
    ties = tuple(c for c in good if c is not chosen)
    others = (c for c in by_step if c.step_us < chosen.step_us or c.graph_bytes < chosen.graph_bytes)
    return Choice(chosen, ties, next(others, eager), within_noise)


def _as_fast_as(eager: Candidate, lists: Sequence[Candidate]) -> list[Candidate]:
    """Lists of a shorter expected step, and those of the highest coverage that are not slower beyond noise."""
    most = set(map(id, covering_most(lists)))
    gains = ((one, ratio(one, eager)) for one in lists)
    return [one for one, gain in gains if gain.combined < 1 or (id(one) in most and not gain.slower)]


# Of lists that tie, those so near to the best take part in the choice of the cheapest: half of what can be told apart.
NEAR = LEAST_TOLERANCE / 2


def cheapest(lists: Sequence[Candidate], figure: Callable[[Candidate], float]) -> Candidate:
    """Of the lists whose figure is near the least: the one of fewest bytes, then fewest graphs, then shortest step."""
    least = min(figure(one) for one in lists)
    near = [one for one in lists if figure(one) <= least * (1 + NEAR)]
    return min(near, key=lambda c: (c.graph_bytes, len(c.sizes), c.step_us, c.sizes))


# Coverage that does not count: were an eager step ten times as long, the expected step would grow by less than 1 %.
COVERAGE_TOLERANCE = 1e-3


def covering_most(lists: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The lists of the highest graph coverage, all but a thousandth of the steps."""
    most = max((c.evaluation.coverage for c in lists), default=0.0)
    return tuple(c for c in lists if c.evaluation.coverage >= most - COVERAGE_TOLERANCE)


def break_even_us(best: Candidate, eager: Candidate) -> float | None:
    """How much longer every eager step has to take for ``best`` to be faster than running eager, to 0.1 us.

    None when it serves so few steps that it never is.
    """
    if best.evaluation.coverage <= LEAST_TOLERANCE:
        return None

    def pays(extra_us: float) -> bool:
        return ratio(_with_slower_eager(best, extra_us), _with_slower_eager(eager, extra_us)).faster

    low, high = 0.0, eager.step_us
    while not pays(high):
        low, high = high, 2 * high
    while high - low > 0.1:
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def _with_slower_eager(of: Candidate, extra_us: float) -> Candidate:
    """The candidate where every step that no graph serves takes longer."""
    extra = (1 - of.evaluation.coverage) * extra_us
    by_process = {process: us + extra for process, us in of.evaluation.by_process.items()}
    return replace(of, evaluation=replace(of.evaluation, expected_step_us=of.step_us + extra, by_process=by_process))


def pareto(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Candidates that no other beats in both graph bytes and expected step, fewest bytes first."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.graph_bytes, c.step_us, len(c.sizes), c.sizes)):
        if not front or candidate.step_us < front[-1].step_us:
            front.append(candidate)
    return tuple(front)
