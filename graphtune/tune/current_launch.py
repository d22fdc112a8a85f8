"""What a server runs now, from its launch command or its log, and what changing it would bring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from graphtune.engines import ENGINES, engine_named
from graphtune.engines.base import DeviceFacts, Edit, Engine, Flags, Padding, Serving
from graphtune.engines.launch import Launch
from graphtune.engines.launch_source import launch_of
from graphtune.errors import InputError
from graphtune.stats import LEAST_TOLERANCE
from graphtune.tune.candidates import COVERAGE_TOLERANCE, Candidate, Evaluator, ratio
from graphtune.tune.kv_budget import KvBudget
from graphtune.tune.limits import Budgets
from graphtune.tune.list_answer import Lister
from graphtune.tune.log_summary import summarise_file
from graphtune.tune.measurements import Measurements
from graphtune.tune.recommendation import CurrentAnswer, Limits, ListAnswer
from graphtune.tune.verdict import edit_text
from graphtune.units import format_bytes, format_duration_s, format_us

WHERE = "--current"

SETTINGS_FILE = "graphs.yaml"
"""What a command to paste calls the file of settings that is printed beside it."""


@dataclass(frozen=True)
class Current:
    """``sizes`` are in requests, ascending; empty where decode runs without graphs. ``launch`` is null for a log.

    ``max_running_requests``, ``mem_fraction``, ``ranks`` (of tensor parallelism) and ``weights_bytes`` (of one rank)
    are null where they are not stated.
    """

    engine: str
    source: str
    sizes: tuple[int, ...]
    padding: Padding
    launch: Launch | None
    max_running_requests: int | None = None
    mem_fraction: float | None = None
    ranks: int | None = None
    weights_bytes: int | None = None


def served_as(current: Current, engine: Engine, serving: Serving) -> Serving:
    """The deployment as the current one states it. SGLang's fraction follows from the list, so that it is not kept."""
    limit = serving.max_running_requests or current.max_running_requests
    follows = engine.memory_rule(DeviceFacts(None), Serving()).base == "free_before_load"
    return replace(serving, max_running_requests=limit, mem_fraction=None if follows else current.mem_fraction)


def read_current(text: str, engine: str | None, device: DeviceFacts) -> Current:
    """A launch command (as ``lint`` takes it), or the log in a file of that name. ``engine`` is asked for only where
    neither names it. Raises InputError."""
    if Path(text).is_file():
        return _from_log(text, engine)
    named, launch, _ = launch_of([text.strip()], engine, None)
    if named is None:
        raise InputError("does not say which engine it starts", where=WHERE, action="Add --engine.")
    return _from_launch(ENGINES[named], launch, device)


def _from_launch(engine: Engine, launch: Launch, device: DeviceFacts) -> Current:
    resolution = engine.resolve(launch, device)
    if resolution.refusals:
        raise InputError(
            f"the engine refuses it: {resolution.refusals[0].message}",
            where=WHERE,
            action="`graphtune lint` says more.",
        )
    run = next((run for run in resolution.phases if run.phase == "decode"), None)
    if run is None:
        raise InputError("does not say what decode captures", where=WHERE)
    if run.effective.width != 1:
        raise InputError(
            "computes several tokens of each request in a step (speculative decoding); such steps were not measured",
            where=WHERE,
        )
    return Current(
        engine=engine.name,
        source="command",
        sizes=run.effective.sizes if run.graphs else (),
        padding=run.padding,
        launch=launch,
        max_running_requests=run.reach.most if run.reach.stated else None,
        mem_fraction=_fraction(engine, launch, device),
        ranks=resolution.ranks,
    )


