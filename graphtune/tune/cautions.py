"""What limits an answer: each with a cause and the next action."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphtune.results import Environment, ModelFacts
from graphtune.stats import LEAST_TOLERANCE, Disturbances
from graphtune.store import TORN_LINE, Sweep
from graphtune.tune.candidates import COVERAGE_TOLERANCE, bucket_for
from graphtune.tune.measurements import Measurements
from graphtune.tune.recommendation import Caution, EngineAnswer, Limits
from graphtune.tune.solved_candidates import checked_sizes
from graphtune.units import MIB, format_bytes, format_us

UNEXPLAINED_LIMIT_BYTES = 16 * MIB

LEAST_CHARGED = 0.01
"""Share of steps charged as full buckets below which nothing is said of it."""

THIN_TRAFFIC = 1.5
"""Times as long a step of one request may take under a list as with a size of its own, without a word about it."""


def of(
    sweep: Sweep,
    environment: Environment | None,
    facts: ModelFacts | None,
    measurements: Measurements,
    limits: Limits,
    answers: Sequence[EngineAnswer],
) -> tuple[Caution, ...]:
    """All cautions that apply, the ones that change most of the answer first."""
    return (
        *_about_device(sweep, environment, measurements),
        *_about_sweep(sweep, facts, measurements),
        *_about_traffic(measurements, limits, answers),
        *_about_budget(measurements, answers),
    )


def _about_device(sweep: Sweep, environment: Environment | None, of: Measurements) -> Iterator[Caution]:
    if not of.distinguishes_eager:
        yield Caution(
            "cpu_not_distinguished",
            "This sweep ran on a CPU, where replaying a recording saves nothing: it checks the machinery and is no "
            "advice. Eager and graphs are not distinguished here.",
            "Sweep on the GPU that will serve.",
        )
    if of.gpu and environment and environment.nvml_total_bytes is not None:
        apart = abs(of.gpu.nvml_total_bytes - environment.nvml_total_bytes)
        if apart >= MIB:
            yield Caution(
                "other_card",
                f"Step times and seconds of capture are those of {sweep.device_name} and do not carry over to the card "
                f"asked for; memory does.",
                "Sweep on that card before relying on the times.",
            )
    if of.deployment.shard is not None and environment is not None:
        yield Caution(
            "other_shard",
            f"Weights and KV cache are those of one rank of {of.deployment.shard}; step times and graph memory are "
            f"those of what was swept.",
            f"Sweep with --set shard={of.deployment.shard}.",
        )
    if of.gpu and of.gpu.cuda_total_assumed:
        yield Caution(
            "cuda_total_assumed",
            "What a process can have of that card was not measured: 600 MiB less than nvidia-smi's total is assumed.",
            "Sweep on that card; a difference of some hundred MiB is usual.",
        )
    if environment and environment.throttle_reasons:
        yield Caution(
            "throttled",
            f"The GPU was throttled while it was measured: {', '.join(environment.throttle_reasons)}.",
            "Cool it or raise its power limit, then sweep with --fresh.",
        )
    if environment and environment.other_processes:
        yield Caution(
            "other_processes",
            f"{environment.other_processes} other processes used the GPU during the sweep.",
            "Free the GPU, then sweep with --fresh.",
        )


def _about_sweep(sweep: Sweep, facts: ModelFacts | None, of: Measurements) -> Iterator[Caution]:
    if sweep.damaged_lines:
        lines = ", ".join(str(line) for line in sweep.damaged_lines)
        yield Caution(
            "damaged_lines",
            f"cells.jsonl is damaged: line {lines} cannot be read and what was measured there is left out.",
            "Run the same sweep again: it measures the missing cells.",
        )
    if sweep.finished_at is None:
        yield Caution(
            "unfinished", "The sweep has not finished: figures may change.", "Run the same sweep command; it resumes."
        )
    broken = [cell for cell in sweep.cells if cell.status != "ok"]
    if broken:
        yield Caution(
            "failed_cells",
            f"{len(broken)} of {len(sweep.cells)} cells failed; what they would have measured is missing.",
            "Read their reasons in the report, then sweep with --retry-failed.",
        )
    if failed := of.memory.failed_sizes():
        sizes = ", ".join(map(str, failed))
        yield Caution(
            "gate_failed",
            f"Replay differed from eager at sizes {sizes}: lists that use them are not recommended.",
            "Read the gate section of the report for the operation.",
        )
    ledgers = [cell.ledger for cell in sweep.cells if cell.ledger is not None]
    worst = max((ledger.unexplained_bytes or 0 for ledger in ledgers), default=0)
    apart = max((ledger.disagreement_bytes or 0 for ledger in ledgers), default=0)
    if max(worst, apart) > UNEXPLAINED_LIMIT_BYTES:
        yield Caution(
            "bytes_unexplained",
            f"Two readings of device memory differ by up to {format_bytes(apart)}, and {format_bytes(worst)} have no "
            "listed cause.",
            "Make sure that nothing else uses the GPU, then sweep with --fresh.",
        )
    if len(of.model.processes) < 2:
        yield Caution(
            "noise_assumed",
            f"Steps were timed in one process only, so a tolerance of {LEAST_TOLERANCE:.0%} is assumed: how far two "
            "processes disagree is not known.",
            "Set processes: 2 in the recipe and sweep again; it resumes.",
        )
    if of.disturbances.disturbed:
        yield _disturbed(of.disturbances)
    yield from _torn(sweep)
    if facts and facts.shard_of > 1:
        yield Caution(
            "shard",
            f"The sweep measured one rank's shapes of {facts.shard_of}, without collectives: a served step is longer.",
            "Compare candidates with each other, not with a server's times.",
        )
    backends = sorted({point.attention for cell in sweep.cells for point in cell.points} - {of.model.attention})
    if backends:
        yield Caution(
            "attention_left_out",
            f"Figures are those of {of.model.attention}; points of {', '.join(backends)} were left out.",
            "Sweep one attention backend at a time to ask about another.",
        )


def _disturbed(of: Disturbances) -> Caution:
    by_none = f"; {of.used} of them were measured undisturbed by no process" if of.used else ""
    return Caution(
        "disturbed",
        f"{of.disturbed} of {of.medians} step times were taken while the machine was disturbed, as by other work on "
        f"its CPU{by_none}. A decode step among them counts by its device time and the host's part of sizes near it, "
        "where these were undisturbed.",
        "Sweep with --fresh on a quieter machine if their share is large.",
    )


def _torn(sweep: Sweep) -> Iterator[Caution]:
    for note in sweep.notes:
        if TORN_LINE in note:
            yield Caution("torn_line", f"{note}.", "Run the same sweep again: it measures the missing cell.")


def _deciding_disturbed(of: Measurements, answers: Sequence[EngineAnswer]) -> Iterator[Caution]:
    """Sizes of the lists shown as recommended that were only measured while something disturbed the machine."""
    found: dict[str, None] = {}
    for answer in answers if of.distinguishes_eager else ():
        if answer.decode is None or answer.workload is None:
            continue
        sizes = answer.decode.capture_sizes
        top = sizes[-1] if sizes else 0
        above = {share.requests for share in answer.workload.decode if share.requests > top and share.weight}
        for at in sorted(of.model.disturbed, key=lambda at: (at.size, at.context_tokens)):
            graph = at.execution == "graph" and at.size in sizes
            if graph or (at.execution == "eager" and at.size in above):
                how = "on a graph" if graph else "eager"
                found[f"{at.size} request{'s' * (at.size > 1)} {how} at {at.context_tokens:,} tokens"] = None
    if found:
        listed = list(found)
        rest = f" and {len(listed) - 6} more" if len(listed) > 6 else ""
        yield Caution(
            "disturbed_decides",
            f"The recommendation rests on steps that no process measured undisturbed: {', '.join(listed[:6])}{rest}.",
            "Sweep with --fresh on a quieter machine before you rely on these sizes.",
        )


def _about_common_list(of: Measurements, answers: Sequence[EngineAnswer]) -> Iterator[Caution]:
    """Sizes that one list for both phases could not take, because prefill was not checked at them."""
    for answer in answers:
        if answer.joint is None or not answer.joint.one_list or not answer.joint.prefill_sizes:
            continue
        checked = checked_sizes(of.prefill_memory[answer.joint.prefill_backend])
        if left_out := [str(size) for size in checked_sizes(of.memory) if size not in checked]:
            listed = ", ".join(left_out[:6]) + (", ..." if len(left_out) > 6 else "")
            yield Caution(
                "common_list_lacks_sizes",
                f"{answer.engine} has one list for both phases, so {len(left_out)} decode sizes that were not checked "
                f"for prefill are not in it: {listed}.",
                "Add the engine's list to prefill in the recipe and sweep again; it resumes.",
            )


def _about_traffic(of: Measurements, limits: Limits, answers: Sequence[EngineAnswer]) -> Iterator[Caution]:
    yield from _about_trace(answers)
    yield from _deciding_disturbed(of, answers)
    yield from _about_common_list(of, answers)
    measured = of.model.contexts()
    workloads = [answer.workload for answer in answers if answer.workload is not None]
    contexts = {share.mean_kv_tokens or limits.context_tokens for workload in workloads for share in workload.decode}
    outside = sorted(context for context in contexts if of.model.nearest_context(context) != context)
    if outside:
        longer = ", so that steps take longer than is shown" if outside[-1] > measured[-1] else ""
        yield Caution(
            "context_outside_measured",
            f"Contexts from {outside[0]:,.0f} to {outside[-1]:,.0f} tokens lie outside the measured {measured[0]:,} to "
            f"{measured[-1]:,}: the nearest measured one stands in{longer}.",
            "Add the context to the recipe and sweep again; it resumes.",
        )
    answered = [answer for answer in answers if answer.decode is not None]
    if charged := {a.engine: share for a in answered if (share := _charged_as_full(of, a)) > LEAST_CHARGED}:
        shares = ", ".join(f"{share:.0%} in {engine}" for engine, share in charged.items())
        yield Caution(
            "padding_not_timed",
            f"Of some steps it was not timed what padding to their bucket takes ({shares}): padded rows are charged as "
            "full ones there, which makes padding look dearer than it is.",
            "Sweep again: the same command resumes and times what is missing, with --retry-failed what failed as well. "
            "Batches smaller than every size need a smaller size in the recipe.",
        )
    cut = [a for a in answered if a.kv_holds is not None]
    if held := [f"{a.kv_holds} in {a.engine}" for a in cut]:
        yield Caution(
            "kv_limits_requests",
            f"KV holds no more requests of {limits.context_tokens:,.0f} tokens than {', '.join(held)}: larger steps "
            "were left out.",
            "Ask with --max-running, --context-len or --workload of your own traffic.",
        )
    if shorter := [f"{a.shorter_share:.0%} in {a.engine}" for a in answered if a.shorter_share > 0]:
        yield Caution(
            "shorter_context_stands_in",
            "Large steps hold longer contexts than were measured at their size, and the longest measured there stands "
            f"in: {', '.join(shorter)}. They take longer than is shown, under every list.",
            "Add longer contexts at large sizes to the recipe and sweep again; it resumes.",
        )
    if beyond := [f"{1 - a.steps_share:.0%} in {a.engine}" for a in answered if a.steps_share < 1.0]:
        yield Caution(
            "beyond_measured",
            "Steps with more requests than were measured are left out of every figure, graph coverage too: "
            f"{', '.join(beyond)}.",
            "Add larger sizes to the recipe and sweep again; it resumes.",
        )
    yield from _about_limit(limits, answered)
    yield from _about_thin_traffic(of, limits, answered)
    yield from _about_eager_steps(answered)
    for answer in answered:
        for warning in answer.flags.warnings if answer.flags else ():
            yield Caution(
                "engine_changes_list",
                f"{answer.engine}: {warning}",
                "Read the engine's start-up log.",
            )
    if off := [a.engine for a in answered if a.prefill and a.prefill.is_eager]:
        yield Caution(
            "no_prefill_list_pays",
            f"No prefill list pays on this traffic in {', '.join(off)}, against graphtune's own eager path, which is "
            "faster than a server's.",
            "Time your server's eager prefill before you turn its graphs off, and state how much longer it takes with "
            "--eager-overhead-ms.",
        )
    if eager := [a.engine for a in answered if a.decode and a.decode.is_eager]:
        yield Caution(
            "no_list_pays",
            f"Against graphtune's own eager path, which is faster than a server's, no list pays on this traffic in "
            f"{', '.join(eager)}.",
            "Time your server's eager step before you serve without decode graphs, and state how much longer it takes "
            "with --eager-overhead-ms.",
        )


def _charged_as_full(of: Measurements, answer: EngineAnswer) -> float:
    """Share of the steps that the recommended list pads without what that takes being known."""
    if answer.decode is None or answer.workload is None:
        return 0.0
    charged = total = 0.0
    for share in answer.workload.decode:
        bucket = bucket_for(share.requests, answer.decode.capture_sizes, answer.dispatch.decode)
        total += share.weight
        if bucket is not None and bucket > share.requests and not of.model.knows_padding(share.requests, bucket):
            charged += share.weight
    return charged / total if total else 0.0


def _about_thin_traffic(of: Measurements, limits: Limits, answered: Sequence[EngineAnswer]) -> Iterator[Caution]:
    """Lists that suit the traffic asked for and would pad a lone request to many times its step."""
    found: list[str] = []
    for answer in answered:
        if answer.decode is None or answer.decode.is_eager or answer.dispatch.decode == "exact":
            continue
        least = answer.decode.capture_sizes[0]
        alone = of.model.graph(1, limits.context_tokens)
        padded = of.model.step(1, least, limits.context_tokens)
        if alone and padded and padded.us > THIN_TRAFFIC * alone.us:
            own = f"({format_us(alone.us)} with a size of its own)"
            found.append(f"{format_us(padded.us)} padded to {least} in {answer.engine} {own}")
    if found:
        yield Caution(
            "thin_traffic",
            f"The list is for this traffic alone. A step of one request, as when load falls at night, would take "
            f"{', '.join(found)}.",
            "Give a --workload that holds your quiet hours, or add small sizes: each costs a few MiB.",
        )


def _about_limit(limits: Limits, answered: Sequence[EngineAnswer]) -> Iterator[Caution]:
    asked = limits.max_running_requests
    held = {answer.engine: answer.memory.max_running_requests for answer in answered if answer.memory is not None}
    if short := [f"{most:,} in {engine}" for engine, most in held.items() if asked is not None and most < asked]:
        yield Caution(
            "max_running_capped",
            f"KV does not hold {asked:,} requests of {limits.context_tokens:,.0f} tokens, so that the flags ask for "
            f"{', '.join(short)}.",
            "Ask with a shorter --context-len if your requests are shorter.",
        )


def _about_trace(answers: Sequence[EngineAnswer]) -> Iterator[Caution]:
    for answer in answers:
        if answer.overload is not None:
            yield Caution(
                "overloaded",
                f"{answer.engine} falls behind at load {answer.load:.3g}: {answer.overload}. Its batches are those of "
                "a server that is full.",
                "Lower --load, for example to 80%, or split the traffic over more servers.",
            )
        if not answer.settled:
            yield Caution(
                "trace_not_settled",
                f"{answer.engine}: the recommended list makes batches for which another list, as good within noise, "
                "is recommended.",
                "Nothing: the lists are as good as each other on these batches.",
            )


def _about_eager_steps(answered: Sequence[EngineAnswer]) -> Iterator[Caution]:
    """Lists that leave steps without a graph: because eager is as fast there, or because no list serves them."""
    by_choice: list[str] = []
    for_want: list[str] = []
    unpadded: list[str] = []
    for answer in answered:
        of = answer.decode
        if of is None or not of.capture_sizes or of.coverage is None or of.coverage >= 1.0 - COVERAGE_TOLERANCE:
            continue
        if answer.dispatch.decode == "exact":
            unpadded.append(f"{1 - of.coverage:.1%} in {answer.engine}")
            continue
        words = f"{1 - of.coverage:.1%} above {of.capture_sizes[-1]} requests in {answer.engine}"
        chosen = answer.most_coverage is not None and answer.most_coverage > of.coverage + COVERAGE_TOLERANCE
        (by_choice if chosen else for_want).append(words)
    if by_choice:
        yield Caution(
            "eager_is_as_fast",
            f"Some steps run eager though measured lists would serve them: {', '.join(by_choice)}. Replay is slower "
            "there than graphtune's own eager path, which a server's eager step does not reach.",
            "State how much longer your server's eager step takes with --eager-overhead-ms before relying on it.",
        )
    if unpadded:
        yield Caution(
            "padding_is_off",
            f"Steps between the captured sizes run eager, because padding is off: {', '.join(unpadded)}. Padded, they "
            "would take longer than graphtune's own eager path, which a server's eager step does not reach.",
            "State how much longer your server's eager step takes with --eager-overhead-ms before relying on it.",
        )
    if for_want:
        yield Caution(
            "steps_run_eager",
            f"Some steps run eager, because no list within the limits serves them: {', '.join(for_want)}.",
            "Sweep a list with the missing sizes if these steps matter.",
        )


def _about_budget(of: Measurements, answers: Sequence[EngineAnswer]) -> Iterator[Caution]:
    if any(answer.memory and answer.prefill is None for answer in answers):
        yield Caution(
            "prefill_not_measured",
            "Nothing is known of this traffic's prefill: its graphs are not in the budget, and its activations are "
            "those that follow from the model's shapes. vLLM and TensorRT-LLM take prefill graphs from the KV cache, "
            "so their KV tokens are an upper bound.",
            "Compare with the KV tokens that the engine prints when it starts.",
        )
    if of.distinguishes_eager and of.model.eager_overhead_us == 0:
        yield Caution(
            "eager_lower_bound",
            "Eager figures are graphtune's own eager path, a lower bound of a server's eager step: graphs gain more "
            "there than is shown here.",
            "Add the difference with --eager-overhead-ms.",
        )
