"""Runs a plan: one fresh process per cell, every result stored before the next cell starts, resumable at any moment."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from graphtune.cell_run import CellProcess, finish_cell, now, start_cell
from graphtune.commit import COMMIT_VARIABLE
from graphtune.console import Progress
from graphtune.device import Device
from graphtune.errors import GraphtuneError, InputError
from graphtune.plan import Cell, Plan
from graphtune.plan_text import describe
from graphtune.planner import follow_up
from graphtune.recipe import LoadedRecipe
from graphtune.results import CellResult
from graphtune.store import (
    CELLS_FILE,
    LOGS_FOLDER,
    PAGE_FILE,
    RUN_FILE,
    Run,
    Sweep,
    SweepWriter,
    decode_result,
    read_sweep,
)
from graphtune.units import MIB, format_bytes

RUNNING_FOLDER = "running"
LEAST_FREE_BYTES = 32 * MIB
RESUME = "Free some space; the same command resumes."


@dataclass(frozen=True)
class SweepOptions:
    """How to go about it: start anew, run failed cells again, start no cell that would end after so many seconds.

    ``commit`` is that of the code under test. ``worker`` is the command of another worker than graphtune's. With
    ``ahead`` the next cell's process imports torch while this one's still prepares itself; it touches no device before
    its turn.
    """

    fresh: bool = False
    retry_failed: bool = False
    time_budget_s: float | None = None
    cell_timeout_s: float = 1800.0
    commit: str | None = None
    worker: Sequence[str] | None = None
    ahead: bool = False


@dataclass
class SweepOutcome:
    """What a call of ``run_sweep`` did: cells measured, taken from before, left for later; failures as ``findings``."""

    path: Path
    measured: int = 0
    resumed: int = 0
    left: int = 0
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run_sweep(
    plan: Plan,
    loaded: LoadedRecipe,
    device: Device,
    path: Path,
    *,
    expected_s: Callable[[Cell], float],
    progress: Progress,
    options: SweepOptions | None = None,
) -> SweepOutcome:
    """Run the cells of ``plan`` that ``path`` does not hold yet and write its page.

    A cell that fails is a result with a reason; the sweep goes on. What a cell leaves unmeasured runs in a fresh
    process. Raises InputError when the folder cannot be written, holds another sweep, or the disk fills up; nothing
    stored is lost in any of these, nor at KeyboardInterrupt, which passes through.
    """
    options = options or SweepOptions()
    run = _head(plan, loaded, device)
    with _locked(path):
        stored = None if options.fresh else _stored(path, run)
        if options.fresh:
            _set_aside(path)
        if stored is not None:
            run = replace(run, started_at=stored.started_at, finished_at=stored.finished_at)
        writer = SweepWriter(path, run)
        return _Sweep(plan, device, writer, stored, expected_s, progress, options).run()


def _head(plan: Plan, loaded: LoadedRecipe, device: Device) -> Run:
    return Run(
        recipe_name=plan.recipe_name,
        recipe=loaded.as_dict(),
        recipe_sha=loaded.sha,
        model_name=loaded.model_name,
        device=device.kind,
        device_name=device.name,
        started_at=now(),
        skips=plan.skips,
        notes=plan.notes,
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One sweep at a time writes a folder. The kernel drops the lock with the process, however it ends."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        action = "Name another folder with --out."
        raise InputError(f"cannot be written: {error.strerror}", where=str(path), action=action) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        action = "Wait for it, or name another folder with --out."
        raise InputError("another sweep is writing this folder", where=str(path), action=action) from error
    try:
        yield
    finally:
        os.close(descriptor)


def _stored(path: Path, run: Run) -> Sweep | None:
    """What the folder holds already; InputError when that is a sweep of something else."""
    if not (path / RUN_FILE).exists():
        return None
    stored = read_sweep(path)
    for what, there, here in (
        ("recipe", (stored.recipe_name, stored.recipe_sha), (run.recipe_name, run.recipe_sha)),
        ("device", (stored.device, stored.device_name), (run.device, run.device_name)),
    ):
        if there != here:
            detail = f" ({there[1]}, not {here[1]})" if what == "device" else ""
            raise InputError(
                f"holds a sweep with another {what}{detail}",
                where=str(path),
                action="Name another folder with --out, or start anew with --fresh.",
            )
    return stored


def _set_aside(path: Path) -> None:
    cells = path / CELLS_FILE
    if cells.exists():
        os.replace(cells, path / f"{CELLS_FILE}.previous")
    shutil.rmtree(path / RUNNING_FOLDER, ignore_errors=True)


class _Sweep:
    """The state of one running sweep."""

    def __init__(
        self,
        plan: Plan,
        device: Device,
        writer: SweepWriter,
        stored: Sweep | None,
        expected_s: Callable[[Cell], float],
        progress: Progress,
        options: SweepOptions,
    ) -> None:
        self.plan = plan
        self.device = device
        self.writer = writer
        self.path = writer.path
        self.expected_s = expected_s
        self.progress = progress
        self.options = options
        self.results = {result.cell_id: result for result in stored.cells} if stored else {}
        self.outcome = SweepOutcome(self.path)
        if stored is not None:
            self.outcome.notes += stored.notes[len(writer.run.notes) :]
            self.outcome.findings += [f"{CELLS_FILE}:{line}: damaged line left out" for line in stored.damaged_lines]
            self._note_commits(stored)
        self.started = time.monotonic()
        self.last_s = 0.0
        self.spent_s = 0.0
        self.foreseen_s = 0.0
        self.ahead: CellProcess | None = None

    def _note_commits(self, stored: Sweep) -> None:
        """Cells of several commits in one sweep are no error, but one figure of it may then be of two codes."""
        before = {cell.environment.commit for cell in stored.cells if cell.environment is not None} - {None}
        others = sorted(str(commit) for commit in before if commit != self.options.commit)
        if others:
            self.outcome.notes.append(
                f"cells stored before are of commit {', '.join(others)}, this one is "
                f"{self.options.commit or 'not known'}; --fresh measures all of them again"
            )

    def run(self) -> SweepOutcome:
        self._adopt()
        try:
            self._run()
        finally:
            if self.ahead is not None:
                self.ahead.worker.stop()
        self._finish()
        return self.outcome

    def _run(self) -> None:
        queue = list(self.plan.cells)
        number = 0
        while queue:
            cell = queue.pop(0)
            number += 1
            result = self._settled(cell)
            if result is not None:
                self.outcome.resumed += 1
            elif self._budget_spent(cell):
                self.outcome.left = 1 + sum(self._settled(other) is None for other in queue)
                break
            else:
                if self.writer.run.finished_at is not None:
                    self.writer.update(replace(self.writer.run, finished_at=None))
                left_s = self._seconds_left([cell, *queue])
                self.progress.cell_started(number, number + len(queue), describe(cell), self._foreseen(cell), left_s)
                following = next((other for other in queue if self._settled(other) is None), None)
                result = self._measure(cell, following)
                self._store(result)
                self.outcome.measured += 1
                self.progress.cell_ended(result.status, self.last_s, self._seconds_left(queue))
                if result.status != "ok":
                    self.progress.say(f"  {result.reason}")
            self.outcome.findings += findings_of(cell, result)
            rest = _left_by(cell, result)
            if rest is not None:
                queue.insert(0, rest)

    def _settled(self, cell: Cell) -> CellResult | None:
        """The stored result that makes running the cell again unnecessary."""
        result = self.results.get(cell.id)
        if result is None or (result.status != "ok" and self.options.retry_failed):
            return None
        return result

    def _adopt(self) -> None:
        """Take results that a worker had finished when the sweep before was killed or found the disk full."""
        folder = self.path / RUNNING_FOLDER
        for file in sorted(folder.glob("*.result.json")):
            with suppress(OSError, ValueError):
                result = decode_result(file.read_bytes())
                self._store(replace(result, log_path=f"{LOGS_FOLDER}/{result.cell_id}.log"))
        shutil.rmtree(folder, ignore_errors=True)

    def _store(self, result: CellResult) -> None:
        """Append the result; only then are the files of its process dropped."""
        self.writer.append(result)
        self.results[result.cell_id] = result
        for file in (self.path / RUNNING_FOLDER).glob(f"{result.cell_id}.*"):
            file.unlink(missing_ok=True)

    def _measure(self, cell: Cell, following: Cell | None) -> CellResult:
        """Run the cell in its own process. Its files stay under ``running/`` until its result is stored.

        The process of the cell that follows is started beside it, so that both import at once and nothing else runs
        while this one measures.
        """
        free = shutil.disk_usage(self.path).free
        if free < LEAST_FREE_BYTES:
            raise InputError(f"only {format_bytes(free)} are free on this disk", where=str(self.path), action=RESUME)
        folder = self.path / RUNNING_FOLDER
        log_file = self.path / LOGS_FOLDER / f"{cell.id}.log"
        try:
            folder.mkdir(exist_ok=True)
            waiting = self._started_before(cell)
            if self.options.ahead and self.ahead is None and following is not None:
                self.ahead = self._start(following, ahead=True)
            # Last, so that no process is left running when a file cannot be written.
            process = waiting or self._start(cell)
            timeout_s = self.options.cell_timeout_s
            run = finish_cell(process, log_file, timeout_s=timeout_s, on_stage=self.progress.stage)
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}", where=str(folder), action=RESUME) from error
        if run.crash is not None and os.strerror(errno.ENOSPC) in run.crash:
            raise InputError(f"the worker could not write: {run.crash}", where=str(self.path), action=RESUME)
        self.last_s = run.seconds
        self.spent_s += run.seconds
        self.foreseen_s += self.expected_s(cell)
        return replace(run.result, log_path=f"{LOGS_FOLDER}/{cell.id}.log")

    def _start(self, cell: Cell, *, ahead: bool = False) -> CellProcess:
        return start_cell(
            cell,
            self.path / RUNNING_FOLDER,
            device=self.device.kind,
            environment={**self.device.environment, COMMIT_VARIABLE: self.options.commit or ""},
            worker=self.options.worker,
            ahead=ahead,
        )

    def _started_before(self, cell: Cell) -> CellProcess | None:
        """The cell's process if one was started ahead and still waits. That of another cell goes on waiting."""
        if self.ahead is None or self.ahead.cell.id != cell.id:
            return None
        process, self.ahead = self.ahead, None
        return process if process.worker.alive else None

    def _foreseen(self, cell: Cell) -> float:
        """The estimate, corrected by how long earlier cells took against theirs."""
        return self.expected_s(cell) * (self.spent_s / self.foreseen_s if self.foreseen_s else 1.0)

    def _seconds_left(self, queue: list[Cell]) -> float | None:
        return sum(self._foreseen(cell) for cell in queue if self._settled(cell) is None) or None

    def _budget_spent(self, cell: Cell) -> bool:
        """True when the budget cannot hold another cell. A call always runs one cell, or nothing ever would."""
        budget = self.options.time_budget_s
        if budget is None or self.outcome.measured == 0:
            return False
        return time.monotonic() - self.started + self._foreseen(cell) > budget

    def _finish(self) -> None:
        """Stamp the sweep when no cell is missing, drop the working files and draw the page."""
        if not self.outcome.left and self.writer.run.finished_at is None:
            self.writer.update(replace(self.writer.run, finished_at=now()))
        shutil.rmtree(self.path / RUNNING_FOLDER, ignore_errors=True)
        from graphtune.report import write_report

        try:
            write_report(self.path, self.path / PAGE_FILE)
        except GraphtuneError as error:
            self.outcome.notes.append(f"no page was written: {error}")


def _left_by(cell: Cell, result: CellResult) -> Cell | None:
    """The cell for lists that the process had to leave out; None when it got nowhere, so that this always ends."""
    left = result.unmeasured
    return follow_up(cell, left) if left and len(left) < len(cell.lists) else None


def findings_of(cell: Cell, result: CellResult) -> list[str]:
    """What went wrong in a cell, a line each."""
    name = f"cell {cell.id} ({describe(cell)})"
    found = [] if result.status == "ok" else [f"{name}: {result.status}: {result.reason}; see {result.log_path}"]
    for captured in result.captured_lists:
        failed = [check for check in captured.gate if not check.passed]
        if failed:
            sizes = ", ".join(str(check.size) for check in failed)
            found.append(f"{name}: list {captured.list.name}: wrong results at {sizes}: {failed[0].reason}")
        elif captured.status != "ok":
            found.append(f"{name}: list {captured.list.name}: {captured.status}: {captured.reason}")
    wrong = [point for point in result.points if point.status != "ok"]
    if wrong:
        found.append(f"{name}: {len(wrong)} step times missing, the first because: {wrong[0].reason}")
    return found
