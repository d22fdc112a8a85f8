"""`graphtune doctor`: what this machine has and what it lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Say what this machine has and lacks.

    Each lack comes with the command that mends it. Exit code 1 when a sweep on this machine needs what is lacking.
    """
    import json
    from dataclasses import asdict

    from graphtune.doctor import examine
    from graphtune.terminal import wrapped

    checks = examine(Path("reports"))
    if json_:
        typer.echo(json.dumps({"schema": 1, "checks": [asdict(check) for check in checks]}, indent=1))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            head = f"{check.state:<5}  {check.name:<{width}}  "
            for line in wrapped(check.found, head, " " * len(head), break_words=False):
                typer.echo(line)
            if check.mend:  # on one line: most of them are commands to copy
                typer.echo(f"{'':<{len(head)}}→ {check.mend}")
    if any(check.state == "lacks" for check in checks):
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)
