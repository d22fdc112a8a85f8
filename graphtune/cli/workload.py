"""`graphtune workload`: traffic as a file that `recommend` and `simulate` read."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from graphtune.tune.latency_model import LatencyModel
    from graphtune.tune.workload import Workload


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


Output = Annotated[Path | None, typer.Option("-o", "--output", help="File to write. [default: stdout]")]
SweepFolder = Annotated[
    Path | None, typer.Option("--sweep", help="Sweep of the served model: turns seconds into steps.")
]
Ranks = Annotated[int, typer.Option("--dp", min=1, help="Ranks that pad to the largest of them: its histogram.")]
OneRole = Annotated[Role | None, typer.Option("--role", help="Keep the steps of a server of one phase.")]


def register(app: typer.Typer) -> None:
    """Add the ``workload`` commands."""
    commands = typer.Typer(
        no_args_is_help=True, rich_markup_mode=None, help="Make a workload from logs, a trace or a table."
    )
    commands.command("from-log")(from_log)
    commands.command("from-trace")(from_trace)
    commands.command("from-histogram")(from_histogram)
    commands.command("preset")(preset)
    app.add_typer(commands, name="workload")


def from_log(
    files: Annotated[list[str], typer.Argument(metavar="LOG...", help="Server logs, plain or gzip; - is stdin.")],
    output: Output = None,
    engine: Annotated[str | None, typer.Option(help="sglang, vllm or tensorrt-llm; else the log decides.")] = None,
    sweep: SweepFolder = None,
    dp: Ranks = 1,
    role: OneRole = None,
) -> None:
    """Batch sizes that servers logged, weighted as each engine prints them; the weighting is in the file.

    Readings by time (vLLM's every 10 seconds) become steps with --sweep and are refused without it.
    """
    from graphtune.engines import engine_named
    from graphtune.tune.workloads.server_log import from_logs

    found = from_logs(files, engine_named(engine).name if engine is not None else None)
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)
    _write_histogram(found.workload, sweep, dp, role, output, found.captured)


def from_histogram(
    files: Annotated[list[str], typer.Argument(metavar="CSV...", help="Tables of decode or prefill steps.")],
    output: Output = None,
    sweep: SweepFolder = None,
    dp: Ranks = 1,
    role: OneRole = None,
) -> None:
    """A table of how often which size ran: columns requests or tokens, and steps (count, weight) or seconds."""
    from graphtune.tune.workloads.histogram_table import read_histograms

    _write_histogram(read_histograms(files), sweep, dp, role, output, None)


def from_trace(
    file: Annotated[str, typer.Argument(metavar="CSV", help="Arrival, prompt tokens and generated tokens.")],
    output: Output = None,
) -> None:
    """Requests of a trace. What batches they make depends on the server: `graphtune simulate` tells."""
    from graphtune.tune.workloads.trace import read_trace

    _write(read_trace(file).as_dict(), output)


def preset(
    name: Annotated[str, typer.Argument(help="uniform, steady, ramp, interactive or batch.")],
    requests: Annotated[int, typer.Argument(help="Most running requests.")],
    output: Output = None,
    sweep: SweepFolder = None,
    dp: Ranks = 1,
) -> None:
    """Made-up traffic by name. ramp and interactive are shares of time and need --sweep."""
    from graphtune.tune.workloads.presets import preset as of_name

    _write_histogram(of_name(name, requests), sweep, dp, None, output, None)


def _write_histogram(
    workload: Workload, sweep: Path | None, dp: int, role: Role | None, output: Path | None, captured: Any
) -> None:
    from graphtune.tune.workloads.deployment import deployed, in_steps, of_role

    if role is not None:  # before seconds become steps: a server of prefill needs no step times
        workload = of_role(workload, role.value)
    workload = in_steps(workload, _model(sweep), captured, "the list of the watched server")
    _write(deployed(workload, dp, None).as_dict(), output)


def _model(sweep: Path | None) -> LatencyModel | None:
    if sweep is None:
        return None
    from graphtune.store import read_sweep
    from graphtune.tune.latency_model import latency_model

    return latency_model(read_sweep(sweep).cells)


def _write(values: dict[str, Any], output: Path | None) -> None:
    import json

    from graphtune.errors import InputError

    indent = None if values["kind"] == "trace" else 1
    text = json.dumps(values, indent=indent) + "\n"
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(output)) from error
