"""Does `compare` stay quiet where nothing changed, and find what did? Processes of the same code, and slowed ones.

    python benchmarks/rounds.py aa --out FOLDER [--device cuda] [--processes 24] [--seconds 300]
    python benchmarks/rounds.py ab --out FOLDER [--device cuda] [--processes 12] [--seconds 300]

``aa`` measures one small cell of a recipe in fresh processes and compares ten random choices of 3 against 3 of them:
at most 1 % of the rows may be called faster or slower (or larger or smaller). ``ab`` measures half of its processes
with a worker whose recorded forward ends with a sleep of 3 % of the replay's time (tests/gpu/sleepy_worker.py), in turn
with the others, and compares ten choices of 3 of each and all of them: nine in ten rows of a replay's device time must
be called slower.

No process is started that would end after ``--seconds``. Processes measured before in FOLDER are taken from there, so
the same command goes on; with ``--judge`` it only compares them, on any machine. ``ab`` leaves two sweeps as others:
``graphtune compare FOLDER/base FOLDER/slowed``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

from graphtune.cell_run import CellProcess, finish_cell, start_cell
from graphtune.compare.model import Comparison, Row
from graphtune.compare.sweeps import compare_sweeps
from graphtune.device import Device, choose_device
from graphtune.plan import Cell
from graphtune.planner import plan_sweep
from graphtune.recipe import LoadedRecipe, load_recipe
from graphtune.results import CellResult
from graphtune.stats import median_us
from graphtune.store import Run, Sweep, SweepWriter, read_sweep
from graphtune.worker_process import WORKER

ROOT = Path(__file__).resolve().parent.parent
SLEEPY_WORKER = (sys.executable, str(ROOT / "tests" / "gpu" / "sleepy_worker.py"))
SPLITS = 10
EACH = 3
SHARE = 0.03
SAME, BASE, SLOWED = "same", "base", "slowed"
MOST_ROWS = 20
TIMEOUT_S = 300.0
CALLED = ("faster", "slower", "smaller", "larger")


def main() -> int:
    arguments = parse()
    if not arguments.judge:
        measure(arguments)
    if arguments.part == "aa":
        print_aa(read_sweep(arguments.out / SAME))
    else:
        print_ab(read_sweep(arguments.out / BASE), read_sweep(arguments.out / SLOWED))
    return 0


def measure(arguments: argparse.Namespace) -> None:
    """Run processes until there are enough of them or the time is up."""
    device = choose_device(arguments.device)
    loaded = load_recipe(arguments.recipe, overrides(arguments.sizes, arguments.context))
    cell = tiny_cell(loaded, device)
    processes = arguments.processes or (24 if arguments.part == "aa" else 12)
    end = time.monotonic() + arguments.seconds
    if arguments.part == "aa":
        with Side(arguments.out / SAME, loaded, device, cell, processes) as side:
            while side.wants_more and side.has_time(end):
                side.measure(WORKER)
        return
    with (
        Side(arguments.out / BASE, loaded, device, cell, processes // 2) as base,
        Side(arguments.out / SLOWED, loaded, device, cell, processes // 2) as slowed,
    ):
        while slowed.wants_more and base.has_time(end):
            if len(base.cells) <= len(slowed.cells):
                base.measure(WORKER)
            else:
                slowed.measure(SLEEPY_WORKER, {"SLEEP_US": json.dumps(sleeps(base.cells[0]))})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("aa", "ab"))
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "qwen3-0.6b.yaml")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--processes", type=int, help="of both sides together [default: 24, or 12]")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--judge", action="store_true", help="measure nothing, read what FOLDER holds")
    return parser.parse_args()


def overrides(sizes: Sequence[int], context: int) -> list[str]:
    """What makes a recipe small: one list, one setting, one context."""
    return [
        f"decode.lists=[{{name: rounds, sizes: [{', '.join(map(str, sizes))}]}}]",
        "decode.order=[descending]",
        "decode.output=[shared]",
        "decode.workspace=[shared]",
        f"decode.contexts=[{context}]",
        "decode.profile_sizes=[]",
        "measure.min_samples=15",
        "measure.max_seconds=0.15",
    ]


def tiny_cell(loaded: LoadedRecipe, device: Device) -> Cell:
    """The recipe's decode cell, without the gate: the first process must be as the others are."""
    plan = plan_sweep(loaded, device=device.kind, device_facts=device.facts, processes=1)
    (cell,) = [cell for cell in plan.cells if cell.purpose == "main" and cell.latency]
    return replace(cell, gate=False)


