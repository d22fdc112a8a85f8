"""`graphtune verify`: capture a recommended list for real and compare it with what was stated."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphtune.cli.recommend import EngineChoice

if TYPE_CHECKING:
    from graphtune.device import Device
    from graphtune.plan import Cell
    from graphtune.results import CellResult
    from graphtune.tune.verify_target import Target

TIMEOUT_S = 1800.0


def verify(
    what: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|RECOMMENDATION",
            help="Folder of a sweep, or the JSON of `recommend --json`.",
            show_default=False,
        ),
    ],
    gpu_mem: Annotated[
        str | None,
        typer.Option(help="The card to stay within: 80, 80GiB, 81559MiB. [default: this one]", show_default=False),
    ] = None,
    engine: Annotated[
        EngineChoice, typer.Option(help="Engine whose list is captured; all is the first that captures one.")
    ] = EngineChoice.ALL,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    log: Annotated[
        Path | None,
        typer.Option(help="Check the log of a server that runs the recommendation instead.", show_default=False),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Capture a recommended list for real: predicted against measured memory, time and latency, outputs against eager.

    A fresh process loads the model, fills a KV cache of the recommended size and captures the list. Exit codes: 0 as
    stated, 1 not, or nothing was captured because it does not fit, 2 bad input.
    """
    from graphtune.tune.verify_target import read_recommendation, target_of

    asked = None if engine is EngineChoice.ALL else engine.value.replace("-", "_")
    data = _answer(what, gpu_mem, asked) if what.is_dir() else read_recommendation(what)
    if log is not None:
        _check_log(data, asked, log, json_)
        return
    _capture(target_of(data, asked, str(what)), gpu_mem, device, json_)


def _answer(folder: Path, gpu_mem: str | None, engine: str | None) -> dict[str, Any]:
    from graphtune.store import read_sweep
    from graphtune.tune.recommend import Question, recommend
    from graphtune.tune.recommendation_json import as_json

    return as_json(recommend(read_sweep(folder), Question(gpu_mem=gpu_mem, engines=(engine,) if engine else ())))


def _capture(target: Target, gpu_mem: str | None, device_name: str, as_data: bool) -> None:
    from graphtune.device import choose_device
    from graphtune.store import read_sweep
    from graphtune.tune.verify import verification_cell, verify
    from graphtune.tune.verify_joint import joint_cell, joint_checks
    from graphtune.tune.verify_target import refuse_too_small
    from graphtune.tune.verify_text import as_json, as_text
    from graphtune.units import parse_gpu_memory, swept_gpu_memory

    sweep = read_sweep(Path(target.sweep))
    swept = next((cell.environment for cell in sweep.cells if cell.environment is not None), None)
    gpu = parse_gpu_memory(gpu_mem, swept) if gpu_mem else swept_gpu_memory(swept) if swept else None
    refuse_too_small(target, gpu)
    device = choose_device(device_name)
    _same_device(sweep.device, device)
    cell = verification_cell(target, sweep, gpu if device.kind == "cuda" else None)
    found = verify(target, sweep, _run(cell, device))
    both = joint_cell(target, sweep, cell)
    if both is not None:
        found = replace(found, checks=(*found.checks, *joint_checks(target, sweep, _run(both, device))))
    typer.echo(json.dumps(as_json(found), indent=1) if as_data else as_text(found), nl=as_data)
    if not found.passed:
        raise typer.Exit(1)


def _check_log(data: dict[str, Any], engine: str | None, log: Path, as_data: bool) -> None:
    from graphtune.tune.log_summary import summarise_file
    from graphtune.tune.verify_log import verify_log
    from graphtune.tune.verify_text import log_json, log_text

    found = verify_log(data, engine, summarise_file(str(log), engine))
    typer.echo(json.dumps(log_json(found), indent=1) if as_data else log_text(found), nl=as_data)
    if not found.passed:
        raise typer.Exit(1)


def _same_device(swept: str, device: Device) -> None:
    from graphtune.errors import InputError

    if swept != device.kind:
        raise InputError(
            f"the sweep ran on {swept} and this would run on {device.kind} ({device.name})",
            where="--device",
            action=f"Use --device {swept}, on a machine that has it.",
        )


def _run(cell: Cell, device: Device) -> CellResult:
    from graphtune.cell_run import finish_cell, start_cell
    from graphtune.console import progress_on

    progress = progress_on()
    try:
        with tempfile.TemporaryDirectory(prefix="graphtune-verify-") as folder:
            process = start_cell(cell, Path(folder), device=device.kind, environment=device.environment)
            log_file = Path(folder) / "log.txt"
            return finish_cell(process, log_file, timeout_s=TIMEOUT_S, on_stage=progress.stage).result
    finally:
        progress.close()


def register(app: typer.Typer) -> None:
    app.command("verify")(verify)
