"""The answer for a server that only prefills: one list in tokens, and decode graphs off."""

from __future__ import annotations

from dataclasses import replace

from graphtune.engines.base import Engine, GraphPlan
from graphtune.tune.answer_words import range_of
from graphtune.tune.beside_prefill import Beside
from graphtune.tune.candidates import Choice, choose
from graphtune.tune.limits import Budgets, allowed, too_little
from graphtune.tune.list_answer import Lister
from graphtune.tune.measurements import Measurements
from graphtune.tune.prefill_choice import PrefillLists, prefill_lists
from graphtune.tune.recommendation import EngineAnswer, Limits
from graphtune.tune.workload import Workload
from graphtune.units import format_bytes, format_us

NO_DECODE = "the traffic has no decode steps"
OF_DECODE = ("decode", "default", "eager", "runner_up", "largest_step", "joint")


def answer_for_prefill(engine: Engine, workload: Workload, limits: Limits, of: Measurements) -> EngineAnswer:
    """The best prefill list within the limits, on traffic without decode steps."""
    budgets = Budgets(engine, limits, of, 1)
    bare = budgets(None)
    lists = prefill_lists(engine, workload, of)
    if isinstance(lists, str):
        return _without(engine, lists)
    if bare is not None and not bare.fits:
        return _without(engine, too_little(bare, limits))
    within = [one for one in lists.lists if allowed(one, limits, budgets)]
    choice = choose(within, lists.eager, cover=False) or Choice(lists.eager, (), None)
    chosen, budget = choice.chosen, budgets(choice.chosen)
    beside = Beside(engine, of, (), limits, budgets, lists, chosen)
    backend = chosen.cost.of.backend if chosen.cost is not None else None
    plan = GraphPlan(decode=(), prefill=chosen.sizes, prefill_backend=backend)
    if budget is not None and budget.fraction_changed:
        plan = replace(plan, mem_fraction=budget.fraction)
    absent = dict.fromkeys(OF_DECODE, NO_DECODE)
    listed = Lister(engine, of, budgets, chosen, lists.evaluator(chosen), "prefill")
    answer = EngineAnswer(
        engine=engine.name,
        version=engine.version,
        dispatch=engine.dispatch,
        status="ok" if lists.share == 1.0 and budget is not None else "partial",
        message=_sentence(choice, lists),
        decode=None,
        default=None,
        eager=None,
        ties=tuple(listed(tie) for tie in choice.ties),
        runner_up=None,
        memory=budget,
        flags=engine.flags(plan, of.serving, of.device),
        steps_share=lists.share,
        largest_step=None,
        absent=absent if budget is not None else {**absent, "memory": of.why_no_budget},
    )
    return replace(answer, **beside.answers(budgets, None))


def _sentence(choice: Choice, lists: PrefillLists) -> str:
    chosen, eager = choice.chosen, lists.eager
    if not chosen.sizes:
        return f"no prefill list pays: eager takes {format_us(eager.step_us)} a step, a lower bound of a server's"
    return (
        f"capture {range_of(chosen.sizes)} tokens: {format_us(chosen.step_us)} a prefill step for "
        f"{format_bytes(chosen.graph_bytes)}, {eager.step_us / chosen.step_us:.2f} times as fast as graphtune's own "
        f"eager path ({format_us(eager.step_us)}, a lower bound of a server's)"
    )


def _without(engine: Engine, reason: str) -> EngineAnswer:
    missing = ("prefill", "prefill_default", "prefill_eager", "prefill_share", "memory", "flags")
    absent = {**dict.fromkeys(OF_DECODE, NO_DECODE), **dict.fromkeys(missing, reason)}
    return EngineAnswer.without_lists(engine, reason, absent)
