"""`graphtune recipe`: write a recipe for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def recipe(
    model: Annotated[Path, typer.Argument(help="A config.json, or a model folder that holds one.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write. [default: stdout]", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a commented recipe for a model."""
    from graphtune.errors import InputError
    from graphtune.recipe_template import recipe_text

    target = None if output is None or str(output) == "-" else output
    text = recipe_text(model, target)
    if target is None:
        typer.echo(text, nl=False)
        return
    try:
        with target.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise InputError("exists already", where=str(target), action="Use --force to replace it.") from error
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(target)) from error
    typer.echo(f"wrote {target}; next: graphtune sweep {target} --dry-run", err=True)


def register(app: typer.Typer) -> None:
    app.command("recipe")(recipe)
