"""Recommended lists against the engines' own on public traffic, as a page.

    python benchmarks/traffic_table.py conv.csv code.csv -o docs/traffic.md [--sweep DIR ...]

For each sweep (all under ./reports unless named), each trace at loads 1, 4 and 80 % of what the simulated server can
take, uniform traffic up to 256 requests, and each engine: expected step, coverage, waste, graphs, bytes and seconds of
the recommended list and of the engine's default on the same batches. Whatever comes out is printed. Prefill times are
those of the sweep, else the rates stated below.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from graphtune.store import Sweep, find_sweeps, read_sweep
from graphtune.tune.prefill_model import prefill_models
from graphtune.tune.recommend import Question, recommend
from graphtune.tune.recommendation import EngineAnswer, ListAnswer, Recommendation
from graphtune.tune.recommendation_text import NAMES
from graphtune.tune.workloads.trace import read_trace
from graphtune.units import format_bytes, format_duration_s, format_us

LOADS = ("1", "4", "80%")
UNIFORM = "uniform 256"
STATED_TOKENS_PER_S = {"qwen3-0.6b": 200_000.0, "llama-3.1-8b": 30_000.0}
OTHER_TOKENS_PER_S = 30_000.0

HEAD = """# Recommended lists on public traffic

Made by `python benchmarks/traffic_table.py`, which prints whatever comes out. Traffic: the Azure LLM inference traces
of 2023 (conversation and code, one hour each) played on a simulated server at loads 1, 4 and 80 % of what it can take
with a graph at every measured size, and uniform traffic up to 256 requests. The default is the engine's own list on
the same batches, under its own padding rule; figures are those of decode. Steps that the sweep has no figure for are
left out of both; how many have one is in the last column. Large steps at longer contexts than their size was measured
at count at the longest that was. `~` interpolated between measured points; `<=` at most, the figure of a measured list
that contains it; other bytes and seconds of recommended lists are predicted from their sizes, each of which the sweep
captured alone.
"""

COLUMNS = (
    "| traffic | engine | list | expected step | against the default | coverage | waste | graphs | graph memory | "
    "capture | steps with figures |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def section(sweep: Sweep, traces: list[str]) -> list[str]:
    """One sweep as a table."""
    measured = bool(prefill_models(sweep.cells))
    rate = None if measured else STATED_TOKENS_PER_S.get(sweep.model_name, OTHER_TOKENS_PER_S)
    prefill = "as measured" if rate is None else f"stated, {rate:,.0f} tokens a second, because the sweep has none"
    lines = [f"## {sweep.model_name} on {sweep.device_name}", "", f"Prefill times: {prefill}.", "", COLUMNS]
    for trace in traces:
        for load in LOADS:
            question = Question(workload=read_trace(trace), load=load, prefill_tokens_per_s=rate)
            lines += rows(recommend(sweep, question), f"{Path(trace).stem}, load {load}")
    return [*lines, *rows(recommend(sweep, Question(workload=UNIFORM)), UNIFORM), ""]


def rows(answer: Recommendation, traffic: str) -> list[str]:
    """Two rows for each engine: recommended, then its default."""
    lines = []
    for one in answer.engines:
        if one.decode is None or one.default is None:
            lines.append(f"| {traffic} | {NAMES[one.engine]} | {one.message} |" + " |" * 8)
            continue
        note = f" ({one.load:.3g})" if one.load is not None and traffic.endswith("%") else ""
        note += ", overloaded" if one.overload is not None else ""
        lines.append(row(f"{traffic}{note}", one, "recommended", one.decode, one.default))
        lines.append(row("", one, "default", one.default, None))
    return lines


def row(traffic: str, one: EngineAnswer, name: str, of: ListAnswer, default: ListAnswer | None) -> str:
    step, against = "not known", ""
    if of.expected_step_us is not None:
        step = ("~" if of.expected_step_from == "interpolated" else "") + format_us(of.expected_step_us)
        if default is not None and default.expected_step_us:
            against = f"{of.expected_step_us / default.expected_step_us - 1:+.1%}"
    size = "not known" if of.graph_bytes is None else format_bytes(of.graph_bytes)
    seconds = "not known" if of.capture_s is None else format_duration_s(of.capture_s)
    bound = "<= " if of.graph_bytes_from == "bound" else ""
    cells = (
        traffic,
        NAMES[one.engine] if default is not None else "",
        "no graphs" if of.is_eager else name,
        step,
        against,
        "" if of.coverage is None else f"{of.coverage:.1%}",
        "" if of.padding_waste is None else f"{of.padding_waste:.1%}",
        str(len(of.capture_sizes)),
        bound + size,
        bound + seconds,
        f"{one.steps_share:.1%}" if default is not None else "",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", nargs="+", help="request traces")
    parser.add_argument("--sweep", action="append", type=Path, help="may be repeated. [default: all under ./reports]")
    parser.add_argument("-o", "--output", type=Path, help="the page. [default: stdout]")
    asked = parser.parse_args()
    sweeps = [read_sweep(path) for path in asked.sweep or find_sweeps(Path("reports"))]
    page = "\n".join([HEAD, *(line for sweep in sweeps for line in section(sweep, asked.traces))])
    if asked.output is None:
        print(page)
    else:
        asked.output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
