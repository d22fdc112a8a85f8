"""A stored sweep: one folder with ``run.json`` (what was asked, where, when) and ``cells.jsonl`` (one result a line).

Lines are only ever appended, each flushed to the disk before the next cell starts, so that a kill costs at most the
running cell. A cell measured again is appended again and the last line counts.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError

from graphtune.errors import InputError
from graphtune.plan import Cell, Skip
from graphtune.results import SCHEMA, CellResult, Point, Samples
from graphtune.stats import median_us, spread_us

if TYPE_CHECKING:
    import pandas as pd

RUN_FILE = "run.json"
CELLS_FILE = "cells.jsonl"
LOGS_FOLDER = "logs"
PAGE_FILE = "report.html"

TORN_LINE = "the last line is torn"
NEWER = "Read it with the graphtune that wrote it, or a newer one."


@dataclass(frozen=True, kw_only=True)
class Run:
    """Head of a sweep, as in ``run.json``. Times are ISO 8601 in UTC; ``finished_at`` is null while cells are missing.

    ``recipe`` is the recipe as resolved (model facts inline), ``recipe_sha`` the SHA-256 of its canonical JSON.
    """

    recipe_name: str
    recipe: dict[str, Any]
    recipe_sha: str
    model_name: str
    device: Literal["cuda", "cpu"]
    device_name: str
    started_at: str
    finished_at: str | None = None
    skips: tuple[Skip, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sweep(Run):
    """A sweep as read back. ``cells`` holds the newest result of every cell; ``damaged_lines`` count from 1."""

    path: Path
    cells: tuple[CellResult, ...] = ()
    damaged_lines: tuple[int, ...] = ()


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def encode_result(result: CellResult) -> str:
    """One line of JSON without the newline. JSON has no NaN or infinity: they become null, as missing values are."""
    return json.dumps(_finite(asdict(result)), separators=(",", ":"), allow_nan=False)


def decode_result(text: str | bytes) -> CellResult:
    """The inverse of ``encode_result``; ValueError says what is wrong with the text."""
    result: CellResult = _adapter(CellResult).validate_json(text)
    if result.schema > SCHEMA:
        raise ValueError(f"schema {result.schema} is newer than this graphtune reads ({SCHEMA})")
    return result


def encode_cell(cell: Cell) -> str:
    """Canonical JSON of a cell: what a worker is started with, and what the cell's id hashes."""
    return json.dumps(asdict(cell), sort_keys=True, separators=(",", ":"))