@dataclass
class Side:
    """One sweep of equal processes, numbered from 1, stored as a sweep. The next one imports beside the one before."""

    path: Path
    loaded: LoadedRecipe
    device: Device
    cell: Cell
    wanted: int
    slowest_s: float = 0.0
    waiting: CellProcess | None = None

    def __post_init__(self) -> None:
        stored = (self.path / "run.json").exists()
        self.cells: list[CellResult] = list(read_sweep(self.path).cells) if stored else []
        run = Run(
            recipe_name=self.loaded.recipe.name,
            recipe=self.loaded.as_dict(),
            recipe_sha=self.loaded.sha,
            model_name=self.loaded.model_name,
            device=self.device.kind,
            device_name=self.device.name,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self._writer = SweepWriter(self.path, run)

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *error: object) -> None:
        if self.waiting is not None:
            self.waiting.worker.stop()
        shutil.rmtree(self.running, ignore_errors=True)

    @property
    def running(self) -> Path:
        """Files of the processes that run."""
        return self.path / "running"

    @property
    def wants_more(self) -> bool:
        return len(self.cells) < self.wanted

    def has_time(self, end: float) -> bool:
        return time.monotonic() + self.slowest_s < end

    def measure(self, worker: Sequence[str], environment: dict[str, str] | None = None) -> None:
        """Run the cell in one more process; SystemExit with its reason when it fails."""
        number = len(self.cells) + 1
        process = self.waiting or self._start(number, worker, environment)
        self.waiting = self._start(number + 1, worker, environment, ahead=True) if number < self.wanted else None
        cell = process.cell
        log = self.running / "log"
        run = finish_cell(process, log, timeout_s=TIMEOUT_S, on_stage=lambda stage, done, total: None)
        if run.result.status != "ok":
            sys.exit(f"process {cell.process} of {self.path}: {run.result.status}: {run.result.reason}")
        self._writer.append(run.result)
        self.cells.append(run.result)
        self.slowest_s = max(self.slowest_s, run.seconds)
        print(f"{self.path.name} {cell.process}: {run.seconds:.1f} s", file=sys.stderr, flush=True)

    def _start(
        self, number: int, worker: Sequence[str], environment: dict[str, str] | None, *, ahead: bool = False
    ) -> CellProcess:
        self.running.mkdir(exist_ok=True)
        return start_cell(
            replace(self.cell, process=number),
            self.running,
            device=self.device.kind,
            environment={**self.device.environment, **(environment or {})},
            worker=worker,
            ahead=ahead,
        )


def sleeps(result: CellResult, share: float = SHARE) -> dict[str, float]:
    """µs to sleep by captured size: a share of the replay's device time in a process that does not."""
    replayed = {point.raw_size: median_us(point.gpu_us) for point in result.points if point.execution == "graph"}
    return {str(size): round(share * us, 2) for size, us in replayed.items() if us is not None}


def with_cells(of: Sweep, cells: Sequence[CellResult]) -> Sweep:
    return replace(of, cells=tuple(cells))


def splits_of_one(of: Sweep, seed: int = 0) -> list[Comparison]:
    """Ten random choices of 3 against 3 other processes of one sweep."""
    rng = random.Random(seed)
    chosen = [rng.sample(of.cells, 2 * EACH) for _ in range(SPLITS)]
    return [compare_sweeps(with_cells(of, six[:EACH]), with_cells(of, six[EACH:])) for six in chosen]


def splits_of_two(base: Sweep, new: Sweep, seed: int = 0) -> list[Comparison]:
    """Ten random choices of 3 processes of one sweep against 3 of the other."""
    rng = random.Random(seed)
    return [
        compare_sweeps(with_cells(base, rng.sample(base.cells, EACH)), with_cells(new, rng.sample(new.cells, EACH)))
        for _ in range(SPLITS)
    ]


def print_aa(of: Sweep) -> None:
    if len(of.cells) < 2 * EACH:
        sys.exit(f"{len(of.cells)} processes are too few: {2 * EACH} are compared at a time")
    comparisons = splits_of_one(of)
    rows = [row for comparison in comparisons for row in comparison.rows]
    called = [row for row in rows if row.verdict in CALLED]
    print(f"A/A: {of.model_name} on {of.device_name}, {len(of.cells)} processes, {SPLITS} choices of {EACH} + {EACH}")
    print(f"{len(comparisons[0].rows)} rows each (at most {MOST_ROWS}), flagged readings: {flagged(comparisons)}")
    print_verdicts(rows)
    print(f"called: {len(called)} of {len(rows)} rows, {len(called) / len(rows):.1%} (target: at most 1 %)")
    for row in called:
        print(f"  {row.name}: {row.verdict}, {row.ratio:.4f} ({row.low:.4f} to {row.high:.4f})")


def print_ab(base: Sweep, new: Sweep) -> None:
    least = min(len(base.cells), len(new.cells))
    if least < EACH:
        sys.exit(f"{least} processes on one side are too few: {EACH} are compared at a time")
    comparisons = splits_of_two(base, new)
    print(f"A/B: {base.model_name} on {base.device_name}, {len(base.cells)} + {len(new.cells)} processes, the second")
    print(f"with a sleep of {SHARE:.0%} in each recording; {SPLITS} choices of {EACH} + {EACH}")
    print_verdicts([row for comparison in comparisons for row in comparison.rows])
    for title, some in (("choices", comparisons), ("all processes", [compare_sweeps(base, new)])):
        for quantity in ("gpu_us", "step_us"):
            rows = replays([row for comparison in some for row in comparison.rows], quantity)
            slower = sum(row.verdict == "slower" for row in rows)
            target = " (target: 90 %)" if quantity == "gpu_us" and title == "choices" else ""
            print(f"{title}: {slower} of {len(rows)} rows of a replay's {quantity} slower{target}, {mean_ratio(rows)}")


def replays(rows: Sequence[Row], quantity: str) -> list[Row]:
    return [row for row in rows if row.what.execution == "graph" and row.what.quantity == quantity]


def mean_ratio(rows: Sequence[Row]) -> str:
    ratios = [math.log(row.ratio) for row in rows if row.ratio is not None]
    return f"mean ratio {math.exp(fmean(ratios)):.4f}" if ratios else "no ratio"


def flagged(comparisons: Sequence[Comparison]) -> int:
    return sum(comparison.flagged for comparison in comparisons)


def print_verdicts(rows: Sequence[Row]) -> None:
    groups: dict[str, Counter[str]] = {}
    for row in rows:
        groups.setdefault(row.what.group, Counter())[row.verdict] += 1
    for group, verdicts in groups.items():
        print(f"  {group:<28} " + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()))


if __name__ == "__main__":
    sys.exit(main())
