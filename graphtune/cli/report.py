"""`graphtune report`: the page of a sweep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a sweep.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File to write. [default: DIR/report.html]", show_default=False),
    ] = None,
    gpu_mem: Annotated[
        str | None, typer.Option(help="The card to answer for. [default: the one swept]", show_default=False)
    ] = None,
    workload: Annotated[str, typer.Option(help="uniform, 'steady N', or a file (kind: histogram).")] = "uniform",
    context_len: Annotated[
        int | None, typer.Option(min=1, help="Mean KV tokens per request. [default: the sweep's main context]")
    ] = None,
    max_running: Annotated[
        int | None, typer.Option(min=1, help="Most running requests. [default: the largest measured size]")
    ] = None,
    eager_overhead_ms: Annotated[
        float, typer.Option(min=0.0, help="Milliseconds that your server's eager step takes longer than graphtune's.")
    ] = 0.0,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Also write the stored timelines of steps as JSON for Perfetto or Chrome's tracing page.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the page of a sweep: one HTML file that loads nothing from a network. Prints where it is."""
    from graphtune.report import write_report
    from graphtune.store import read_sweep
    from graphtune.trace_export import write_trace

    options: dict[str, Any] = {
        "gpu_mem": gpu_mem,
        "workload": workload,
        "context_tokens": context_len,
        "max_running_requests": max_running,
        "eager_overhead_us": eager_overhead_ms * 1000,
    }
    with _writing(output or folder, "--output"):
        written = write_report(folder, output, **options)
    typer.echo(str(written))
    if trace is not None:
        with _writing(trace, "--trace"):
            write_trace(read_sweep(folder), trace)
        typer.echo(str(trace))


@contextmanager
def _writing(path: Path, option: str) -> Iterator[None]:
    from graphtune.errors import InputError

    try:
        yield
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise InputError(reason, where=str(path), action=f"Name another file with {option}.") from error


def register(app: typer.Typer) -> None:
    app.command("report")(report)
