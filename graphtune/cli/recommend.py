"""`graphtune recommend`: which sizes to capture, what that gives, and the flags."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from graphtune.tune.model_bytes import Deployment
    from graphtune.tune.recommend import Question


DEFAULT_CONTEXT_TOKENS = 1024


class EngineChoice(StrEnum):
    SGLANG = "sglang"
    VLLM = "vllm"
    TENSORRT_LLM = "tensorrt-llm"
    ALL = "all"


class Objective(StrEnum):
    STEP = "step"
    THROUGHPUT = "throughput"
    P99_ITL = "p99-itl"
    STARTUP = "startup"


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


def recommend(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]",
            help="Folder of a sweep. Without it: the newest CUDA sweep under ./reports, else the shipped one.",
            show_default=False,
        ),
    ] = None,
    gpu_mem: Annotated[
        str | None,
        typer.Option(help="The card: 80 is a nominal size; 80GiB, 81559MiB, 80GB are literal.", show_default=False),
    ] = None,
    workload: Annotated[
        str, typer.Option(help="uniform, ramp, interactive or batch [N], 'steady N', or a file: histogram or trace.")
    ] = "uniform",
    load: Annotated[
        str | None,
        typer.Option(help="For a trace. 4: four times as dense; 80%: of what the server can take. [default: 1]"),
    ] = None,
    prefill_tokens_per_s: Annotated[
        float | None,
        typer.Option(help="For a trace: prompt tokens per second that your server prefills.", show_default=False),
    ] = None,
    chunk_size: Annotated[
        int | None, typer.Option(min=1, help="For a trace: most tokens of a prefill step. [default: 8192]")
    ] = None,
    context_len: Annotated[
        int | None, typer.Option(min=1, help="Mean KV tokens per request. [default: the sweep's main context]")
    ] = None,
    max_running: Annotated[
        int | None, typer.Option(min=1, help="Most running requests. [default: the largest measured size]")
    ] = None,
    min_kv_tokens: Annotated[int | None, typer.Option(min=1, help="KV tokens that must remain.")] = None,
    max_graph_mem: Annotated[
        str | None, typer.Option(help="Most graph memory, for example 512MiB.", show_default=False)
    ] = None,
    max_capture_time: Annotated[
        str | None, typer.Option(help="Most capture time, for example 20s.", show_default=False)
    ] = None,
    max_graphs: Annotated[int | None, typer.Option(min=1, help="Most graphs.")] = None,
    engine: Annotated[EngineChoice, typer.Option(help="Engine to answer for.")] = EngineChoice.ALL,
    current: Annotated[
        str | None,
        typer.Option(help='What runs now: "THE LAUNCH COMMAND" in quotes, or a server log.', show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A swept model's name, or a config.json: memory only where not swept.", show_default=False),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            help="Log of a server of this model: bytes, seconds and eager steps are fitted to it.", show_default=False
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Type of the KV cache where it differs from the sweep: fp8, int8, fp4, ...")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Weights of one rank where they differ, for example 38GiB.", show_default=False)
    ] = None,
    shard: Annotated[int | None, typer.Option(min=1, help="Ranks of tensor parallelism where they differ.")] = None,
    eager_overhead_ms: Annotated[
        float, typer.Option(min=0.0, help="Milliseconds that your server's eager step takes longer than graphtune's.")
    ] = 0.0,
    objective: Annotated[
        Objective, typer.Option(help="What is best: the mean step, tokens per second, p99 between tokens, start-up.")
    ] = Objective.STEP,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel ranks that pad to the largest of their batches.")] = 1,
    role: Annotated[Role | None, typer.Option(help="Phase of a server that does only one.")] = None,
    slo_itl_ms: Annotated[
        float | None, typer.Option(help="Most milliseconds that 99 % of the gaps between tokens may take.")
    ] = None,
    format_: Annotated[Format, typer.Option("--format", help="How to print the answer.")] = Format.TABLE,
    json_: Annotated[bool, typer.Option("--json", help="Short for --format json.")] = False,
) -> None:
    """Compute the capture list that serves a traffic best on a card, from a stored sweep. No GPU needed.

    Exit codes: 0 an answer, 1 nothing fits, 2 bad input.
    """
    from graphtune.tune.recommend import recommend as answer_question
    from graphtune.tune.recommendation_json import as_json
    from graphtune.tune.recommendation_text import as_text, warnings_text
    from graphtune.tune.sweep_choice import NotSwept, choose_sweep, config_of

    question = _question(
        gpu_mem,
        workload,
        load,
        prefill_tokens_per_s,
        chunk_size,
        context_len,
        max_running,
        min_kv_tokens,
        max_graph_mem,
        max_capture_time,
        max_graphs,
        engine,
        eager_overhead_ms,
        objective,
        slo_itl_ms,
        current,
        dp,
        role,
    )
    question = replace(question, deployment=_deployment(kv_dtype, weights, shard), calibrate=calibrate)
    try:
        sweep = choose_sweep(folder, model)
    except NotSwept:
        config = config_of(model) if model is not None else None
        if config is None:
            raise
        _advise(config, folder, question, json_ or format_ is Format.JSON)
        return
    answer = answer_question(sweep, question)
    if json_ or format_ is Format.JSON:
        typer.echo(json.dumps(as_json(answer), indent=1))
    else:
        typer.echo(as_text(answer), nl=False)
        typer.echo(warnings_text(answer.warnings), err=True, nl=False)
    if not any(one.decode or one.prefill for one in answer.engines):
        raise typer.Exit(1)


def _advise(config: Path, folder: Path | None, question: Question, as_data: bool) -> None:
    """Memory only, for a model that no sweep answers for; a process's own bytes are those of the sweep at hand."""
    from graphtune.tune.memory_only import as_json, memory_advice
    from graphtune.tune.memory_only_text import as_text
    from graphtune.tune.sweep_choice import choose_sweep

    advice = memory_advice(
        config,
        choose_sweep(folder),
        gpu_mem=question.gpu_mem,
        engines=question.engines,
        deployment=question.deployment,
        context_tokens=question.context_tokens or DEFAULT_CONTEXT_TOKENS,
        max_running_requests=question.max_running_requests,
    )
    typer.echo(json.dumps(as_json(advice), indent=1) if as_data else as_text(advice), nl=as_data)
    if not advice.fits:
        raise typer.Exit(1)


