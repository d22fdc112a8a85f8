"""A candidate as it is reported: figures, where each comes from, and how it compares with the chosen one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from graphtune.engines.base import Engine, Padding
from graphtune.results import Phase
from graphtune.tune.answer_words import listed_of
from graphtune.tune.bucket_worth import SizeCost, bucket_worths, cliff, predicted_size_costs
from graphtune.tune.candidates import Candidate, Evaluator, ratio
from graphtune.tune.limits import Budgets
from graphtune.tune.measurements import Measurements
from graphtune.tune.memory_model import key_of
from graphtune.tune.objective import served
from graphtune.tune.recommendation import BOUND_MISSING, CHOSEN_MISSING, EAGER_MISSING, ListAnswer

OF_DECODE = "gaps between tokens are those of decode"
NO_STEPS = "steps of as many requests as its KV holds were not measured"


class Lister:
    """Turns candidates of one engine into list answers, each compared with the chosen one."""

    def __init__(
        self,
        engine: Engine,
        of: Measurements,
        budgets: Budgets,
        chosen: Candidate,
        evaluator: Evaluator,
        phase: Phase = "decode",
    ) -> None:
        dispatch = engine.dispatch
        self._phase = phase
        self._unit = dispatch.decode_unit if phase == "decode" else dispatch.prefill_unit
        self._padding: Padding = dispatch.decode if phase == "decode" else dispatch.prefill
        self._of, self._budgets, self._chosen, self._evaluator = of, budgets, chosen, evaluator

    def explained(self, candidate: Candidate, padding: Padding | None = None) -> ListAnswer:
        """The answer with what each bucket earns, under the engine's padding rule or ``padding``."""
        answer = self(candidate)
        kv_tokens = answer.kv_tokens if self._phase == "decode" else None
        given = served(self._evaluator, candidate.sizes, padding or self._padding, kv_tokens)
        if self._phase == "prefill":
            given = given._replace(inter_token_p99_us=None)
            answer = answer.without("inter_token_p99_us", OF_DECODE)
        for name, value in given._asdict().items():
            if value is None and name not in answer.absent:
                answer = answer.without(name, answer.absent.get("expected_step_us", NO_STEPS))
        answer = replace(answer, **given._asdict())
        if not self._of.distinguishes_eager:
            return answer.without("cliff", "on a CPU step times tell no bucket from another")
        costs = self._size_costs(candidate)
        buckets = bucket_worths(self._evaluator, candidate.sizes, padding or self._padding, costs)
        return replace(answer, buckets=buckets, cliff=cliff(self._evaluator, candidate.sizes))

    def _size_costs(self, candidate: Candidate) -> Mapping[int, SizeCost]:
        """What each size adds: as predicted for lists that are, else as captured in the list that the bytes are of."""
        cost = candidate.cost
        if cost is None:
            return {}
        if cost.provenance == "predicted":
            memory = self._of.memory if self._phase == "decode" else self._of.prefill_memory[cost.of.backend]
            return predicted_size_costs(memory, cost)
        return self._of.size_costs.get(key_of(cost.of), {})

    def __call__(self, candidate: Candidate) -> ListAnswer:
        evaluation, cost = candidate.evaluation, candidate.cost
        known = cost is not None or not candidate.sizes
        budget = self._budgets(candidate) if known else None
        absent = self._absent(candidate)
        if known and budget is None:
            absent["kv_tokens"] = self._of.why_no_budget
        of = cost.of if cost else None
        return ListAnswer(
            unit=self._unit,
            capture_sizes=candidate.sizes,
            backend=of.backend if of else ("full" if candidate.sizes else "eager"),
            order=of.order if of else None,
            output=of.output if of else None,
            workspace=of.workspace if of else None,
            expected_step_us=evaluation.expected_step_us,
            coverage=evaluation.coverage,
            padding_waste=evaluation.padding_waste,
            graph_bytes=candidate.graph_bytes if known else None,
            graph_bytes_interval=cost.interval if cost else None,
            capture_peak_bytes=cost.capture_peak_bytes if cost else None,
            capture_s=cost.capture_s if cost else (0.0 if known else None),
            kv_tokens=budget.kv_tokens if budget else None,
            expected_step_from=evaluation.provenance,
            graph_bytes_from=cost.provenance if cost else ("measured" if known else None),
            capture_s_from=None if "capture_s" in absent else (cost.provenance if cost else "measured"),
            bytes_of_list=of.name if of else None,
            evidence=tuple(dict.fromkeys((*self._evaluator.model.cell_ids, *(cost.cell_ids if cost else ())))),
            chosen_over_this=None if "chosen_over_this" in absent else ratio(self._chosen, candidate),
            absent=absent,
        )

    def _absent(self, candidate: Candidate) -> dict[str, str]:
        """Reasons for what a list answer lacks, by field."""
        evaluation, cost = candidate.evaluation, candidate.cost
        absent = {}
        if evaluation.padding_waste is None:
            absent["padding_waste"] = "no step of this traffic is served by a graph"
        if evaluation.expected_step_us is None:
            reason = f"no figure was measured for steps of {listed_of(evaluation.without_figure)} {self._unit}"
            absent |= dict.fromkeys(("expected_step_us", "values.expected_step_us", "chosen_over_this"), reason)
        elif candidate is self._chosen:
            absent["chosen_over_this"] = CHOSEN_MISSING
        elif not self._of.distinguishes_eager:
            absent["chosen_over_this"] = "on a CPU step times tell no list from another"
        if cost is None:
            reason = "no measured list contains these sizes" if candidate.sizes else EAGER_MISSING
            absent |= dict.fromkeys(_SETTINGS, reason)
            if candidate.sizes:
                absent |= dict.fromkeys(_COSTS, reason)
            return absent
        if cost.interval is None:
            absent["graph_bytes_interval"] = BOUND_MISSING
        if cost.capture_peak_bytes is None:
            absent["capture_peak_bytes"] = "no peak was sampled while this list was captured"
        if cost.capture_s is None:
            absent |= dict.fromkeys(("capture_s", "values.capture_s"), "no whole capture of this list was timed")
        return absent


_SETTINGS = ("order", "output", "workspace", "bytes_of_list", "graph_bytes_interval", "capture_peak_bytes")
_COSTS = ("graph_bytes", "capture_s", "kv_tokens", "values.graph_bytes", "values.capture_s")
