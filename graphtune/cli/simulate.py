"""`graphtune simulate`: a request trace under a graph configuration."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from graphtune.tune.simulation import Simulation, Tail


class Engine(StrEnum):
    SGLANG = "sglang"
    VLLM = "vllm"
    TENSORRT_LLM = "tensorrt-llm"


def register(app: typer.Typer) -> None:
    """Add the ``simulate`` command."""
    app.command("simulate")(simulate)


def simulate(
    workload: Annotated[str, typer.Option(help="Trace: CSV, or JSON of `workload from-trace`.")],
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]", help="Folder of a sweep; without it as `recommend` chooses.", show_default=False
        ),
    ] = None,
    load: Annotated[str, typer.Option(help="4: arrivals four times as dense. 80%: of what the server can take.")] = "1",
    prefill_tokens_per_s: Annotated[
        float | None,
        typer.Option(help="Prompt tokens per second that your server prefills. [required unless the sweep timed it]"),
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that the KV cache holds. [required unless --recommendation holds them]"),
    ] = None,
    engine: Annotated[Engine, typer.Option(help="Engine whose dispatch and default list count.")] = Engine.SGLANG,
    sizes: Annotated[
        str | None, typer.Option(help="Captured sizes: 1,2,4,8; none; or default (the engine's).", show_default=False)
    ] = None,
    recommendation: Annotated[
        Path | None, typer.Option(help="JSON of `recommend --json`: its list and KV tokens.", show_default=False)
    ] = None,
    max_running: Annotated[
        int | None, typer.Option(min=1, help="Most running requests. [default: the largest measured batch]")
    ] = None,
    chunk_size: Annotated[int, typer.Option(min=1, help="Most tokens of a prefill step.")] = 8192,
    eager_overhead_ms: Annotated[
        float, typer.Option(min=0.0, help="Milliseconds that your server's eager step takes longer than graphtune's.")
    ] = 0.0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write its steps as a workload for `recommend`.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Play a request trace on a simulated server: batches, throughput, waiting times, and whether it keeps up.

    The server prefills first, then decodes. Exit codes: 0 it keeps up, 1 it is overloaded, 2 bad input.
    """
    import json

    from graphtune.errors import InputError
    from graphtune.terminal import wrapped
    from graphtune.tune.simulated_server import ServerQuestion, simulated_server
    from graphtune.tune.sweep_choice import choose_sweep
    from graphtune.tune.workloads.trace import read_trace

    trace = read_trace(workload)
    question = ServerQuestion(
        engine=engine.value,
        sizes=sizes,
        recommendation=recommendation,
        max_running_requests=max_running,
        kv_tokens=kv_tokens,
        chunk_size=chunk_size,
        prefill_tokens_per_s=prefill_tokens_per_s,
        eager_overhead_us=eager_overhead_ms * 1000,
    )
    sweep = choose_sweep(folder)
    server = simulated_server(sweep, question)
    found = server.run(trace, server.load_of(load, trace))
    if output is not None:
        try:
            output.write_text(json.dumps(found.workload().as_dict(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}", where=str(output)) from error
    if json_:
        sweep_facts = {"path": str(sweep.path), "model": sweep.model_name, "device": sweep.device_name}
        typer.echo(json.dumps({**found.as_dict(), "list": server.listed, "sweep": sweep_facts}, indent=1))
    else:
        typer.echo(f"{sweep.model_name} on {sweep.device_name}, {sweep.path}")
        for text in lines_of(found, server.listed):
            for line in wrapped(text, following="  ", break_words=False):
                typer.echo(line)
    if found.overload is not None:
        raise typer.Exit(1)


def lines_of(found: Simulation, listed: str) -> list[str]:
    """A simulation in plain lines."""
    from graphtune.units import format_duration_s, format_us

    sizes = f"{len(found.sizes)} sizes, {found.sizes[0]} to {found.sizes[-1]}" if found.sizes else "none"
    lines = [
        f"{found.source} at load {found.load:g}, graphs: {sizes} ({listed})",
        f"requests: {found.finished:,} of {found.requests:,} finished in {format_duration_s(found.seconds)}, "
        f"{found.refused:,} too long for the KV cache, {found.preemptions:,} preempted",
        f"throughput: {found.requests_per_s:.2f} requests and {found.tokens_per_s:,.0f} generated tokens a second",
    ]
    if found.expected_step_us is not None:
        steps = sum(ran for _, ran, *_ in found.decode)
        mean = sum(size * ran for size, ran, *_ in found.decode) / steps
        waste = "none to tell" if found.padding_waste is None else f"{found.padding_waste:.1%}"
        lines.append(
            f"decode: {steps:,} steps of {mean:.1f} requests on average and {found.decode[-1][0]} at most, "
            f"{format_us(found.expected_step_us)} each; graph coverage {found.coverage:.1%}, padding waste {waste}"
        )
    if found.extrapolated:
        lines.append(f"{found.extrapolated:.1%} of decode steps have longer contexts than were measured: extrapolated")
    lines.append(f"KV cache: at most {found.most_kv_tokens:,} of {found.kv_tokens:,} tokens")
    lines.append(_tail("first token", found.ttft, found.absent.get("ttft")))
    lines.append(_tail("between tokens", found.inter_token, found.absent.get("inter_token")))
    stated = found.prefill_source.startswith("--")
    lines.append(f"prefill times: {f'as stated with {found.prefill_source}, not measured' if stated else 'measured'}")
    if found.overload is not None:
        lines.append(f"OVERLOAD: {found.overload}")
    return lines


def _tail(name: str, tail: Tail | None, reason: str | None) -> str:
    from graphtune.units import format_duration_s

    if tail is None:
        return f"{name}: not told ({reason})"
    marks = (("mean", tail.mean_s), ("p50", tail.p50_s), ("p90", tail.p90_s), ("p99", tail.p99_s), ("max", tail.max_s))
    return f"{name}: " + ", ".join(f"{mark} {format_duration_s(seconds)}" for mark, seconds in marks)
