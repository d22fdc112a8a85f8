"""The answer for one engine: traffic that can occur, candidates within the limits, the choice, its budget and flags."""

from __future__ import annotations

from dataclasses import replace

from graphtune.engines.base import Engine, Flags, GraphPlan, Padding, Serving
from graphtune.stats import LEAST_TOLERANCE
from graphtune.tune.answer_words import gaps_too_long, price_of_limits, sentence
from graphtune.tune.beside_prefill import Beside, beside_prefill
from graphtune.tune.candidates import (
    COVERAGE_TOLERANCE,
    Candidate,
    Choice,
    Evaluator,
    Step,
    choose,
    covering_most,
    eager_candidate,
    measured_candidates,
)
from graphtune.tune.current_launch import Comparing, Current, compare_current
from graphtune.tune.kv_budget import KvBudget, Round
from graphtune.tune.latency_model import LatencyModel
from graphtune.tune.limits import Budgets, allowed, nearest_miss, too_little
from graphtune.tune.list_answer import Lister
from graphtune.tune.measurements import Measurements, Traffic
from graphtune.tune.objective import Judge, choose_for, served
from graphtune.tune.prefill_only import answer_for_prefill
from graphtune.tune.recommendation import EngineAnswer, Limits, ListAnswer
from graphtune.tune.solved_candidates import solved_candidates
from graphtune.tune.workload import Workload


def answer_for(
    engine: Engine,
    workload: Workload,
    limits: Limits,
    of: Measurements,
    *,
    judge: Judge | None = None,
    current: Current | None = None,
) -> tuple[EngineAnswer, tuple[Candidate, ...]]:
    """The answer, and the candidates that were within the limits. ``judge`` tells what lists give where the histogram
    alone does not; ``current`` is compared with the recommended list."""
    if not workload.decode:
        return replace(answer_for_prefill(engine, workload, limits, of), workload=workload), ()
    rounds: list[Round] = []
    largest = _largest_size(engine, of.serving)
    while True:
        answer, candidates = _answer(engine, workload, limits, of, judge, current, largest)
        budget, list_of = answer.memory, answer.decode
        if budget is None or list_of is None:
            break
        pool = engine.request_pool(budget.kv_tokens, of.serving)
        sizes = list_of.capture_sizes
        rounds.append(Round(len(sizes), max(sizes, default=0), budget.graph_bytes, budget.kv_tokens, pool))
        answer = replace(answer, memory=replace(budget, rounds=tuple(rounds)))
        if rounds[-1].settled:
            break
        largest = pool
    return replace(answer, workload=workload), candidates


