"""The quickstart sweep for real: worker, capture, gate and step times on this machine's CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from graphtune.store import Sweep, read_sweep, tidy_frame

ROOT = Path(__file__).resolve().parent.parent


def command(out: Path) -> list[str]:
    recipe = ROOT / "recipes" / "quickstart.yaml"
    return [sys.executable, "-m", "graphtune", "sweep", str(recipe), "--device", "cpu", "--out", str(out)]


def running_worker(parent: int) -> int | None:
    children = Path(f"/proc/{parent}/task/{parent}/children")
    pids = children.read_text().split() if children.exists() else []
    for pid in map(int, pids):
        if b"graphtune.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def has_ended(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """A sweep whose first attempt is killed while its worker loads torch, and which is then run to its end."""
    out = tmp_path_factory.mktemp("quickstart") / "cpu"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(command(out), env=environment, stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    for line in first.stderr:
        if "import" in line:
            break
    worker = running_worker(first.pid)
    first.kill()
    first.wait()
    assert worker is not None
    end = time.monotonic() + 10
    while not has_ended(worker) and time.monotonic() < end:
        time.sleep(0.05)
    assert has_ended(worker)
    assert read_sweep(out).cells == ()
    done = subprocess.run(command(out), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return read_sweep(out)


def test_every_cell_is_ok_and_every_size_passed_its_gate(swept: Sweep) -> None:
    purposes = [(cell.status, cell.cell["purpose"]) for cell in swept.cells]
    assert purposes == [("ok", "main")] * 3 + [("ok", "joint")] * 2
    lists = [captured for cell in swept.cells for captured in cell.captured_lists if cell.cell["gate"]]
    assert {captured.list.name for captured in lists} == {"dense", "sparse", "tokens"}
    assert all(captured.gate_green for captured in lists)


def test_both_phases_take_less_in_one_pool_than_in_two(swept: Sweep) -> None:
    joint = [cell.captured_lists for cell in swept.cells if cell.cell["purpose"] == "joint"]
    assert [[captured.list.phase for captured in lists] for lists in joint] == [
        ["decode", "prefill"],
        ["prefill", "decode"],
    ]
    alone = {
        captured.list.phase: captured.graph_bytes
        for cell in swept.cells
        for captured in cell.captured_lists
        if cell.cell["purpose"] == "main" and captured.list.name in ("dense", "tokens")
    }
    for lists in joint:
        together = sum(captured.graph_bytes or 0 for captured in lists)
        assert max(alone.values()) <= together < sum(alone.values())


def test_everything_swept_ended_in_time(swept: Sweep) -> None:
    assert swept.finished_at is not None


def test_every_step_was_timed_in_both_ways(swept: Sweep) -> None:
    timed = tidy_frame(swept)
    frame = timed[timed.step_us_median.notna()]
    steps = {(row.phase, row.raw_size, row.execution) for row in frame.itertuples()}
    sizes = [("decode", size) for size in (1, 2, 4, 8)]
    sizes += [("prefill", tokens) for tokens in (1, 4, 5, 8, 9, 16, 17, 32)]
    assert steps == {(*size, execution) for size in sizes for execution in ("graph", "eager")}
    assert len(frame) == len(steps)
    assert (frame["step_us_median"] > 0).all()
    assert (timed["status"] == "ok").all()


def test_padded_replays_were_timed_on_the_device_alone(swept: Sweep) -> None:
    timed = tidy_frame(swept)
    padded = timed[(timed.phase == "decode") & (timed.raw_size < timed.padded_size)]
    pairs = {(row.raw_size, row.padded_size) for row in padded.itertuples()}
    assert pairs == {(1, 2), (1, 4), (1, 8), (2, 4), (2, 8), (4, 8)}
    assert (padded["gpu_us_median"] > 0).all()
    assert padded[["host_us_median", "step_us_median", "overlap_us_median"]].isna().all(axis=None)


def test_the_results_say_that_this_was_a_cpu(swept: Sweep) -> None:
    assert swept.device == "cpu"
    for cell in swept.cells:
        assert cell.environment is not None
        assert (cell.environment.device, cell.environment.graph_mechanism) == ("cpu", "tape")


def test_the_page_is_written_beside_the_results(swept: Sweep) -> None:
    assert (swept.path / "report.html").read_text().lstrip().lower().startswith("<!doctype html>")


def test_nothing_of_this_machine_is_in_the_stored_files(swept: Sweep) -> None:
    stored = (swept.path / "run.json").read_text() + (swept.path / "cells.jsonl").read_text()
    assert str(swept.path) not in stored
    assert str(ROOT) not in stored
    assert str(Path.home()) + "/" not in stored