def decode_cell(value: str | bytes | dict[str, Any]) -> Cell:
    """A Cell from JSON text or from ``CellResult.cell``; ValueError says what is wrong with it."""
    adapter = _adapter(Cell)
    cell: Cell = adapter.validate_python(value) if isinstance(value, dict) else adapter.validate_json(value)
    return cell


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` so that a reader sees the old file or the new one, whole, also after a crash."""
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_run(path: Path) -> Run:
    """The head of the sweep in folder ``path``; InputError names the file and what is wrong with it."""
    file = path / RUN_FILE
    if not path.is_dir():
        raise InputError("no such sweep folder", where=str(path), action="Name a folder that `graphtune sweep` wrote.")
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        action = "Name a folder that `graphtune sweep` wrote."
        raise InputError(f"cannot be read: {error.strerror}", where=str(file), action=action) from error
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 text: {error.reason}", where=str(file)) from error
    try:
        values = json.loads(text)
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise InputError(f"is not JSON: {error}", where=f"{file}:{line}") from error
    if not isinstance(values, dict):
        raise InputError("must hold a JSON object", where=str(file))
    schema = values.pop("schema", None)
    if not isinstance(schema, int):
        raise InputError("has no schema number; it is not the head of a graphtune sweep", where=str(file))
    if schema > SCHEMA:
        raise InputError(
            f"schema {schema} is newer than this graphtune reads ({SCHEMA})", where=str(file), action=NEWER
        )
    try:
        run: Run = _adapter(Run).validate_python(values)
    except ValidationError as error:
        raise InputError(_first_fault(error), where=str(file)) from error
    return run


def read_sweep(path: Path) -> Sweep:
    """Read a sweep folder.

    A torn last line (the writer was killed) is tolerated and noted. Other damaged lines are left out, listed in
    ``damaged_lines`` and noted. Raises InputError where there is no sweep, its head cannot be read, or a line was
    written by a newer graphtune.
    """
    path = Path(path)
    run = read_run(path)
    results, damaged, notes = _read_cells(path / CELLS_FILE)
    head = {field.name: getattr(run, field.name) for field in fields(Run)}
    head["notes"] = (*run.notes, *notes)
    return Sweep(path=path, cells=tuple(results.values()), damaged_lines=damaged, **head)


def find_sweeps(root: Path) -> tuple[Path, ...]:
    """Folders at or below ``root``, at most two levels down, that hold a readable head of a sweep, in name order."""
    found = []
    for pattern in (RUN_FILE, f"*/{RUN_FILE}", f"*/*/{RUN_FILE}"):
        for file in sorted(Path(root).glob(pattern)):
            try:
                read_run(file.parent)
            except InputError:
                continue
            found.append(file.parent)
    return tuple(found)


def _read_cells(file: Path) -> tuple[dict[str, CellResult], tuple[int, ...], list[str]]:
    results: dict[str, CellResult] = {}
    damaged: list[int] = []
    notes: list[str] = []
    if not file.exists():
        return results, (), notes
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(file)) from error
    whole = content.endswith(b"\n")
    lines = content.splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            result = decode_result(line)
        except ValidationError as error:
            if number == len(lines) and not whole:
                notes.append(f"{file}:{number}: {TORN_LINE}; that cell counts as not measured")
            else:
                damaged.append(number)
                notes.append(f"{file}:{number}: damaged line left out: {_first_fault(error)}")
        except ValueError as error:
            raise InputError(str(error), where=f"{file}:{number}", action=NEWER) from error
        else:
            results.pop(result.cell_id, None)
            results[result.cell_id] = result
    return results, tuple(damaged), notes


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_input=False)[0]
    key = ".".join(str(part) for part in fault["loc"])
    return f"{key}: {fault['msg']}" if key else fault["msg"]


class SweepWriter:
    """Writes one sweep folder. Making one tries the folder: InputError when it cannot be written."""

    def __init__(self, path: Path, run: Run) -> None:
        self.path = path
        self.run = run
        try:
            (path / LOGS_FOLDER).mkdir(parents=True, exist_ok=True)
            self._write_head()
            self._drop_torn_line()
        except OSError as error:
            raise _unwritable(path, error) from error

    def append(self, result: CellResult) -> None:
        """Add one result and wait until it is on the disk. On a failed write the file keeps its former lines whole."""
        file = self.path / CELLS_FILE
        line = encode_result(result).encode() + b"\n"
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                before = os.fstat(descriptor).st_size
                try:
                    _write_all(descriptor, line)
                    os.fsync(descriptor)
                except OSError:
                    _truncate(descriptor, before)
                    raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _unwritable(file, error) from error

    def update(self, run: Run) -> None:
        """Replace the head, for example with its ``finished_at``."""
        self.run = run
        try:
            self._write_head()
        except OSError as error:
            raise _unwritable(self.path / RUN_FILE, error) from error

    def _write_head(self) -> None:
        text = json.dumps({"schema": SCHEMA, **asdict(self.run)}, indent=1)
        write_atomically(self.path / RUN_FILE, text + "\n")

    def _drop_torn_line(self) -> None:
        """End the file at a line end. A torn line holds nothing that can be read; appending to it would damage two."""
        file = self.path / CELLS_FILE
        if not file.exists():
            return
        content = file.read_bytes()
        torn = content[content.rfind(b"\n") + 1 :]
        if not torn:
            return
        with file.open("r+b") as handle:
            try:
                decode_result(torn)
            except ValueError:
                handle.truncate(len(content) - len(torn))
            else:
                handle.seek(0, os.SEEK_END)
                handle.write(b"\n")
            handle.flush()
            os.fsync(handle.fileno())


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _truncate(descriptor: int, size: int) -> None:
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        return  # not a regular file; a torn last line is tolerated on reading


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"cannot be written: {error.strerror or error}",
        where=str(path),
        action="Free space or name another folder with --out. Results stored so far stay; the same command resumes.",
    )


TIMES = ("gpu_us", "host_us", "plan_us", "fill_us", "launch_us", "step_us", "overlap_us")


def tidy_frame(sweep: Sweep) -> pd.DataFrame:
    """One row per point. Each time has ``<time>_median``, ``_low`` and ``_high`` (quartiles), ``_taken`` and ``_stop``,
    ``_disturbed`` (how many stored samples were left out) and ``_flags`` (what disturbed those that were not).

    Statistics are over the stored samples that count. A time that was not measured is missing (NaN), never 0.
    """
    import pandas as pd

    rows = [_row(cell, point) for cell in sweep.cells for point in cell.points]
    return pd.DataFrame(rows, columns=_columns())


def _columns() -> list[str]:
    head = ["cell_id", "purpose", "process", "model", "device", "page_size", "shard", "phase"]
    head += ["raw_size", "padded_size", "requests", "context_tokens", "execution", "backend", "attention"]
    statistics = ("median", "low", "high", "taken", "stop", "disturbed", "flags")
    return [*head, "status", "reason", *(f"{time}_{statistic}" for time in TIMES for statistic in statistics)]


def _row(cell: CellResult, point: Point) -> dict[str, Any]:
    asked = cell.cell
    row: dict[str, Any] = {
        "cell_id": cell.cell_id,
        "purpose": asked.get("purpose"),
        "process": asked.get("process"),
        "model": asked.get("model_name"),
        "device": cell.environment.device if cell.environment else None,
        "page_size": asked.get("page_size"),
        "shard": asked.get("shard"),
        "phase": point.phase,
        "raw_size": point.raw_size,
        "padded_size": point.padded_size,
        "requests": point.requests,
        "context_tokens": point.context_tokens,
        "execution": point.execution,
        "backend": point.backend,
        "attention": point.attention,
        "status": point.status,
        "reason": point.reason,
    }
    for time in TIMES:
        row |= _statistics(time, getattr(point, time))
    return row


def _statistics(time: str, samples: Samples | None) -> dict[str, Any]:
    spread = spread_us(samples)
    return {
        f"{time}_median": median_us(samples),
        f"{time}_low": spread[0] if spread else None,
        f"{time}_high": spread[1] if spread else None,
        f"{time}_taken": samples.taken if samples else None,
        f"{time}_stop": samples.stop if samples else None,
        f"{time}_disturbed": len(samples.disturbed_us) if samples else None,
        f"{time}_flags": ", ".join(samples.flags) if samples else None,
    }
