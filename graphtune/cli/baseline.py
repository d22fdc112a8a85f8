"""`graphtune baseline`: sweeps to compare with, kept in a repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def update(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a finished sweep.", show_default=False)],
    to: Annotated[
        Path | None, typer.Option(help="Folder of the baseline. [default: baselines/<name of DIR>]", show_default=False)
    ] = None,
) -> None:
    """Make a sweep the baseline of later comparisons.

    Writes run.json, cells.jsonl, values.csv (one figure per line, for git to show) and .gitattributes. Prints the
    folder. A sweep that is damaged, not finished or holds failed cells is refused.
    """
    from graphtune.compare.baseline import update_baseline

    baseline = to or Path("baselines") / folder.resolve().name
    sweep = update_baseline(folder, baseline)
    processes = len({int(cell.cell.get("process", 1)) for cell in sweep.cells})
    if processes < 3:
        typer.echo(
            f"note: {processes} process{'' if processes == 1 else 'es'}; with 3 or more (sweep --rounds 3) small "
            "differences can be told from noise",
            err=True,
        )
    typer.echo(str(baseline))


def register(app: typer.Typer) -> None:
    commands = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Keep sweeps to compare with.")
    commands.command("update")(update)
    app.add_typer(commands, name="baseline")
