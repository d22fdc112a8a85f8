"""From a stored sweep and a question to an answer per engine: which list, what it gives, what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphtune.engines import ENGINES
from graphtune.engines.base import DeviceFacts, Serving
from graphtune.errors import InputError
from graphtune.results import CellResult, Environment, ModelFacts
from graphtune.stats import disturbances, noise_between_processes
from graphtune.store import Sweep
from graphtune.tune import cautions
from graphtune.tune.candidates import Candidate, pareto
from graphtune.tune.engine_answer import Measurements, answer_for
from graphtune.tune.kv_budget import FixedBytes
from graphtune.tune.latency_model import LatencyModel, latency_model
from graphtune.tune.memory_model import context_bytes, memory_model
from graphtune.tune.recommendation import (
    EngineAnswer,
    Limits,
    ParetoPoint,
    Recommendation,
    Status,
    SweepFacts,
)
from graphtune.tune.workload import Workload, read_workload
from graphtune.units import GpuMemory, parse_gpu_memory, swept_gpu_memory


@dataclass(frozen=True)
class Question:
    """What a user asks of a sweep. ``gpu_mem`` and ``workload`` are as written on the command line.

    ``context_tokens`` null is the context that the sweep measured most sizes at; ``max_running_requests`` null is the
    largest measured size. ``engines`` empty is all of them.
    """

    gpu_mem: str | None = None
    workload: str = "uniform"
    context_tokens: int | None = None
    max_running_requests: int | None = None
    min_kv_tokens: int | None = None
    max_graph_bytes: int | None = None
    max_capture_s: float | None = None
    max_graphs: int | None = None
    engines: tuple[str, ...] = ()
    eager_overhead_us: float = 0.0


def recommend(sweep: Sweep, question: Question | None = None) -> Recommendation:
    """Answer ``question`` from ``sweep``.

    Raises InputError for a question that makes no sense and Finding for a sweep in which nothing was measured; that
    nothing fits is an answer, with ``status: nothing_fits``.
    """
    question = question or Question()
    _check(question)
    cells = tuple(cell for cell in sweep.cells if cell.status == "ok" or cell.captured_lists or cell.points)
    model = latency_model(cells, eager_overhead_us=question.eager_overhead_us)
    environment = _environment(cells)
    on_gpu = sweep.device == "cuda"
    gpu = _gpu(question, environment)
    limits = _limits(question, model)
    top = max(size for context in model.contexts() for size in model.sizes("graph", context))
    workload = read_workload(question.workload, question.max_running_requests or top)
    if question.max_running_requests is not None:
        workload = workload.up_to(question.max_running_requests)
        if not workload.decode:
            raise InputError(
                f"no step of the workload has {question.max_running_requests} requests or fewer",
                where="--max-running",
            )
    facts = _model_facts(cells)
    fixed, why_not = _fixed(cells, facts, gpu)
    measurements = Measurements(
        model=model,
        memory=memory_model(cells),
        noise=noise_between_processes(cells),
        disturbances=disturbances(cells),
        gpu=gpu,
        fixed=fixed,
        why_no_budget=why_not,
        device=_device_facts(gpu),
        serving=Serving(tp=facts.shard_of if facts else 1, max_running_requests=question.max_running_requests),
        distinguishes_eager=on_gpu,
    )
    names = question.engines or tuple(ENGINES)
    found = [answer_for(ENGINES[name], workload, limits, measurements) for name in names]
    answers = tuple(answer for answer, _ in found)
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
            statistic=model.statistic,
            attention=model.attention,
        ),
        workload=workload,
        limits=limits,
        gpu=gpu,
        noise=measurements.noise,
        eager_overhead_us=question.eager_overhead_us,
        engines=answers,
        pareto=tuple(point for answer, candidates in found for point in _front(answer, candidates)),
        warnings=cautions.of(sweep, environment, facts, measurements, workload, limits, answers),
        assumed=_assumed(question, workload),
        absent={"gpu": "give --gpu-mem: the sweep does not know its device's memory"} if gpu is None else {},
    )


def _check(question: Question) -> None:
    unknown = [name for name in question.engines if name not in ENGINES]
    if unknown:
        raise InputError(f"unknown engine {unknown[0]!r}", where="--engine", action=f"Known: {', '.join(ENGINES)}.")
    positive = {
        "--context-len": question.context_tokens,
        "--max-running": question.max_running_requests,
        "--min-kv-tokens": question.min_kv_tokens,
        "--max-graphs": question.max_graphs,
    }
    for flag, value in positive.items():
        if value is not None and value < 1:
            raise InputError(f"{value} is below 1", where=flag)
    if question.eager_overhead_us < 0:
        raise InputError("an overhead below 0 makes no sense", where="--eager-overhead-ms")


def _assumed(question: Question, workload: Workload) -> tuple[str, ...]:
    """The options that were not given and decide the traffic."""
    uniform = question.workload == "uniform"
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
    )


def _environment(cells: Sequence[CellResult]) -> Environment | None:
    return next((cell.environment for cell in cells if cell.environment is not None), None)


def _model_facts(cells: Sequence[CellResult]) -> ModelFacts | None:
    """Facts of the cell that latency was timed in: the other cells of a sweep load the same model."""
    by_points = sorted(cells, key=lambda cell: -len(cell.points))
    return next((cell.model for cell in by_points if cell.model is not None), None)


def _gpu(question: Question, environment: Environment | None) -> GpuMemory | None:
    if question.gpu_mem is not None:
        return parse_gpu_memory(question.gpu_mem, environment)
    return swept_gpu_memory(environment) if environment is not None else None


def _device_facts(gpu: GpuMemory | None) -> DeviceFacts:
    if gpu is None:
        return DeviceFacts(None)
    return DeviceFacts(gpu.nvml_total_mib, gpu.compute_capability, gpu.card)


def _fixed(
    cells: Sequence[CellResult], facts: ModelFacts | None, gpu: GpuMemory | None
) -> tuple[FixedBytes | None, str]:
    """The bytes that every list needs, or the reason why there is no budget."""
    contexts = [count for cell in cells if (count := context_bytes(cell.ledger)) is not None]
    if gpu is None:
        return None, "the device's memory is not known; give --gpu-mem"
    if facts is None:
        return None, "no cell of this sweep loaded the model"
    if not contexts:
        return None, "this sweep holds no readings of device memory, so the bytes of a CUDA context are not known"
    page_size = int(next(cell for cell in cells if cell.model is not None).cell.get("page_size", 1))
    return (
        FixedBytes(
            context_bytes=max(contexts),
            weights_bytes=facts.weights_bytes,
            workspace_bytes=facts.workspace_bytes,
            static_buffer_bytes=facts.static_buffer_bytes,
            bytes_per_kv_token=facts.kv_bytes_per_token,
            page_size=page_size,
        ),
        "",
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
