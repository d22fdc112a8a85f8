"""The `graphtune` command: gathers the commands and turns errors into one message and an exit code."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from graphtune import __version__
from graphtune.cli import (
    baseline,
    compare,
    doctor,
    lint,
    log,
    recipe,
    recommend,
    report,
    simulate,
    sweep,
    verify,
    workload,
)
from graphtune.errors import GraphtuneError


class _Group(TyperGroup):
    """Prints a GraphtuneError as one message on stderr and exits with its code (0 done, 1 a finding, 2 bad input)."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GraphtuneError as error:
            typer.echo(_message(f"graphtune: {error}", sys.stderr.isatty()), err=True)
            raise typer.Exit(error.exit_code) from error


def _message(text: str, on_terminal: bool) -> str:
    """In lines that fit a terminal, paths whole; for a file or a pipe as it is, so that it can be searched."""
    if not on_terminal:
        return text
    from graphtune.terminal import wrapped

    return "\n".join("\n".join(wrapped(line, following="  ", break_words=False)) for line in text.splitlines())


app = typer.Typer(
    name="graphtune",
    cls=_Group,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"graphtune {__version__}")
        raise typer.Exit()


@app.callback()
def graphtune(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Measure CUDA graph capture on your own GPU and compute the configuration to serve with.

    Data goes to stdout, progress and warnings to stderr. Exit codes: 0 done, 1 a finding, 2 bad input.
    """


for command in (recipe, sweep, recommend, verify, simulate, workload, report, compare, baseline, log, lint, doctor):
    command.register(app)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
