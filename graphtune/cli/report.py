"""`graphtune report`: the page of a sweep."""

from __future__ import annotations

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
) -> None:
    """Write the page of a sweep: one HTML file that loads nothing from a network. Prints where it is."""
    from graphtune.errors import InputError
    from graphtune.report import write_report

    options: dict[str, Any] = {
        "gpu_mem": gpu_mem,
        "workload": workload,
        "context_tokens": context_len,
        "max_running_requests": max_running,
        "eager_overhead_us": eager_overhead_ms * 1000,
    }
    try:
        written = write_report(folder, output, **options)
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}",
            where=str(output or folder),
            action="Name another file with --output.",
        ) from error
    typer.echo(str(written))


def register(app: typer.Typer) -> None:
    app.command("report")(report)