def _from_log(name: str, engine: str | None) -> Current:
    summary = summarise_file(name, engine_named(engine).name if engine is not None else None)
    boot = summary.boots[-1]
    if summary.engine is None:
        raise InputError("does not say which engine wrote it", where=name, action="Add --engine.")
    of = ENGINES[summary.engine]
    listed = next(((one.sizes, one.width) for one in boot.captured("decode") if one.sizes), None)
    if listed is None:
        raise InputError("says nothing of captured decode sizes", where=name, action="Give the launch command instead.")
    sizes, width = listed
    if (width or 1) != 1 or boot.settings.get("spec_tokens"):
        raise InputError("is of a server with speculative decoding; such steps were not measured", where=name)
    limit = boot.settings.get("max_num_seqs", boot.settings.get("max_running_requests"))
    fraction = boot.settings.get("gpu_memory_utilization", boot.settings.get("mem_fraction_static"))
    return Current(
        engine=of.name,
        source="log",
        sizes=tuple(sorted(sizes)),
        padding=of.dispatch.decode_by_default or of.dispatch.decode,
        launch=None,
        max_running_requests=limit if isinstance(limit, int) and limit > 0 else None,
        mem_fraction=fraction if isinstance(fraction, float) and 0 < fraction <= 1 else None,
        ranks=ranks if isinstance(ranks := boot.settings.get("tp_size"), int) else None,
        weights_bytes=boot.memory.get("weights"),
    )


def _fraction(engine: Engine, launch: Launch, device: DeviceFacts) -> float | None:
    """The memory fraction that a launch states, under the name of the engine's own rule."""
    setting = engine.memory_rule(device, Serving()).setting
    plain = setting.lstrip("-").replace("_", "-")
    stated = [option.values[0] for option in launch.options if option.values and _plain(option.name) == plain]
    nested = launch.setting(tuple(setting.split(".")))
    try:
        value = float(stated[-1] if stated else nested)
    except (TypeError, ValueError):
        return None
    return value if 0 < value <= 1 else None


def _plain(option: str) -> str:
    return option.lstrip("-").replace("_", "-")


@dataclass(frozen=True)
class Comparing:
    """What the current list is compared with: the recommended one, as chosen for the same steps."""

    engine: Engine
    evaluator: Evaluator
    of: Measurements
    limits: Limits
    budgets: Budgets
    listed: Lister
    chosen: Candidate


def compare_current(current: Current, to: Comparing) -> CurrentAnswer:
    """The current list on the same traffic, and what changing it to the recommended one brings."""
    cost = to.of.memory.cost(current.sizes, checked=False) if current.sizes else None
    candidate = Candidate(current.sizes, cost, to.evaluator.evaluate(current.sizes, current.padding))
    answer, recommended = to.listed.explained(candidate, current.padding), to.listed.explained(to.chosen)
    if current.mem_fraction is not None:
        answer = replace(answer, kv_tokens=_kv_tokens(current, candidate, to))
    budget = to.budgets(to.chosen)
    changes = {
        "step_us": _difference(recommended, answer, lambda of: of.expected_step_us),
        "kv_tokens": _difference(recommended, answer, lambda of: of.kv_tokens),
        "graph_bytes": _difference(recommended, answer, lambda of: of.graph_bytes),
        "capture_s": _difference(recommended, answer, lambda of: of.capture_s),
    }
    leave_it, message = _advice(candidate, answer, recommended, to.chosen)
    absent = {f"change.{name}": "it is not known of both lists" for name, value in changes.items() if value is None}
    command: Flags | None = None
    edits: tuple[str, ...] = ()
    if leave_it:
        absent["command"] = "the launch is good as it is"
    elif current.launch is None:
        absent["command"] = "a log does not tell the launch command; these are the flags to change in it"
    else:
        changed = _changed(current, current.launch, budget, to)
        if changed is None:
            absent["command"] = (
                "its own settings stand in the way of the recommended list; the flags to bring in by hand"
            )
        else:
            command, edits = _to_paste(changed.flags()), edit_text(current.launch, changed)
    return CurrentAnswer(current.source, answer, current.padding, leave_it, message, changes, edits, command, absent)


