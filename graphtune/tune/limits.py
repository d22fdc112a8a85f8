"""Which candidates are within what the user allows and the KV cache needs, and what the others miss by."""

from __future__ import annotations

import math
from collections.abc import Callable

from graphtune.engines.base import Engine
from graphtune.tune.answer_words import range_of
from graphtune.tune.candidates import Candidate
from graphtune.tune.kv_budget import KvBudget, kv_budget
from graphtune.tune.measurements import Measurements
from graphtune.tune.memory_model import MemoryModel
from graphtune.tune.recommendation import Limits
from graphtune.units import format_bytes, format_duration_s, format_us


class Budgets:
    """Budgets of one engine by candidate; None for all of them where no budget can be drawn up.

    At least the smallest step of the traffic and the KV tokens asked for must fit. ``beside`` is what is captured for
    another phase.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        of: Measurements,
        least_kv_tokens: float,
        beside: Candidate | None = None,
    ) -> None:
        self._engine, self._of, self._limits, self._beside = engine, of, limits, beside
        self._least = max(math.ceil(least_kv_tokens), limits.min_kv_tokens or 0)
        self._rule = engine.memory_rule(of.device, of.serving)

    def __call__(self, candidate: Candidate | None) -> KvBudget | None:
        costs = [one.cost for one in (candidate, self._beside) if one is not None and one.cost is not None]
        peaks = [cost.activation_peak_bytes for cost in costs if cost.activation_peak_bytes is not None]
        return self.of_bytes(sum(cost.graph_bytes for cost in costs), max(peaks, default=None))

    def beside(self, other: Candidate) -> Budgets:
        """The budgets of candidates with the list of another phase captured as well."""
        return Budgets(self._engine, self._limits, self._of, self._least, other)

    def kv_tokens(self, candidate: Candidate) -> int | None:
        budget = self(candidate)
        return None if budget is None else budget.kv_tokens

    def of_bytes(self, graph_bytes: int, activation_peak_bytes: int | None) -> KvBudget | None:
        if self._of.gpu is None or self._of.fixed is None:
            return None
        return kv_budget(
            self._of.gpu,
            self._of.fixed,
            self._rule,
            graph_bytes=graph_bytes,
            activation_peak_bytes=activation_peak_bytes,
            context_tokens=self._limits.context_tokens,
            min_kv_tokens=self._least,
        )


Excess = Callable[[Candidate], tuple[str, float] | None]


def excesses(limits: Limits, budgets: Budgets) -> list[Excess]:
    """For each limit, how a candidate exceeds it: in words, and by how much for ordering. None when it does not."""

    def memory(candidate: Candidate) -> tuple[str, float] | None:
        over = candidate.graph_bytes - (math.inf if limits.max_graph_bytes is None else limits.max_graph_bytes)
        if over <= 0:
            return None
        needs = f"{format_bytes(candidate.graph_bytes)} of graph memory, {format_bytes(int(over))} over the limit"
        return needs, over

    def seconds(candidate: Candidate) -> tuple[str, float] | None:
        over = candidate.capture_s - (math.inf if limits.max_capture_s is None else limits.max_capture_s)
        if limits.max_capture_s is None or over <= 0:
            return None
        if math.isinf(candidate.capture_s):
            return "a capture time that was not measured", math.inf
        return f"{format_duration_s(candidate.capture_s)} to capture, {format_duration_s(over)} over the limit", over

    def graphs(candidate: Candidate) -> tuple[str, float] | None:
        over = len(candidate.sizes) - (math.inf if limits.max_graphs is None else limits.max_graphs)
        return None if over <= 0 else (f"{len(candidate.sizes)} graphs, {int(over)} over the limit", over)

    def kv(candidate: Candidate) -> tuple[str, float] | None:
        budget = budgets(candidate)
        if budget is None or budget.fits:
            return None
        short = budget.short_by_bytes
        return f"{budget.needed_kv_tokens:,} KV tokens, {format_bytes(short)} more than it leaves", short

    return [memory, seconds, graphs, kv]


def allowed(candidate: Candidate, limits: Limits, budgets: Budgets) -> bool:
    return all(excess(candidate) is None for excess in excesses(limits, budgets))


def nearest_miss(
    lists: tuple[Candidate, ...], limits: Limits, budgets: Budgets, eager: Candidate | None, memory: MemoryModel
) -> str:
    """Why no list is within the limits: the one that misses the first missed limit by the least."""
    if not lists:
        failed = memory.failed_sizes()
        gate = f"; sizes {', '.join(map(str, failed))} failed the output check" if failed else ""
        return f"no list of this sweep was captured whole, checked and timed{gate}"
    for excess in excesses(limits, budgets):
        missed = [(found[1], -len(c.sizes), c, found[0]) for c in lists if (found := excess(c)) is not None]
        if len(missed) == len(lists):
            _, _, nearest, words = min(missed, key=lambda row: row[:2])
            rest = f"; without graphs a step takes {format_us(eager.step_us)}" if eager is not None else ""
            return f"the nearest list ({range_of(nearest.sizes)}) needs {words}{rest}"
    return "every list misses one limit or another, and no single limit is missed by all; loosen one of them"


def too_little(budget: KvBudget, limits: Limits) -> str:
    need = f"{budget.needed_kv_tokens:,} KV tokens"
    return (
        f"weights, context, workspace and reserve leave {format_bytes(budget.kv_bytes)} for KV even without graphs; "
        f"{need} are short by {format_bytes(budget.short_by_bytes)}"
    )
