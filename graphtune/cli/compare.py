"""`graphtune compare`: two sweeps side by side."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from graphtune.compare.model import Comparison
    from graphtune.stats import Time


class Format(StrEnum):
    TABLE = "table"
    MARKDOWN = "markdown"
    JUNIT = "junit"
    JSON = "json"
    GITHUB = "github"


class Fail(StrEnum):
    SLOWER = "slower"
    MEMORY = "memory"
    ANY = "any"
    NONE = "none"


TIMES: tuple[Time, ...] = ("step_us", "gpu_us", "host_us", "plan_us", "fill_us", "launch_us", "overlap_us")


def compare(
    base: Annotated[
        Path, typer.Argument(metavar="BASE", help="Folder of the baseline sweep, or a server log.", show_default=False)
    ],
    new: Annotated[
        Path, typer.Argument(metavar="NEW", help="Folder of the candidate sweep, or a server log.", show_default=False)
    ],
    format_: Annotated[Format, typer.Option("--format", help="What to print.")] = Format.TABLE,
    json_: Annotated[bool, typer.Option("--json", help="Short for --format json.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Also write a page (HTML) here.", show_default=False)
    ] = None,
    fail_on: Annotated[Fail, typer.Option(help="What exit code 1 stands for.")] = Fail.ANY,
    thresholds: Annotated[
        Path | None, typer.Option(help="Tolerances by row (YAML).", metavar="FILE", show_default=False)
    ] = None,
    allow: Annotated[
        str,
        typer.Option(help="Differences to compare across: device, driver, model.", metavar="A,B", show_default=False),
    ] = "",
    times: Annotated[
        str, typer.Option(help=f"Times to compare: {', '.join(TIMES)}.", metavar="A,B")
    ] = "step_us,gpu_us",
    neutral_without_gpu: Annotated[
        bool,
        typer.Option("--neutral-without-gpu", help="Without a GPU here and a GPU sweep in NEW, say so and exit 0."),
    ] = False,
) -> None:
    """Compare two sweeps: what is slower, larger, faster or smaller, and what cannot be told apart.

    Two server logs of an engine, or two files with the JSON of SGLang's /server_info, are compared in the same way:
    bytes and seconds of captures, and what else the servers say of themselves.

    Exit codes: 0 no finding, 1 a finding (--fail-on), 2 bad input, such as sweeps of different devices.
    """
    from graphtune.compare.logs import compare_logs
    from graphtune.compare.sweeps import ALLOWED, compare_sweeps, read_comparable
    from graphtune.compare.thresholds import load_thresholds

    format_ = Format.JSON if json_ else format_
    allowed = _listed(allow, ALLOWED, "--allow")
    chosen = tuple(time for time in TIMES if time in _listed(times, TIMES, "--times"))
    limits = load_thresholds(thresholds) if thresholds is not None else None
    if _are_logs(base, new):
        comparison = compare_logs(str(base), str(new), limits)
    else:
        before = read_comparable(base)
        if neutral_without_gpu and (reason := _no_gpu(new, before.device)):
            typer.echo(_not_compared(reason, format_), nl=False)
            return
        comparison = compare_sweeps(before, read_comparable(new), limits, allow=allowed, times=chosen)
    typer.echo(_text(comparison, format_, fail_on), nl=False)
    if output is not None:
        _write_page(comparison, output)
    if comparison.findings(fail_on.value):
        raise typer.Exit(1)


def _are_logs(base: Path, new: Path) -> bool:
    """True for two files; InputError for a file and a folder."""
    from graphtune.errors import InputError

    if base.is_file() != new.is_file() and base.exists() and new.exists():
        file, folder = (base, new) if base.is_file() else (new, base)
        raise InputError(
            "a server log cannot be compared with a sweep",
            where=f"{file} and {folder}",
            action="Name two folders that `graphtune sweep` wrote, or two logs.",
        )
    return base.is_file() or new.is_file()


def _listed(text: str, known: tuple[str, ...], where: str) -> tuple[str, ...]:
    from graphtune.errors import InputError

    words = tuple(word.strip() for word in text.split(",") if word.strip())
    for word in words:
        if word not in known:
            raise InputError(f"{word!r} is none of {', '.join(known)}", where=where)
    return words


def _no_gpu(new: Path, base_device: str) -> str | None:
    """Why there is nothing to compare with a GPU's baseline here; None where there is."""
    from graphtune.device import list_gpus
    from graphtune.store import read_run

    if base_device != "cuda" or (new.exists() and read_run(new).device == "cuda"):
        return None
    gpus, why = list_gpus()
    if gpus:
        return None
    return f"this machine has no GPU ({why}), so nothing was measured that the baseline could be compared with"


def _not_compared(reason: str, format_: Format) -> str:
    from graphtune.compare import exchange
    from graphtune.terminal import wrapped

    if format_ is Format.JSON:
        return exchange.not_compared_json(reason)
    if format_ is Format.JUNIT:
        return exchange.not_compared_junit(reason)
    if format_ is Format.GITHUB:
        return exchange.annotation("notice", "graphtune compare", f"Not compared: {reason}.") + "\n"
    if format_ is Format.MARKDOWN:
        return f"### graphtune: not compared\n\n{reason}\n"
    return "\n".join(wrapped(f"Not compared: {reason}")) + "\n"


def _text(comparison: Comparison, format_: Format, fail_on: Fail) -> str:
    from graphtune.compare import exchange, text

    match format_:
        case Format.TABLE:
            return text.as_table(comparison)
        case Format.MARKDOWN:
            return text.as_markdown(comparison)
        case Format.JUNIT:
            return exchange.as_junit(comparison, fail_on.value)
        case Format.JSON:
            return exchange.as_json(comparison, fail_on.value)
        case Format.GITHUB:
            return exchange.as_github(comparison, fail_on.value)


def _write_page(comparison: Comparison, output: Path) -> None:
    from graphtune.compare.page import render
    from graphtune.errors import InputError
    from graphtune.store import write_atomically

    try:
        write_atomically(output, render(comparison))
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}", where=str(output), action="Name another file."
        ) from error
    typer.echo(f"page: {output}", err=True)


def register(app: typer.Typer) -> None:
    app.command("compare")(compare)
