"""`graphtune log`: what server logs say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from graphtune.tune.log_records import BootSummary, LogSummary


def register(app: typer.Typer) -> None:
    """Add the ``log`` commands."""
    commands = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Read server logs.")
    commands.command("summary")(summary)
    app.add_typer(commands, name="log")


def summary(
    files: Annotated[list[str], typer.Argument(help="Log files, plain or gzip; - is standard input.")],
    engine: Annotated[str | None, typer.Option(help="sglang, vllm or tensorrt-llm; else the log decides.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what logs tell of captures, graph memory, KV cache, batch sizes and graph use.

    Reads logs of SGLang, vLLM and TensorRT-LLM, and the JSON of SGLang's /server_info.
    """
    from graphtune.engines import engine_named
    from graphtune.tune.log_summary import contradictions, summarise_file

    name = engine_named(engine).name if engine is not None else None
    summaries = [summarise_file(file, name) for file in files]
    against = contradictions(summaries)
    if as_json:
        import json
        from dataclasses import asdict

        data = {"schema": 1, "files": [asdict(one) for one in summaries], "contradictions": list(against)}
        typer.echo(json.dumps(data, indent=1))
        return
    for one in summaries:
        _print_file(one)
    for text in against:
        typer.echo(f"contradiction: {text}")


def _print_file(summary: LogSummary) -> None:
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(summary.skipped.items())) or "none"
    typer.echo(f"{summary.source}: {summary.lines:,} lines, {summary.read:,} read, skipped: {skipped}")
    for number, boot in enumerate(summary.boots, 1):
        title = f"{boot.engine or 'unknown engine'} {boot.version or '(version not stated)'}"
        if len(summary.boots) > 1:
            title = f"start {number} of {len(summary.boots)}: {title}"
        typer.echo(title + (f", started {boot.started}" if boot.started else ""))
        for line in boot_lines(boot):
            typer.echo(f"  {line}")


def boot_lines(boot: BootSummary) -> list[str]:
    """One boot in plain lines; what the log does not state is said to be unknown."""
    from graphtune.units import format_bytes, format_duration_s

    def size(count: int | None) -> str:
        return "unknown" if count is None else format_bytes(count)

    def time(seconds: float | None) -> str:
        return "unknown" if seconds is None else format_duration_s(seconds)

    lines = []
    for capture in boot.captures:
        listed = "sizes unknown"
        if capture.sizes:
            listed = f"sizes {capture.sizes[0]}…{capture.sizes[-1]} {capture.unit}"
        count = f"{capture.count} graphs" if capture.count is not None else "number of graphs unknown"
        what = " ".join(part for part in (capture.role, capture.phase or "all phases", capture.backend) if part)
        line = f"capture {what}{f' [{capture.rank}]' if capture.rank else ''}: {count}, {listed}"
        line += f", {size(capture.used_bytes)}, {time(capture.seconds)}"
        if capture.failed:
            line += f", FAILED on {capture.failed}"
            line += f" at size {capture.failed_size}" if capture.failed_size is not None else ""
        lines.append(line)
    if boot.graphs_by_mode:
        lines.append("graphs by mode: " + ", ".join(f"{mode} {n}" for mode, n in sorted(boot.graphs_by_mode.items())))
    if len(boot.rank_totals) > 1:
        lines += [f"rank {t.rank or '(none)'}: {size(t.used_bytes)}, {time(t.seconds)}" for t in boot.rank_totals]
    if boot.captures:
        lines.append(f"graph memory: {size(boot.graph_bytes)} a rank, capture time {time(boot.capture_s)}")
    if boot.estimated_bytes is not None or boot.actual_bytes is not None:
        lines.append(
            f"graph memory by the engine: estimated {size(boot.estimated_bytes)}, actual {size(boot.actual_bytes)}"
        )
    if boot.kv_tokens is not None or boot.kv_bytes is not None:
        tokens = "unknown" if boot.kv_tokens is None else f"{boot.kv_tokens:,}"
        lines.append(f"KV cache: {tokens} tokens, {size(boot.kv_bytes)}")
    uses = (("decode", boot.decode), ("largest rank's decode", boot.over_ranks), ("prefill", boot.prefill))
    for name, use in uses:
        if use is None:
            continue
        marks = ", ".join(f"{mark} {value:,}" for mark, value in use.percentiles.items())
        lines.append(f"{name} batches ({use.unit}, by {use.weighting}): {use.readings:,} readings, {marks}")
        above = "unknown" if use.above_top is None else f"{use.above_top:.1%} above the largest size {use.top}"
        off = "unknown whether a graph ran" if use.off_graph is None else f"{use.off_graph:.1%} without a graph"
        lines.append(f"{name} graph use: {above}; {off}")
        if use.aggregated_readings:
            lines.append(f"{use.aggregated_readings} readings are sums over engines and left out")
    if boot.steps is not None:
        waste = "unknown" if boot.steps.padding_waste is None else f"{boot.steps.padding_waste:.1%}"
        lines.append(f"steps: {boot.steps.steps:,}, {boot.steps.eager:.1%} eager, padding waste {waste}")
    lines += [
        f"mode: asked {m['asked'] or 'unknown'}, runs {m['runs']} ({m['reason'] or 'no reason given'})"
        for m in boot.modes
    ]
    lines += [f"list: {text}" for text in boot.list_changes]
    for failure in boot.failures:
        what = failure.operation or f"out of memory, {size(failure.asked_bytes)} asked, {size(failure.free_bytes)} free"
        lines.append(f"FAILED{f' [{failure.rank}]' if failure.rank else ''}: {what}")
    lines += [f"ranks: {text}" for text in boot.disagreements]
    return lines