def _kv_tokens(current: Current, candidate: Candidate, to: Comparing) -> int | None:
    """KV tokens under the stated fraction. SGLang sizes its cache before it captures: graphs then take of the rest."""
    serving = replace(to.of.serving, mem_fraction=current.mem_fraction)
    budgets = Budgets(to.engine, to.limits, replace(to.of, serving=serving), 1)
    peak = candidate.cost.activation_peak_bytes if candidate.cost else None
    before_capture = to.engine.memory_rule(to.of.device, serving).base == "free_before_load"
    budget = budgets.of_bytes(0 if before_capture else candidate.graph_bytes, peak)
    return None if budget is None else budget.kv_tokens


def _to_paste(command: Flags) -> Flags:
    """The command with the option that hands it its settings, which are to be written to that file."""
    if not command.args or command.yaml is None:
        return command
    return replace(command, args=(*command.args, "--config", SETTINGS_FILE))


def _difference(one: ListAnswer, other: ListAnswer, figure: Callable[[ListAnswer], float | None]) -> float | None:
    new, old = figure(one), figure(other)
    return None if new is None or old is None else new - old


def _advice(candidate: Candidate, current: ListAnswer, recommended: ListAnswer, chosen: Candidate) -> tuple[bool, str]:
    """Whether to leave it, and why in one sentence."""
    if candidate.evaluation.expected_step_us is None:
        return False, f"how the current list compares is not known: {current.absent['expected_step_us']}"
    compared = ratio(chosen, candidate)
    parts = [f"{_signed(chosen.step_us - candidate.step_us, format_us)} a step"]
    for new, old, words in (
        (recommended.kv_tokens, current.kv_tokens, lambda n: f"{n:,.0f} KV tokens"),
        (recommended.graph_bytes, current.graph_bytes, lambda n: f"{format_bytes(int(n))} of graphs"),
        (recommended.capture_s, current.capture_s, lambda s: f"{format_duration_s(s)} to capture"),
    ):
        if new is not None and old is not None and new != old:
            parts.append(_signed(new - old, words))
    change = ", ".join(parts)
    room = _grows(recommended.kv_tokens, current.kv_tokens)
    covers = chosen.evaluation.coverage > candidate.evaluation.coverage + COVERAGE_TOLERANCE
    if compared.faster or room or covers:
        why = "faster" if compared.faster else "more room for KV" if room else "more steps on graphs"
        return False, f"change it ({why}): {change}"
    if ratio(candidate, chosen).faster:
        return True, f"leave it: what your limits allow beside it is slower and leaves no more KV ({change})"
    within = f"within {max(compared.tolerance, LEAST_TOLERANCE):.1%}"
    return True, f"leave it: the recommended list is no faster ({within}) and leaves no more KV ({change})"


def _grows(new: int | None, old: int | None) -> bool:
    return new is not None and old is not None and new > old * (1 + LEAST_TOLERANCE)


def _signed(value: float, words: Callable[[float], str]) -> str:
    return f"{'−' if value < 0 else '+'}{words(abs(value))}"


def _changed(current: Current, launch: Launch, budget: KvBudget | None, to: Comparing) -> Launch | None:
    """The launch with the recommended list, padding, limit and fraction; None where its own settings do not let them
    through."""
    padding = to.engine.dispatch.decode
    edits = [Edit("sizes", "decode", to.chosen.sizes)] if to.chosen.sizes else [Edit("mode", "decode", text="disabled")]
    if to.chosen.sizes and current.padding != padding:
        edits.append(Edit("padding", on=padding != "exact"))
    if to.limits.max_running_requests is not None:
        edits.append(Edit("limit", number=to.limits.max_running_requests))
    sized_first = budget is not None and budget.fraction_base == "free_before_load"
    if budget is not None and (budget.fraction_changed or (sized_first and current.mem_fraction is not None)):
        edits.append(Edit("fraction", fraction=budget.fraction))
    changed: Launch | None = launch
    for edit in edits:
        changed = to.engine.edit(changed, edit) if changed is not None else None
    if changed is None:
        return None
    resolution = to.engine.resolve(changed, to.of.device)
    run = next((run for run in resolution.phases if run.phase == "decode"), None)
    if run is None or resolution.refusals or (run.effective.sizes if run.graphs else ()) != to.chosen.sizes:
        return None
    return changed if run.padding == padding or not run.graphs else None