def _answer(
    engine: Engine,
    workload: Workload,
    limits: Limits,
    of: Measurements,
    judge: Judge | None,
    current: Current | None,
    largest_size: int | None,
) -> tuple[EngineAnswer, tuple[Candidate, ...]]:
    asked = [Step(s.requests, s.weight, s.mean_kv_tokens or limits.context_tokens) for s in workload.decode if s.weight]
    bare = Budgets(engine, limits, of, min(step.kv_tokens for step in asked))
    most = bare(None)
    if most is not None and not most.fits:
        return nothing_fits(engine, too_little(most, limits), most), ()
    possible = [step for step in asked if most is None or step.kv_tokens <= most.kv_tokens]
    placed = [(step, _placed(of.model, step)) for step in possible]
    steps = [at for _, at in placed if at is not None]
    if not steps:
        sizes = of.model.sizes("graph", of.model.main_context)
        message = f"the traffic has no step within the measured sizes, {sizes[0]} to {sizes[-1]} requests"
        return replace(nothing_fits(engine, message, most), status="partial"), ()
    evaluator = Evaluator(steps, of.model)
    padding = engine.dispatch.decode
    lists = _candidates(evaluator, of, padding, largest_size, limits)
    eager = eager_candidate(evaluator)
    rival = eager if of.distinguishes_eager else None
    beside = beside_prefill(engine, workload, limits, of, bare, evaluator, lists, rival)
    within = tuple(candidate for candidate in beside.decode if allowed(candidate, beside.limits, beside.budgets))
    judge = judge or Judge(lambda one, kv_tokens: served(evaluator, one.sizes, padding, kv_tokens))
    choice = choose_for(limits, within, rival, judge, beside.budgets.kv_tokens)
    if choice is None:
        missed = nearest_miss(lists, beside.limits, beside.budgets, eager, of.memory)
        return nothing_fits(engine, gaps_too_long(limits, within, judge) if within else missed, most), ()
    unpadded = engine.unpadded()
    if unpadded is not None and _gains_unpadded(choice, evaluator, of, limits, beside, rival, largest_size):
        answer, candidates = _answer(unpadded, workload, limits, of, judge, current, largest_size)
        if answer.decode is not None and answer.decode.capture_sizes:
            return answer, candidates
    listed = Lister(engine, of, beside.budgets, choice.chosen, evaluator)
    budget = beside.budgets(choice.chosen)
    asked_weight = sum(step.weight for step in possible)
    share = sum(step.weight for step in steps) / asked_weight
    moved = sum(step.weight for step, at in placed if at is not None and at is not step) / asked_weight
    absent = dict(beside.absent) if budget is not None else {**beside.absent, "memory": of.why_no_budget}
    if choice.runner_up is None:
        absent["runner_up"] = "no other candidate is within the limits"
    if eager is None:
        absent["eager"] = "eager steps were not measured at all of these sizes"
    comparing = Comparing(engine, evaluator, of, limits, beside.budgets, listed, choice.chosen)
    answer = EngineAnswer(
        engine=engine.name,
        version=engine.version,
        dispatch=engine.dispatch,
        status="ok" if share == 1.0 and budget is not None else "partial",
        message=sentence(choice, eager, of, pads=padding != "exact") + _price_of_limits(limits, choice, beside, rival),
        decode=listed.explained(choice.chosen),
        default=_default(engine, evaluator, of, listed),
        eager=listed.explained(eager) if eager is not None else None,
        ties=tuple(listed(tie) for tie in choice.ties),
        runner_up=listed.explained(choice.runner_up) if choice.runner_up else None,
        memory=budget,
        flags=_flags(engine, choice.chosen, beside.prefill, budget, of),
        steps_share=share,
        shorter_share=moved,
        largest_step=max(step.requests for step in steps),
        most_coverage=max(candidate.evaluation.coverage for candidate in within),
        kv_holds=max(step.requests for step in possible) if len(possible) < len(asked) else None,
        current=compare_current(current, comparing) if current is not None else None,
        absent=absent,
    )
    answer = replace(answer, **beside.answers(bare, choice.chosen), joint=beside.joint(choice.chosen, budget))
    return answer, within if eager is None else (eager, *within)


def _gains_unpadded(
    choice: Choice,
    evaluator: Evaluator,
    of: Measurements,
    limits: Limits,
    beside: Beside,
    rival: Candidate | None,
    largest_size: int | None,
) -> bool:
    """Whether some list without padding is to be chosen before the chosen one with it: where a long replay stands for a
    short eager step. Asked for the mean step alone."""
    if not of.distinguishes_eager or limits.objective != "step" or limits.slo_inter_token_us is not None:
        return False
    # A list that is no faster can only be chosen for serving more steps.
    may_serve_more = choice.chosen.evaluation.coverage < 1 - COVERAGE_TOLERANCE
    exact = solved_candidates(
        evaluator,
        of.memory,
        "exact",
        largest_size=largest_size,
        max_graph_bytes=limits.max_graph_bytes,
        below_us=choice.chosen.step_us * (1 + (LEAST_TOLERANCE if may_serve_more else -LEAST_TOLERANCE)),
    )
    found = choose((one for one in exact if allowed(one, beside.limits, beside.budgets)), rival)
    if found is None or not found.chosen.sizes:
        return False
    if not choice.chosen.sizes:
        return True
    of_both = choose((choice.chosen, found.chosen), rival)
    return of_both is not None and of_both.chosen is found.chosen


