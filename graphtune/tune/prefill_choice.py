"""Prefill lists on the prefill steps of the traffic, per backend, under the engine's dispatch.

The same evaluation as of decode, in tokens. A bucket whose replay takes more than 2 % longer than an eager run of as
many tokens is in no list. Coverage does not count here: with enough tokens eager is as fast in a server, too.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from graphtune.engines.base import Engine, GraphPlan, Serving
from graphtune.errors import InputError
from graphtune.tune.candidates import (
    Candidate,
    Choice,
    Evaluation,
    Evaluator,
    Step,
    choose,
    eager_candidate,
    measured_candidates,
)
from graphtune.tune.measurements import Measurements
from graphtune.tune.memory_model import GraphCost
from graphtune.tune.prefill_model import PrefillModel
from graphtune.tune.solved_candidates import solved_candidates
from graphtune.tune.workload import Workload

MOST_SLOWER = 0.02
NO_TIMES = "this sweep holds no prefill times"
NO_STEPS = "the traffic has no prefill steps: give a request trace, or a histogram with prefill"
NONE_MEASURED = "the prefill steps of the traffic are longer than all that were measured"
NO_LIST = "no prefill list that this engine has a backend for was captured whole, checked and timed"


@dataclass(frozen=True)
class PrefillLists:
    """Everything to choose a prefill list from. ``evaluators`` are by backend, ``lists`` of all backends; ``eager`` is
    no graphs at all. ``share`` of the prefill steps has figures."""

    engine: Engine
    evaluators: Mapping[str, Evaluator]
    lists: tuple[Candidate, ...]
    eager: Candidate
    share: float

    @cached_property
    def choice(self) -> Choice:
        """The best list by itself."""
        found = choose(self.lists, self.eager, cover=False)
        return found if found is not None else Choice(self.eager, (), None)

    @property
    def weight(self) -> float:
        """How many prefill steps there are, in the unit of the histogram."""
        return next(iter(self.evaluators.values())).weight

    def evaluator(self, candidate: Candidate) -> Evaluator:
        """The evaluator of the candidate's backend; any for no graphs."""
        backend = candidate.cost.of.backend if candidate.cost is not None else next(iter(self.evaluators))
        return self.evaluators[backend]

    def evaluate(self, sizes: tuple[int, ...], backend: str) -> Evaluation:
        return self.evaluators[backend].evaluate(sizes, self.engine.dispatch.prefill)

    def with_cost(self, sizes: tuple[int, ...], backend: str, cost: GraphCost | None) -> Candidate:
        return Candidate(sizes, cost, self.evaluate(sizes, backend))


def prefill_lists(engine: Engine, workload: Workload, of: Measurements) -> PrefillLists | str:
    """The lists for the traffic's prefill, or the reason why there are none to choose from."""
    if not of.prefill:
        return NO_TIMES
    asked = [Step(share.tokens, share.weight, 0.0) for share in workload.prefill if share.weight]
    if not asked:
        return NO_STEPS
    models = {backend: model for backend, model in of.prefill.items() if offers(engine, backend, of.serving)}
    if not models:
        return NO_LIST
    steps = [step for step in asked if all(model.step(step.requests, None) is not None for model in models.values())]
    if not steps:
        return NONE_MEASURED
    share = sum(step.weight for step in steps) / sum(step.weight for step in asked)
    dispatch = engine.dispatch
    steps = coalesced(steps, knots_of(models.values(), dispatch.prefill_cap_factor))
    evaluators = {
        backend: Evaluator(steps, model, dispatch.prefill_cap_factor if dispatch.prefill == "capped" else None)
        for backend, model in models.items()
    }
    lists: list[Candidate] = []
    for backend, evaluator in evaluators.items():
        losing = losing_buckets(models[backend])
        memory = of.prefill_memory[backend]
        measured = measured_candidates(evaluator, memory, dispatch.prefill)
        solved = solved_candidates(
            evaluator, memory, dispatch.prefill, cap_factor=dispatch.prefill_cap_factor, without=losing
        )
        kept = [one for one in measured if not losing & set(one.sizes)]
        known = {one.sizes for one in kept}
        lists += [*kept, *(one for one in solved if one.sizes not in known)]
    eager = eager_candidate(next(iter(evaluators.values())))
    assert eager is not None  # steps without an eager figure were left out
    return PrefillLists(engine, evaluators, tuple(lists), eager, share)


def knots_of(models: Iterable[PrefillModel], cap_factor: float | None) -> tuple[int, ...]:
    """Token counts between which times are linear and an engine picks the same bucket out of any list."""
    knots = {knot for model in models for knot in model.knots}
    if cap_factor is not None:
        knots |= {math.ceil(bucket / cap_factor) for model in models for bucket in model.buckets}
    return tuple(sorted(knots))


def coalesced(steps: Sequence[Step], knots: Sequence[int]) -> list[Step]:
    """The same prefill with the steps between two knots as one of their mean tokens: no list's expected step changes,
    but for rounding to whole tokens. A trace has thousands of token counts."""
    between: dict[tuple[int, bool], list[Step]] = defaultdict(list)
    for step in steps:
        at = bisect_left(knots, step.requests)
        between[at, at < len(knots) and knots[at] == step.requests].append(step)
    merged = []
    for some in between.values():
        weight = sum(step.weight for step in some)
        merged.append(Step(round(sum(step.weight * step.requests for step in some) / weight), weight, 0.0))
    return sorted(merged, key=lambda step: step.requests)


def losing_buckets(model: PrefillModel) -> frozenset[int]:
    """Buckets at which eager wins: no recommendation keeps them."""
    return frozenset(bucket for bucket in model.buckets if model.slower_than_eager(bucket, MOST_SLOWER))


def offers(engine: Engine, backend: str, serving: Serving) -> bool:
    """True when the engine can be told to capture prefill with this backend."""
    try:
        engine.flags(GraphPlan(prefill=(256,), prefill_backend=backend), serving)
    except InputError:
        return False
    return True
