"""From a stored sweep and a question to an answer per engine: which list, what it gives, what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from graphtune.engines import ENGINES
from graphtune.engines.base import Engine, Role, Serving
from graphtune.errors import Finding, InputError
from graphtune.results import CellResult
from graphtune.stats import disturbances, noise_between_processes
from graphtune.store import CELLS_FILE, Sweep
from graphtune.tune import cautions
from graphtune.tune.bucket_worth import size_costs
from graphtune.tune.calibrate import Calibration, calibrate
from graphtune.tune.candidates import Candidate, pareto
from graphtune.tune.current_launch import Current, read_current, served_as
from graphtune.tune.engine_answer import answer_for
from graphtune.tune.interpolation import interpolation_of
from graphtune.tune.latency_model import LatencyModel, latency_model
from graphtune.tune.measurements import (
    Measurements,
    device_facts_of,
    environment_of,
    fixed_bytes_of,
    gpu_of,
    model_facts_of,
    refuse_other_weights,
)
from graphtune.tune.memory_model import memory_model
from graphtune.tune.model_bytes import Deployment
from graphtune.tune.prefill_model import prefill_models
from graphtune.tune.recommendation import (
    EngineAnswer,
    Limits,
    Objective,
    ParetoPoint,
    Recommendation,
    Status,
    SweepFacts,
)
from graphtune.tune.simulated_server import CHUNK_SIZE
from graphtune.tune.step_times import stated_prefill
from graphtune.tune.trace_traffic import TraceTraffic, answer_for_trace, not_simulated
from graphtune.tune.workload import Workload
from graphtune.tune.workloads.deployment import deployed, in_steps
from graphtune.tune.workloads.trace import Trace
from graphtune.tune.workloads.traffic import read_traffic


@dataclass(frozen=True)
class Question:
    """What a user asks of a sweep. ``gpu_mem``, ``workload`` and ``load`` are as written on the command line;
    ``workload`` may be the traffic itself.

    ``context_tokens`` null is the context that the sweep measured most sizes at; ``max_running_requests`` null is the
    largest measured size. ``engines`` empty is all of them. ``load`` (``4``, ``80%``), ``chunk_size`` and
    ``prefill_tokens_per_s`` say how a request trace meets a server. ``deployment`` is how the server differs from what
    was swept in weights, KV cache and shard. ``calibrate`` is a server's log that its engine's figures are fitted to.
    ``dp`` ranks pad to the largest of their batches; a server of one ``role`` runs the steps of one phase.
    """

    gpu_mem: str | None = None
    workload: str | Workload | Trace = "uniform"
    load: str | None = None
    prefill_tokens_per_s: float | None = None
    chunk_size: int | None = None
    context_tokens: int | None = None
    max_running_requests: int | None = None
    min_kv_tokens: int | None = None
    max_graph_bytes: int | None = None
    max_capture_s: float | None = None
    max_graphs: int | None = None
    engines: tuple[str, ...] = ()
    eager_overhead_us: float = 0.0
    objective: Objective = "step"
    slo_inter_token_us: float | None = None
    current: str | None = None
    dp: int = 1
    role: Role | None = None
    deployment: Deployment = field(default_factory=Deployment)
    calibrate: str | None = None


def recommend(sweep: Sweep, question: Question | None = None) -> Recommendation:
    """Answer ``question`` from ``sweep``.

    Raises InputError for a question that makes no sense and Finding for a sweep in which nothing was measured; that
    nothing fits is an answer, with ``status: nothing_fits``.
    """
    question = question or Question()
    _check(question)
    if not sweep.cells:
        raise Finding(
            f"this sweep holds no results: {CELLS_FILE} is missing or empty",
            where=str(sweep.path),
            action="Run the same sweep command again: it measures everything that is missing.",
        )
    cells = tuple(cell for cell in sweep.cells if cell.status == "ok" or cell.captured_lists or cell.points)
    _check_context(question, cells)
    measurements = _measurements(sweep, cells, question)
    current = None
    if question.current is not None:
        current = read_current(question.current, question.engines[0] if question.engines else None, measurements.device)
        question, measurements = _as_current(question, current, measurements)
    limits = _limits(question, measurements.model)
    traffic = _traffic(question, measurements, cells)
    engines = [ENGINES[name] for name in question.engines or tuple(ENGINES)]
    calibration, fitted = _calibrated(question, cells, measurements)
    fitted_engine = calibration.engine if calibration else None
    found = [
        _answer(engine, traffic, limits, fitted if engine.name == fitted_engine else measurements, current)
        for engine in engines
    ]
    answers = tuple(answer for answer, _ in found)
    workload = next((one.workload for one in answers if one.workload is not None), None) or not_simulated(traffic)
    environment = environment_of(cells)
    return Recommendation(
        status=_status(answers),
        sweep=SweepFacts(
            path=str(sweep.path),
            recipe=sweep.recipe_name,
            recipe_sha=sweep.recipe_sha,
            model=sweep.model_name,
            finished_at=sweep.finished_at,
            environment=environment,
            latency_device=sweep.device_name,
            statistic=measurements.model.statistic,
            attention=measurements.model.attention,
        ),
        workload=workload,
        limits=limits,
        gpu=measurements.gpu,
        noise=measurements.noise,
        interpolation=interpolation_of(measurements.model),
        eager_overhead_us=question.eager_overhead_us,
        calibration=calibration,
        engines=answers,
        pareto=tuple(point for answer, candidates in found for point in _front(answer, candidates)),
        warnings=cautions.of(sweep, environment, model_facts_of(cells), measurements, limits, answers),
        assumed=_assumed(question, workload),
        absent={"gpu": "give --gpu-mem: the sweep does not know its device's memory"}
        if measurements.gpu is None
        else {},
    )


def _calibrated(
    question: Question, cells: Sequence[CellResult], of: Measurements
) -> tuple[Calibration | None, Measurements]:
    """What the log of a server says, and the measurements as they are on that server. A stated overhead stands."""
    if question.calibrate is None:
        return None, of
    named = question.engines[0] if len(question.engines) == 1 else None
    found = calibrate(question.calibrate, named, of.memory, of.model)
    refuse_other_weights(found.weights_bytes, of, f"--calibrate {question.calibrate}")
    model = of.model
    if found.eager_overhead_us is not None and question.eager_overhead_us == 0:
        model = latency_model(cells, eager_overhead_us=found.eager_overhead_us)
    return found, replace(of, model=model, memory=replace(of.memory, adjust=found.cost))


def _measurements(sweep: Sweep, cells: Sequence[CellResult], question: Question) -> Measurements:
    gpu = gpu_of(question.gpu_mem, environment_of(cells))
    facts = model_facts_of(cells)
    prefill = prefill_models(cells, question.eager_overhead_us)
    fixed, why_not = fixed_bytes_of(cells, facts, gpu, question.deployment)
    model = latency_model(cells, eager_overhead_us=question.eager_overhead_us)
    memory = memory_model(cells, "decode", model.backend)
    return Measurements(
        model=model,
        memory=memory,
        noise=noise_between_processes(cells),
        disturbances=disturbances(cells),
        gpu=gpu,
        fixed=fixed,
        why_no_budget=why_not,
        device=device_facts_of(gpu),
        serving=Serving(
            tp=question.deployment.shard or (facts.shard_of if facts else 1),
            max_running_requests=question.max_running_requests,
        ),
        distinguishes_eager=sweep.device == "cuda",
        deployment=question.deployment,
        size_costs=size_costs(cells),
        prefill=prefill,
        prefill_memory={backend: memory_model(cells, "prefill", backend, memory.predictor) for backend in prefill},
    )


def _traffic(question: Question, of: Measurements, cells: Sequence[CellResult]) -> Workload | TraceTraffic:
    """The traffic that was asked about, in steps; a trace with what it needs to be simulated."""
    largest = of.model.largest_size
    asked = question.workload
    if isinstance(asked, str):
        asked = read_traffic(asked, question.max_running_requests or largest)
    if isinstance(asked, Trace):
        return TraceTraffic(
            trace=asked,
            load=question.load or "1",
            prefill=None
            if question.prefill_tokens_per_s is None and of.prefill
            else stated_prefill(question.prefill_tokens_per_s, of.model),
            chunk_size=question.chunk_size or CHUNK_SIZE,
            max_running_requests=min(question.max_running_requests or largest, largest),
            page_size=of.fixed.page_size if of.fixed else 1,
            dp=question.dp,
            role=question.role,
        )
    of_a_trace = {
        "--load": question.load,
        "--prefill-tokens-per-s": question.prefill_tokens_per_s,
        "--chunk-size": question.chunk_size,
    }
    if given := [option for option, value in of_a_trace.items() if value is not None]:
        raise InputError(
            "says how a request trace meets a server; this traffic is a histogram of steps",
            where=given[0],
            action="Leave it out, or name a trace with --workload.",
        )
    if question.max_running_requests is not None and asked.decode:
        asked = asked.up_to(question.max_running_requests)
        if not asked.decode:
            raise InputError(
                f"no step of the workload has {question.max_running_requests} requests or fewer, the limit that is "
                f"{'given' if question.current is None else 'given, or stated by --current'}",
                where="--max-running",
                action="Give traffic of that server, or a higher limit with --max-running.",
            )
    return deployed(in_steps(asked, of.model, None), question.dp, question.role)


def _answer(
    engine: Engine, traffic: Workload | TraceTraffic, limits: Limits, of: Measurements, current: Current | None
) -> tuple[EngineAnswer, tuple[Candidate, ...]]:
    if isinstance(traffic, TraceTraffic):
        return answer_for_trace(engine, traffic, limits, of, current)
    return answer_for(engine, traffic, limits, of, current=current)


def _as_current(question: Question, current: Current, of: Measurements) -> tuple[Question, Measurements]:
    """The question of the engine that runs now, with the limits that its launch states."""
    if question.engines not in ((), (current.engine,)):
        raise InputError(f"it starts {current.engine}, not {question.engines[0]}", where="--current")
    if question.deployment.shard is None and current.ranks not in (None, of.serving.tp):
        raise InputError(
            f"it splits the model over {current.ranks} rank{'s' * (current.ranks != 1)} and the figures would be those "
            f"of {of.serving.tp}",
            where="--current",
            action=f"Add --shard {current.ranks}.",
        )
    refuse_other_weights(current.weights_bytes, of, "--current")
    serving = served_as(current, ENGINES[current.engine], of.serving)
    asked = replace(question, engines=(current.engine,), max_running_requests=serving.max_running_requests)
    return asked, replace(of, serving=serving)


def _check(question: Question) -> None:
    unknown = [name for name in question.engines if name not in ENGINES]
    if unknown:
        raise InputError(f"unknown engine {unknown[0]!r}", where="--engine", action=f"Known: {', '.join(ENGINES)}.")
    positive = {
        "--context-len": question.context_tokens,
        "--max-running": question.max_running_requests,
        "--min-kv-tokens": question.min_kv_tokens,
        "--max-graphs": question.max_graphs,
        "--dp": question.dp,
    }
    for flag, value in positive.items():
        if value is not None and value < 1:
            raise InputError(f"{value} is below 1", where=flag)
    if question.slo_inter_token_us is not None and not question.slo_inter_token_us > 0:
        raise InputError("must be more than 0 ms", where="--slo-itl-ms")
    if not 0 <= question.eager_overhead_us < float("inf"):
        raise InputError("must be a number of at least 0", where="--eager-overhead-ms")


def _check_context(question: Question, cells: Sequence[CellResult]) -> None:
    positions = min((cell.cell["model_config"]["max_position_embeddings"] for cell in cells), default=None)
    if question.context_tokens is not None and positions is not None and question.context_tokens > positions:
        raise InputError(
            f"{question.context_tokens:,.0f} tokens are beyond the model's {positions:,} positions",
            where="--context-len",
            action=f"Ask for at most {positions:,}.",
        )


def _assumed(question: Question, workload: Workload) -> tuple[str, ...]:
    """The options that were not given and decide the traffic."""
    uniform = isinstance(question.workload, str) and question.workload.split() == ["uniform"]
    open_ended = {
        "--workload": uniform,
        "--max-running": uniform and question.max_running_requests is None,
        "--context-len": question.context_tokens is None
        and any(share.mean_kv_tokens is None for share in workload.decode),
    }
    return tuple(option for option, is_open in open_ended.items() if is_open)


def _limits(question: Question, model: LatencyModel) -> Limits:
    return Limits(
        context_tokens=question.context_tokens or model.main_context,
        max_running_requests=question.max_running_requests,
        min_kv_tokens=question.min_kv_tokens,
        max_graph_bytes=question.max_graph_bytes,
        max_capture_s=question.max_capture_s,
        max_graphs=question.max_graphs,
        objective=question.objective,
        slo_inter_token_us=question.slo_inter_token_us,
    )


def _status(answers: Sequence[EngineAnswer]) -> Status:
    statuses = {answer.status for answer in answers}
    if statuses == {"nothing_fits"}:
        return "nothing_fits"
    return "ok" if statuses == {"ok"} else "partial"


def _front(answer: EngineAnswer, candidates: Sequence[Candidate]) -> list[ParetoPoint]:
    return [
        ParetoPoint(
            engine=answer.engine,
            graph_bytes=point.graph_bytes,
            expected_step_us=point.step_us,
            capture_s=point.cost.capture_s if point.cost else 0.0,
            decode_sizes=point.sizes,
        )
        for point in pareto(candidates)
    ]