def _price_of_limits(limits: Limits, choice: Choice, beside: Beside, rival: Candidate | None) -> str:
    """In steps; another objective gives steps away by itself."""
    return price_of_limits(choice, choose(beside.decode, rival)) if limits.objective == "step" else ""


def _default(engine: Engine, evaluator: Evaluator, of: Measurements, listed: Lister) -> ListAnswer:
    """The engine's own list on the same traffic, under the engine's own padding rule."""
    sizes = engine.default_decode_sizes(of.device, of.serving)
    padding = engine.dispatch.decode_by_default or engine.dispatch.decode
    cost = of.memory.cost(sizes, checked=False) if sizes else None
    return listed.explained(Candidate(sizes, cost, evaluator.evaluate(sizes, padding)), padding)


def _candidates(
    evaluator: Evaluator, of: Measurements, padding: Padding, largest_size: int | None, limits: Limits
) -> tuple[Candidate, ...]:
    """Measured lists and their prefixes, then what the solver finds beside them; none that hardly serves a step."""
    most_bytes = limits.max_graph_bytes
    traffic = Traffic(evaluator.steps, padding, largest_size, most_bytes)
    if traffic not in of.candidates:
        measured = measured_candidates(evaluator, of.memory, padding, largest_size)
        if of.distinguishes_eager:
            known = {candidate.sizes for candidate in measured}
            solved = solved_candidates(
                evaluator, of.memory, padding, largest_size=largest_size, max_graph_bytes=most_bytes
            )
            found = (*measured, *(candidate for candidate in solved if candidate.sizes not in known))
        else:  # where replay saves nothing, step times must not decide what runs eager
            found = covering_most(measured)
        of.candidates[traffic] = tuple(one for one in found if one.evaluation.coverage > COVERAGE_TOLERANCE)
    return of.candidates[traffic]


def _placed(model: LatencyModel, step: Step) -> Step | None:
    """The step at a context that its size was measured at, on a graph or eager: its own, or the longest one below it.
    None for a size that was measured at neither."""
    context = model.nearest_context(step.context_tokens)
    if _has_figure(model, step.requests, context):
        return step
    shorter = (one for one in reversed(model.contexts()) if one < context)
    at = next((one for one in shorter if _has_figure(model, step.requests, one)), None)
    return None if at is None else replace(step, context_tokens=at)


def _has_figure(model: LatencyModel, requests: int, context: float) -> bool:
    return requests <= model.largest("graph", context) or model.eager(requests, context) is not None


def _largest_size(engine: Engine, serving: Serving) -> int | None:
    """The largest size that an engine keeps as written: its request limit, except where lists are in tokens."""
    if serving.max_running_requests is None or engine.dispatch.decode_unit == "tokens":
        return None
    return serving.max_running_requests


FIELDS = (
    *("decode", "default", "eager", "runner_up", "flags", "largest_step"),
    *("prefill", "prefill_default", "prefill_eager", "prefill_share", "joint"),
)


def nothing_fits(engine: Engine, message: str, budget: KvBudget | None) -> EngineAnswer:
    """An answer without a list."""
    absent = dict.fromkeys(FIELDS, "there is no answer")
    if budget is None:
        absent["memory"] = "no budget was drawn up"
    return EngineAnswer.without_lists(engine, message, absent, budget)


def _flags(
    engine: Engine, chosen: Candidate, prefill: Candidate | None, budget: KvBudget | None, of: Measurements
) -> Flags:
    """Flags for the lists, for the asked requests as far as KV holds them, and for the engine's memory fraction where
    it has to differ from the engine's own."""
    fraction = budget.fraction if budget is not None and budget.fraction_changed else None
    plan = GraphPlan(decode=chosen.sizes, mem_fraction=fraction)
    if prefill is not None:
        backend = prefill.cost.of.backend if prefill.cost is not None else None
        plan = replace(plan, prefill=prefill.sizes, prefill_backend=backend)
    serving = of.serving
    if serving.max_running_requests is not None and budget is not None:
        fits = max(1, min(serving.max_running_requests, budget.max_running_requests))
        serving = replace(serving, max_running_requests=fits)
    return engine.flags(plan, serving, of.device)
