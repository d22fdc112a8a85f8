"""`graphtune sweep`: measure what a recipe asks for."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from graphtune.device import Device
    from graphtune.plan import Plan
    from graphtune.recipe import LoadedRecipe
    from graphtune.sweep import SweepOptions, SweepOutcome

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it."""

CORES_TO_START_AHEAD = 4
"""With fewer, importing for the next process would disturb this one."""


def sweep(
    recipe: Annotated[Path, typer.Argument(help="Recipe file (YAML).", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results. [default: reports/<recipe>-<device>]", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, with expected time and memory.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew instead of resuming.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run failed cells again.")] = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=20, help="Processes that repeat the sweep. [default: the recipe's]")
    ] = None,
    time_budget: Annotated[
        str | None, typer.Option(help="Start no cell that would end later, for example 10m.", show_default=False)
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a key, for example measure.noise=0.05.", metavar="KEY=VALUE"),
    ] = None,
    commit: Annotated[
        str | None,
        typer.Option(
            help="Commit of the code under test. [default: GRAPHTUNE_COMMIT, else that of the folder you are in]",
            envvar="GRAPHTUNE_COMMIT",
            show_envvar=False,
            show_default=False,
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="With --dry-run: the plan as JSON.")] = False,
) -> None:
    """Measure what a recipe asks for.

    Captures and times the model's graphs under the recipe's lists and settings, each in a process of its own. Running
    the same command again resumes: cells that are measured are not measured again.
    """
    from graphtune.commit import checked_commit, commit_here
    from graphtune.device import choose_device
    from graphtune.planner import plan_sweep
    from graphtune.recipe import load_recipe
    from graphtune.sweep import SweepOptions
    from graphtune.units import parse_duration_s

    loaded = load_recipe(recipe, set_ or ())
    budget_s = parse_duration_s(time_budget, where="--time-budget") if time_budget else None
    tested = checked_commit(commit, "--commit") if commit else commit_here(Path())
    chosen = choose_device(device)
    plan = plan_sweep(loaded, device=chosen.kind, device_facts=chosen.facts, processes=rounds)
    folder = out or Path("reports") / f"{loaded.recipe.name}-{chosen.slug}"
    for note in plan.notes:
        _say(f"note: {note}")
    for skip in plan.skips:
        _say(f"left out: {skip.what}: {skip.reason}")
    if dry_run:
        typer.echo(_plan_json(plan, loaded) if json_ else _plan_table(plan, loaded, chosen, folder))
    _refuse_too_large(plan, loaded, chosen)
    if not dry_run:
        timeout_s = loaded.recipe.limits.cell_timeout_s
        ahead = _usable_cores() >= CORES_TO_START_AHEAD
        options = SweepOptions(fresh, retry_failed, budget_s, timeout_s, tested, ahead=ahead)
        _report(_run(plan, loaded, chosen, folder, options))


def _usable_cores() -> int:
    """Cores that this process may run on, where the system tells (Linux), else all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _say(text: str) -> None:
    """On stderr, in lines that fit a terminal; paths stay whole."""
    from graphtune.terminal import wrapped

    typer.echo("\n".join(wrapped(text, following="  ", break_words=False)), err=True)


def register(app: typer.Typer) -> None:
    app.command("sweep")(sweep)


def _run(plan: Plan, loaded: LoadedRecipe, device: Device, folder: Path, options: SweepOptions) -> SweepOutcome:
    from graphtune.console import progress_on
    from graphtune.estimate import expected_seconds
    from graphtune.sweep import run_sweep

    # A terminate request ends the sweep as Ctrl-C does: the worker is stopped, what is stored stays.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    progress = progress_on()
    try:
        return run_sweep(
            plan,
            loaded,
            device,
            folder,
            expected_s=lambda cell: expected_seconds(cell, loaded.model, device.kind),
            progress=progress,
            options=options,
        )
    except KeyboardInterrupt as interrupt:
        progress.close()
        typer.echo(f"stopped; what is measured is in {folder}. The same command resumes (without --fresh).", err=True)
        raise typer.Exit(INTERRUPTED) from interrupt
    finally:
        progress.close()


def _report(outcome: SweepOutcome) -> None:
    for note in outcome.notes:
        _say(f"note: {note}")
    for finding in outcome.findings:
        _say(finding)
    done = f"{outcome.measured} cells measured"
    if outcome.resumed:
        done += f", {outcome.resumed} from before"
    if outcome.left:
        done += f", {outcome.left} left when the time budget was used up: the same command resumes"
    _say(f"{done}.")
    typer.echo(str(outcome.path))
    if outcome.findings:
        failed = len(outcome.findings)
        _say(f"{failed} finding{'s' if failed > 1 else ''}; --retry-failed runs failed cells again.")
        raise typer.Exit(1)


def _refuse_too_large(plan: Plan, loaded: LoadedRecipe, device: Device) -> None:
    """On a CPU nothing refuses an allocation: the machine would swap or kill, so it is refused here."""
    from graphtune.errors import InputError
    from graphtune.estimate import expected_bytes
    from graphtune.units import format_bytes

    need = max(expected_bytes(cell, loaded.model, device.kind) for cell in plan.cells)
    if device.kind == "cpu" and device.memory_bytes is not None and need > device.memory_bytes:
        raise InputError(
            f"a cell takes about {format_bytes(need)}; this machine has {format_bytes(device.memory_bytes)}",
            where=loaded.source.where(("model",)),
            action="Sweep it on a GPU, or a smaller model here: recipes/quickstart.yaml.",
        )


def _plan_json(plan: Plan, loaded: LoadedRecipe) -> str:
    from dataclasses import asdict

    from graphtune.estimate import expected_bytes, expected_seconds

    cells = [
        {
            "id": cell.id,
            "expected_s": round(expected_seconds(cell, loaded.model, plan.device), 1),
            "expected_bytes": expected_bytes(cell, loaded.model, plan.device),
            **asdict(cell),
        }
        for cell in plan.cells
    ]
    return json.dumps({"schema": 1, **asdict(plan), "cells": cells}, indent=1)


def _plan_table(plan: Plan, loaded: LoadedRecipe, device: Device, folder: Path) -> str:
    from graphtune.estimate import expected_bytes, expected_seconds
    from graphtune.plan_text import plan_lines

    lines = plan_lines(
        plan,
        loaded.model_name,
        device.name,
        str(folder),
        lambda cell: expected_seconds(cell, loaded.model, plan.device),
        lambda cell: expected_bytes(cell, loaded.model, plan.device),
    )
    return "\n".join(lines)
