"""The answer for one engine: traffic that can occur, candidates within the limits, the choice, its budget and flags."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from graphtune.engines.base import DeviceFacts, Engine, Flags, GraphPlan, Serving
from graphtune.stats import Disturbances, Noise
from graphtune.tune.candidates import (
    Candidate,
    Choice,
    Evaluator,
    Step,
    break_even_us,
    choose,
    covering_most,
    eager_candidate,
    measured_candidates,
    ratio,
)
from graphtune.tune.kv_budget import FixedBytes, KvBudget, kv_budget
from graphtune.tune.latency_model import LatencyModel
from graphtune.tune.memory_model import MemoryModel
from graphtune.tune.recommendation import (
    BOUND_MISSING,
    CHOSEN_MISSING,
    EAGER_MISSING,
    EngineAnswer,
    Limits,
    ListAnswer,
    Status,
)
from graphtune.tune.workload import Workload
from graphtune.units import GpuMemory, format_bytes, format_duration_s, format_us


@dataclass(frozen=True)
class Measurements:
    """Everything that a sweep and a device say, ready to answer with.

    ``fixed`` is null, for the reason ``why_no_budget``, where no budget can be drawn up. ``distinguishes_eager`` is
    false on a CPU, where a tape replay saves nothing over the eager step.
    """

    model: LatencyModel
    memory: MemoryModel
    noise: Noise
    disturbances: Disturbances
    gpu: GpuMemory | None
    fixed: FixedBytes | None
    why_no_budget: str
    device: DeviceFacts
    serving: Serving
    distinguishes_eager: bool


def answer_for(
    engine: Engine, workload: Workload, limits: Limits, of: Measurements
) -> tuple[EngineAnswer, tuple[Candidate, ...]]:
    """The answer, and the candidates that were within the limits."""
    asked = [Step(s.requests, s.weight, s.mean_kv_tokens or limits.context_tokens) for s in workload.decode if s.weight]
    bare = _Budgets(engine, limits, of, min(step.kv_tokens for step in asked))
    most = bare(None)
    if most is not None and not most.fits:
        return _nothing_fits(engine, _too_little(most, limits), most), ()
    possible = [step for step in asked if most is None or step.kv_tokens <= most.kv_tokens]
    steps = [step for step in possible if _has_figure(of.model, step)]
    if not steps:
        sizes = of.model.sizes("graph", of.model.main_context)
        message = f"the traffic has no step within the measured sizes, {sizes[0]} to {sizes[-1]} requests"
        return replace(_nothing_fits(engine, message, most), status="partial"), ()
    evaluator = Evaluator(steps, of.model)
    padding = engine.dispatch.decode
    lists = measured_candidates(evaluator, of.memory, padding, _largest_size(engine, of.serving))
    eager = eager_candidate(evaluator)
    if not of.distinguishes_eager:
        lists = covering_most(lists)  # where replay saves nothing, step times must not decide what runs eager
    within = tuple(candidate for candidate in lists if _allowed(candidate, limits, bare))
    rival = eager if of.distinguishes_eager else None
    choice = choose(within, rival)
    if choice is None:
        return _nothing_fits(engine, _nearest(lists, limits, bare, eager, of.memory), most), ()
    listed = _Lister(engine, of, bare, choice.chosen)
    chosen = listed(choice.chosen)
    budget = bare(choice.chosen)
    share = sum(step.weight for step in steps) / sum(step.weight for step in possible)
    complete = share == 1.0 and budget is not None
    absent = {} if budget is not None else {"memory": of.why_no_budget}
    if choice.runner_up is None:
        absent["runner_up"] = "no other candidate is within the limits"
    if eager is None:
        absent["eager"] = "eager steps were not measured at all of these sizes"
    answer = EngineAnswer(
        engine=engine.name,
        version=engine.version,
        dispatch=engine.dispatch,
        status="ok" if complete else "partial",
        message=_sentence(choice, eager, of) + _price_of_limits(choice, choose(lists, rival)),
        decode=chosen,
        default=_default(engine, evaluator, of, listed),
        eager=listed(eager) if eager is not None else None,
        ties=tuple(listed(tie) for tie in choice.ties),
        runner_up=listed(choice.runner_up) if choice.runner_up else None,
        memory=budget,
        flags=_flags(engine, choice.chosen, budget, of),
        steps_share=share,
        largest_step=max(step.requests for step in steps),
        most_coverage=max(candidate.evaluation.coverage for candidate in within),
        absent=absent,
    )
    return answer, within if eager is None else (eager, *within)


class _Budgets:
    """Budgets of one engine by candidate; None for all of them where no budget can be drawn up.

    At least the smallest step of the traffic and the KV tokens asked for must fit.
    """

    def __init__(self, engine: Engine, limits: Limits, of: Measurements, least_kv_tokens: float) -> None:
        self._of, self._limits = of, limits
        self._least = max(math.ceil(least_kv_tokens), limits.min_kv_tokens or 0)
        self._rule = engine.memory_rule(of.device, of.serving)

    def __call__(self, candidate: Candidate | None) -> KvBudget | None:
        cost = candidate.cost if candidate else None
        return self.of_bytes(cost.graph_bytes if cost else 0, cost.activation_peak_bytes if cost else None)

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


class _Lister:
    """Turns candidates of one engine into list answers, each compared with the chosen one."""

    def __init__(self, engine: Engine, of: Measurements, budgets: _Budgets, chosen: Candidate) -> None:
        self._unit = engine.dispatch.decode_unit
        self._of, self._budgets, self._chosen = of, budgets, chosen

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
            evidence=tuple(dict.fromkeys((*self._of.model.cell_ids, *(cost.cell_ids if cost else ())))),
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
            reason = f"no figure was measured for steps of {_listed(evaluation.without_figure)} requests"
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


def _default(engine: Engine, evaluator: Evaluator, of: Measurements, listed: _Lister) -> ListAnswer:
    """The engine's own list on the same traffic, under the engine's own padding rule."""
    sizes = engine.default_decode_sizes(of.device, of.serving)
    evaluation = evaluator.evaluate(sizes, engine.dispatch.decode_by_default or engine.dispatch.decode)
    return listed(Candidate(sizes, of.memory.cost(sizes, checked=False) if sizes else None, evaluation))


def _has_figure(model: LatencyModel, step: Step) -> bool:
    """True when the step lies within the measured sizes, on a graph or eager."""
    context = model.nearest_context(step.context_tokens)
    return step.requests <= model.largest("graph", context) or model.eager(step.requests, context) is not None


def _largest_size(engine: Engine, serving: Serving) -> int | None:
    """The largest size that an engine keeps as written: its request limit, except where lists are in tokens."""
    if serving.max_running_requests is None or engine.dispatch.decode_unit == "tokens":
        return None
    return serving.max_running_requests


Excess = Callable[[Candidate], tuple[str, float] | None]


def _excesses(limits: Limits, budgets: _Budgets) -> list[Excess]:
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


def _allowed(candidate: Candidate, limits: Limits, budgets: _Budgets) -> bool:
    return all(excess(candidate) is None for excess in _excesses(limits, budgets))


def _nearest(
    lists: tuple[Candidate, ...], limits: Limits, budgets: _Budgets, eager: Candidate | None, memory: MemoryModel
) -> str:
    """Why no list is within the limits: the one that misses the first missed limit by the least."""
    if not lists:
        failed = memory.failed_sizes()
        gate = f"; sizes {', '.join(map(str, failed))} failed the output check" if failed else ""
        return f"no list of this sweep was captured whole, checked and timed{gate}"
    for excess in _excesses(limits, budgets):
        missed = [(found[1], -len(c.sizes), c, found[0]) for c in lists if (found := excess(c)) is not None]
        if len(missed) == len(lists):
            _, _, nearest, words = min(missed, key=lambda row: row[:2])
            rest = f"; without graphs a step takes {format_us(eager.step_us)}" if eager is not None else ""
            return f"the nearest list ({_range(nearest.sizes)}) needs {words}{rest}"
    return "every list misses one limit or another, and no single limit is missed by all; loosen one of them"


def _too_little(budget: KvBudget, limits: Limits) -> str:
    need = f"{budget.needed_kv_tokens:,} KV tokens"
    return (
        f"weights, context, workspace and reserve leave {format_bytes(budget.kv_bytes)} for KV even without graphs; "
        f"{need} are short by {format_bytes(budget.short_by_bytes)}"
    )


def _nothing_fits(engine: Engine, message: str, budget: KvBudget | None) -> EngineAnswer:
    status: Status = "nothing_fits"
    absent = dict.fromkeys(("decode", "default", "eager", "runner_up", "flags", "largest_step"), "there is no answer")
    if budget is None:
        absent["memory"] = "no budget was drawn up"
    return EngineAnswer(
        engine=engine.name,
        version=engine.version,
        dispatch=engine.dispatch,
        status=status,
        message=message,
        decode=None,
        default=None,
        eager=None,
        ties=(),
        runner_up=None,
        memory=budget,
        flags=None,
        steps_share=0.0,
        largest_step=None,
        absent=absent,
    )


def _sentence(choice: Choice, eager: Candidate | None, of: Measurements) -> str:
    chosen = choice.chosen
    if not chosen.sizes:
        assert choice.runner_up is not None
        return _no_list_pays(choice.runner_up, chosen, of)
    at_most = "at most " if chosen.cost is not None and chosen.cost.provenance == "bound" else ""
    graph_bytes = at_most + format_bytes(chosen.graph_bytes)
    text = f"capture {_range(chosen.sizes)}: {format_us(chosen.step_us)} a step for {graph_bytes}"
    if of.distinguishes_eager and eager is not None:
        text += f", {eager.step_us / chosen.step_us:.2f} times as fast as {_eager_words(eager, of)}"
    if choice.within_noise and eager is not None:
        noise = ratio(chosen, eager).tolerance
        text += f"; no list gains more than the noise, {noise:.1%}, but every process shows a gain"
    return text


def _no_list_pays(best: Candidate, eager: Candidate, of: Measurements) -> str:
    """Says by how little, and how slow eager has to be for graphs to pay: a server's eager step is slower than ours."""
    more = break_even_us(best, eager)
    pays = "" if more is None else f"; it pays once eager steps take {format_us(more)} longer"
    return (
        f"no list pays on this device: the nearest to it, {_range(best.sizes)}, takes {format_us(best.step_us)} a step "
        f"against {_eager_words(eager, of)}{pays}"
    )


