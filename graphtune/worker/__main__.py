"""One cell in one process: ``python -m graphtune.worker CELL.json RESULT.json [--device auto|cpu|cuda[:N]] [--ahead]``.

Progress goes to stdout as JSON lines. The result is written at the end; ``RESULT.json.partial`` holds what is measured
so far and is rewritten every few seconds. Exit status 0 means that a result was written; its status says
how the cell ended. With ``--ahead`` it imports torch, which touches no device, and begins at a line on stdin; the
seconds are then those from there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from graphtune.plan import Cell
from graphtune.results import SCHEMA, CellResult, Environment, ModelFacts, Status
from graphtune.worker.graphs.failure import first_line
from graphtune.worker.guard import die_with_parent

STARTED = time.perf_counter()

SAVE_EVERY_S = 2.0
"""Writing all that is known after every step time would take as long as some of them."""


@dataclass
class Progress:
    """Everything known about the running cell, turned into a CellResult at any moment."""

    cell: Cell
    result_path: Path
    started_at: str = field(default_factory=lambda: _now())
    phase_seconds: dict[str, float] = field(default_factory=dict)
    environment: Environment | None = None
    model: ModelFacts | None = None
    ledger: Any = None
    measurement: Any = None
    began: float = STARTED

    def __post_init__(self) -> None:
        self._last = self._saved_at = self.began

    @property
    def partial_path(self) -> Path:
        return self.result_path.with_name(self.result_path.name + ".partial")

    def spent(self) -> float:
        """Seconds since the process began with its cell."""
        return round(time.perf_counter() - self.began, 4)

    def reached(self, stage: str) -> None:
        """The seconds since the last stage were spent on this one."""
        now = time.perf_counter()
        self.phase_seconds[stage] = round(now - self._last, 4)
        self._last = now
        print(json.dumps({"stage": stage, "done": 1, "total": 1}), flush=True)

    def saved(self, stage: str, done: int, total: int) -> None:
        """Rewrite the partial result when it is older than ``SAVE_EVERY_S`` or a part begins or ends, then report."""
        now = time.perf_counter()
        if done in (1, total) or now - self._saved_at > SAVE_EVERY_S:
            self.write(self.partial_path, "failed", "ended before its last list")
            self._saved_at = now
        print(json.dumps({"stage": stage, "done": done, "total": total}), flush=True)

    def write(self, path: Path, status: Status, reason: str | None) -> None:
        """Write the result as it stands, atomically."""
        text = json.dumps(asdict(self.result(status, reason)))
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(text)
        os.replace(temporary, path)

    def result(self, status: Status, reason: str | None) -> CellResult:
        measured = self.measurement
        seconds = dict(self.phase_seconds)
        if measured is not None:
            seconds |= {name: round(value, 4) for name, value in measured.seconds.items()}
        seconds["total"] = self.spent()
        return CellResult(
            schema=SCHEMA,
            cell_id=self.cell.id,
            cell=asdict(self.cell),
            status=status,
            reason=reason,
            environment=self.environment,
            model=self.model,
            captured_lists=tuple(measured.captured_lists) if measured else (),
            points=tuple(measured.latency.points) if measured else (),
            ledger=self.ledger.summary() if self.ledger else None,
            launch_profiles=tuple(measured.latency.profiles) if measured else (),
            timelines=tuple(measured.latency.timelines) if measured else (),
            admission=dict(measured.admission) if measured else {},
            phase_seconds=seconds,
            started_at=self.started_at,
            finished_at=_now(),
            unmeasured=measured.unmeasured if measured else self.cell.lists,
            warnings=self._warnings(),
        )

    def _warnings(self) -> tuple[str, ...]:
        warnings = []
        if self.cell.shard > 1:
            warnings.append(f"shapes of one rank of {self.cell.shard}; collectives are absent from every figure")
        if self.environment and self.environment.other_processes:
            warnings.append(f"{self.environment.other_processes} other processes had the GPU open")
        return tuple(warnings)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m graphtune.worker")
    parser.add_argument("cell", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--ahead", action="store_true", help="import torch, then wait for a line on stdin")
    arguments = parser.parse_args()
    die_with_parent()
    began = STARTED
    if arguments.ahead:
        import torch  # noqa: F401

        if not sys.stdin.readline():
            return 1  # whoever would have sent it is gone
        began = time.perf_counter()
    cell = read_cell(arguments.cell)
    progress = Progress(cell, arguments.result, began=began)
    status, reason = _measure(cell, arguments.device, progress)
    progress.write(arguments.result, status, reason)
    progress.partial_path.unlink(missing_ok=True)
    return 0


def read_cell(path: Path) -> Cell:
    """The cell of a JSON file, checked against its types."""
    from pydantic import TypeAdapter

    return TypeAdapter(Cell).validate_json(path.read_text())


def _measure(cell: Cell, device_name: str, progress: Progress) -> tuple[Status, str | None]:
    progress.reached("start")
    import torch

    progress.reached("import_torch")
    try:
        with torch.inference_mode():
            return _run(cell, device_name, progress)
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        traceback.print_exc()
        return "oom", first_line(error)
    except Exception as error:
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {first_line(error)}"


def _run(cell: Cell, device_name: str, progress: Progress) -> tuple[Status, str | None]:
    import torch

    from graphtune.worker.environment import launch_cost_us, read_environment
    from graphtune.worker.memory import Ledger, refusal
    from graphtune.worker.nvml import Gpu

    device = _device(device_name)
    gpu = Gpu(device.index or 0) if device.type == "cuda" else None
    progress.ledger = ledger = Ledger(gpu)
    if gpu is None:
        # Threads that wait for each other on a busy machine take a hundred times as long as one that does the work.
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
        # Eager steps, captures and replays share one stream: see FullBackend.
        torch.cuda.set_stream(torch.cuda.Stream())
    environment = read_environment(gpu)
    progress.environment = environment
    ledger.mark("context")
    progress.reached("context")

    from graphtune.worker.engine import build
    from graphtune.worker.measurement import Measurement

    progress.reached("import_worker")

    def reached(stage: str) -> None:
        ledger.mark(stage)
        progress.reached(stage)

    engine = build(cell, device, reached)
    progress.model = engine.facts
    engine.warm_up()
    if gpu is not None:
        environment = replace(environment, launch_cost_us=launch_cost_us())
    reached("eager_warmup")
    progress.phase_seconds["first_measurement"] = progress.spent()
    if refused := refusal(cell.capture_limit, ledger.marks[-1]):
        return "oom", refused
    # Modules and weights live as long as the process: the collections around every capture need not look at them.
    gc.collect()
    gc.freeze()
    measurement = Measurement(cell, engine, ledger, gpu, progress.saved)
    progress.measurement = measurement
    measurement.run()
    if gpu is not None:
        environment = replace(environment, clock_mhz_after=gpu.clock_mhz(), throttle_reasons=gpu.throttle_reasons())
    progress.environment = environment
    return _verdict(measurement)


def _verdict(measurement: Any) -> tuple[Status, str | None]:
    """The worst of the lists: memory, then capture errors, then the gate."""
    lists = measurement.captured_lists
    for status in ("oom", "capture_failed"):
        for captured in lists:
            if captured.status == status:
                return captured.status, f"list {captured.list.name}: {captured.reason}"
    for captured in lists:
        for check in captured.gate:
            if not check.passed:
                return "failed", f"gate, list {captured.list.name}, size {check.size}: {check.reason}"
    return "ok", None


def _device(name: str) -> Any:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise RuntimeError("CUDA was asked for and torch sees no GPU")
    device = torch.device(name)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main())
