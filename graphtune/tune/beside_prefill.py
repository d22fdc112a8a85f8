"""The prefill side of an answer: which list stands beside that of decode, and what is left for decode then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphtune.engines.base import Engine
from graphtune.engines.sglang.log import DECODE_LOG_INTERVAL
from graphtune.tune.candidates import Candidate, Evaluator
from graphtune.tune.joint_choice import best_of, less, pair_of_two_lists, pairs_of_one_list
from graphtune.tune.kv_budget import KvBudget
from graphtune.tune.limits import Budgets, allowed
from graphtune.tune.list_answer import Lister
from graphtune.tune.measurements import Measurements
from graphtune.tune.prefill_choice import PrefillLists, prefill_lists
from graphtune.tune.recommendation import JointAnswer, Limits
from graphtune.tune.workload import Workload

ON_CPU = "on a CPU step times tell no prefill list from another"
NO_PAIR = "no lists of both phases fit into the limits together"


@dataclass(frozen=True)
class Beside:
    """``decode`` are the candidates left, ``limits`` and ``budgets`` what they may take beside the prefill list.

    ``prefill`` is null, for the reason in ``absent``, where nothing is said of prefill.
    """

    engine: Engine
    of: Measurements
    decode: tuple[Candidate, ...]
    limits: Limits
    budgets: Budgets
    lists: PrefillLists | None = None
    prefill: Candidate | None = None
    absent: Mapping[str, str] = field(default_factory=dict)

    def answers(self, budgets: Budgets, decode: Candidate | None) -> dict[str, Any]:
        """The prefill fields of an engine's answer; their KV tokens are beside the decode list, if there is one."""
        if self.lists is None or self.prefill is None:
            return {}
        lists, chosen = self.lists, self.prefill
        evaluator = lists.evaluator(chosen)
        beside = budgets.beside(decode) if decode is not None else budgets
        listed = Lister(self.engine, self.of, beside, chosen, evaluator, "prefill")
        backend = chosen.cost.of.backend if chosen.cost is not None else next(iter(lists.evaluators))
        sizes = self.engine.default_prefill_sizes(self.of.device, self.of.serving)
        cost = self.of.prefill_memory[backend].cost(sizes, checked=False) if sizes else None
        return {
            "prefill": listed.explained(chosen),
            "prefill_default": listed.explained(lists.with_cost(sizes, backend, cost)),
            "prefill_eager": listed.explained(lists.eager),
            "prefill_share": lists.share,
        }

    def joint(self, decode: Candidate, budget: KvBudget | None) -> JointAnswer | None:
        """Both lists together."""
        if self.prefill is None:
            return None
        costs = [one.cost for one in (decode, self.prefill) if one.cost is not None]
        seconds = [cost.capture_s for cost in costs]
        return JointAnswer(
            one_list=self.engine.dispatch.one_list,
            decode_sizes=decode.sizes,
            prefill_sizes=self.prefill.sizes,
            decode_backend=decode.cost.of.backend if decode.cost is not None else "eager",
            prefill_backend=self.prefill.cost.of.backend if self.prefill.cost is not None else "eager",
            graph_bytes=sum(cost.graph_bytes for cost in costs),
            capture_s=None if None in seconds else sum(one for one in seconds if one is not None),
            kv_tokens=budget.kv_tokens if budget is not None else None,
            max_running_requests=self.of.serving.max_running_requests,
        )


def beside_prefill(
    engine: Engine,
    workload: Workload,
    limits: Limits,
    of: Measurements,
    budgets: Budgets,
    evaluator: Evaluator,
    decode: tuple[Candidate, ...],
    eager: Candidate | None,
) -> Beside:
    """Choose the prefill list together with that of decode, and leave the rest to decode."""
    lists = prefill_lists(engine, workload, of) if of.distinguishes_eager else ON_CPU
    if isinstance(lists, str):
        return Beside(engine, of, decode, limits, budgets, absent=_absent(lists))
    weight = evaluator.weight * (DECODE_LOG_INTERVAL if workload.weighting == "every_40th_step" else 1)

    def fits(one: Candidate, other: Candidate) -> bool:
        return allowed(other, limits, budgets) and allowed(one, less(limits, other), budgets.beside(other))

    common = engine.dispatch.one_list
    pairs = pairs_of_one_list(decode, evaluator, lists, of, weight) if common else []
    pair = best_of(pairs, fits) if common else pair_of_two_lists(decode, eager, lists, weight, fits)
    if pair is None:
        return Beside(engine, of, decode, limits, budgets, absent=_absent(NO_PAIR))
    kept = (pair.decode,) if common and pair.prefill.sizes else decode
    left = less(limits, pair.prefill)
    return Beside(engine, of, kept, left, budgets.beside(pair.prefill), lists, pair.prefill)


def _absent(reason: str) -> dict[str, str]:
    return dict.fromkeys(("prefill", "prefill_default", "prefill_eager", "prefill_share", "joint"), reason)