def _question(
    gpu_mem: str | None,
    workload: str,
    load: str | None,
    prefill_tokens_per_s: float | None,
    chunk_size: int | None,
    context_len: int | None,
    max_running: int | None,
    min_kv_tokens: int | None,
    max_graph_mem: str | None,
    max_capture_time: str | None,
    max_graphs: int | None,
    engine: EngineChoice,
    eager_overhead_ms: float,
    objective: Objective,
    slo_itl_ms: float | None,
    current: str | None,
    dp: int,
    role: Role | None,
) -> Question:
    from graphtune.tune.recommend import Question
    from graphtune.units import parse_bytes, parse_duration_s

    return Question(
        gpu_mem=gpu_mem,
        workload=workload,
        load=load,
        prefill_tokens_per_s=prefill_tokens_per_s,
        chunk_size=chunk_size,
        context_tokens=context_len,
        max_running_requests=max_running,
        min_kv_tokens=min_kv_tokens,
        max_graph_bytes=None if max_graph_mem is None else parse_bytes(max_graph_mem, where="--max-graph-mem"),
        max_capture_s=(
            None if max_capture_time is None else parse_duration_s(max_capture_time, where="--max-capture-time")
        ),
        max_graphs=max_graphs,
        engines=() if engine is EngineChoice.ALL else (engine.value.replace("-", "_"),),
        eager_overhead_us=eager_overhead_ms * 1000,
        objective=objective.value,
        current=current,
        dp=dp,
        role=None if role is None else role.value,
        slo_inter_token_us=None if slo_itl_ms is None else slo_itl_ms * 1000,
    )


def _deployment(kv_dtype: str | None, weights: str | None, shard: int | None) -> Deployment:
    from graphtune.tune.model_bytes import Deployment
    from graphtune.units import parse_bytes

    return Deployment(kv_dtype, None if weights is None else parse_bytes(weights, where="--weights"), shard)


def register(app: typer.Typer) -> None:
    app.command("recommend")(recommend)