def _price_of_limits(choice: Choice, unlimited: Choice | None) -> str:
    """What the limits cost, where a list outside them is faster than what they leave."""
    if unlimited is None or not ratio(unlimited.chosen, choice.chosen).faster:
        return ""
    best = unlimited.chosen
    return f"; without the limits {_range(best.sizes)} would take {format_us(best.step_us)}"


def _eager_words(eager: Candidate, of: Measurements) -> str:
    if overhead := of.model.eager_overhead_us:
        return f"eager ({format_us(eager.step_us)}, of it {format_us(overhead)} as you stated)"
    return f"graphtune's own eager path ({format_us(eager.step_us)}, a lower bound of a server's)"


def _range(sizes: tuple[int, ...]) -> str:
    return f"{len(sizes)} sizes, {sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"size {sizes[0]} alone"


def _listed(requests: tuple[int, ...]) -> str:
    return f"{requests[0]} to {requests[-1]}" if len(requests) > 1 else str(requests[0])


def _flags(engine: Engine, chosen: Candidate, budget: KvBudget | None, of: Measurements) -> Flags:
    """Flags for the list, and for the engine's memory fraction where it has to differ from the engine's own."""
    fraction = budget.fraction if budget is not None and budget.fraction_changed else None
    return engine.flags(GraphPlan(decode=chosen.sizes, mem_fraction=fraction), of.serving, of.device)
