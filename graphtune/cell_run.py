"""Runs one cell in a process of its own and reads its result, or what is left of one when the process ended badly."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from graphtune.plan import Cell
from graphtune.results import SCHEMA, CellResult, Status
from graphtune.store import decode_result, encode_cell, write_atomically
from graphtune.worker_process import WORKER, StageHook, WorkerProcess, crash_reason


@dataclass(frozen=True)
class Run:
    """A cell's result and the wall seconds of its process. ``crash`` is why the process left no result, else None."""

    result: CellResult
    seconds: float
    crash: str | None


@dataclass(frozen=True)
class CellProcess:
    """The process that measures ``cell``, and the file that it leaves its result in."""

    cell: Cell
    worker: WorkerProcess
    result_file: Path


def start_cell(
    cell: Cell,
    folder: Path,
    *,
    device: str,
    environment: Mapping[str, str],
    worker: Sequence[str] | None = None,
    ahead: bool = False,
) -> CellProcess:
    """Start ``cell`` on ``device`` (cuda or cpu), its files in ``folder``, which must exist.

    ``worker`` is the command of another worker than graphtune's. One started ``ahead`` touches no device before it is
    waited for. Raises OSError where a file cannot be written.
    """
    cell_file, result_file = folder / f"{cell.id}.cell.json", folder / f"{cell.id}.result.json"
    write_atomically(cell_file, encode_cell(cell))
    command = (*(worker or WORKER), "--device", device)
    return CellProcess(
        cell, WorkerProcess(command, cell_file, result_file, environment=environment, ahead=ahead), result_file
    )


def finish_cell(process: CellProcess, log_file: Path, *, timeout_s: float, on_stage: StageHook) -> Run:
    """Wait for a started cell and read its result.

    A process that leaves no result gives the partial one that it had written, or an empty one, with status and reason.
    Raises OSError where the log cannot be written.
    """
    cell, result_file = process.cell, process.result_file
    started_at = now()
    log_file.unlink(missing_ok=True)
    ending = process.worker.wait(log_file, timeout_s=timeout_s, on_stage=on_stage)
    result = _read_result(result_file, cell)
    if result is not None:
        return Run(result, ending.seconds, None)
    status, reason = crash_reason(ending, log_file, timeout_s)
    crash = reason
    partial = _read_result(result_file.with_name(f"{result_file.name}.partial"), cell)
    if partial is not None:
        reason = f"{reason}; kept what was measured before"
    left = partial or _nothing_measured(cell, started_at)
    return Run(replace(left, status=cast(Status, status), reason=reason, finished_at=now()), ending.seconds, crash)


def now() -> str:
    """This second in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _read_result(file: Path, cell: Cell) -> CellResult | None:
    try:
        result = decode_result(file.read_bytes())
    except (OSError, ValueError):
        return None
    return result if result.cell_id == cell.id else None


def _nothing_measured(cell: Cell, started_at: str) -> CellResult:
    return CellResult(
        schema=SCHEMA,
        cell_id=cell.id,
        cell=json.loads(encode_cell(cell)),
        status="failed",
        reason=None,
        environment=None,
        model=None,
        captured_lists=(),
        points=(),
        ledger=None,
        launch_profiles=(),
        admission={},
        phase_seconds={},
        started_at=started_at,
        finished_at=started_at,
    )
