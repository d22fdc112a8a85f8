"""The script that asks whether `compare` stays quiet on equal processes and finds slowed ones, on the CPU."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from graphtune.device import cpu_device
from graphtune.recipe import load_recipe
from graphtune.results import CaptureList
from graphtune.store import Sweep, read_sweep
from tests.synthetic import captured_list, cell_result, point, sweep

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def rounds() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rounds", ROOT / "benchmarks" / "rounds.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def processes(count: int, *, slowed: float = 1.0, seed: int = 0) -> Sweep:
    """Replays that differ by 0.2 % between processes, eager steps and step times by 2 %."""
    rng = random.Random(seed)
    of = captured_list(CaptureList("rounds", "decode", "full", (1, 16, 64)))
    cells = []
    for process in range(1, count + 1):
        points = []
        for size in (1, 16, 64):
            gpu = (1000 + 10 * size) * slowed * (1 + rng.gauss(0, 0.002))
            points.append(point(size, 512, "graph", (gpu + 300) * (1 + rng.gauss(0, 0.02)), gpu_us=gpu))
            eager = 4000 * (1 + rng.gauss(0, 0.02))
            points.append(point(size, 512, "eager", eager, gpu_us=eager))
        cells.append(cell_result([of], points, process=process))
    return sweep(cells)


def test_equal_processes_are_not_told_apart(rounds: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    of = processes(24)
    comparisons = rounds.splits_of_one(of)
    assert len(comparisons) == 10
    for comparison in comparisons:
        assert (comparison.base.processes, comparison.new.processes) == (3, 3)
        assert len(comparison.rows) <= rounds.MOST_ROWS
    rounds.print_aa(of)
    shown = capsys.readouterr().out
    assert "called: 0 of 180 rows, 0.0%" in shown and "24 processes, 10 choices of 3 + 3" in shown


def test_slowed_processes_are_found_in_the_time_of_their_replays(
    rounds: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    base, slowed = processes(6), processes(6, slowed=1.03, seed=1)
    rows = [row for comparison in rounds.splits_of_two(base, slowed) for row in comparison.rows]
    replayed = rounds.replays(rows, "gpu_us")
    assert len(replayed) == 30 and sum(row.verdict == "slower" for row in replayed) >= 27
    rounds.print_ab(base, slowed)
    shown = capsys.readouterr().out
    assert "all processes: 3 of 3 rows of a replay's gpu_us slower" in shown


def test_too_few_processes_are_said_to_be_too_few(rounds: ModuleType) -> None:
    with pytest.raises(SystemExit, match="5 processes are too few"):
        rounds.print_aa(processes(5))
    with pytest.raises(SystemExit, match="2 processes on one side"):
        rounds.print_ab(processes(6), processes(2))


def test_sleeps_are_a_share_of_the_replays_device_time(rounds: ModuleType) -> None:
    of = replace(processes(1).cells[0])
    us = {one.raw_size: one.gpu_us.us[0] for one in of.points if one.execution == "graph" and one.gpu_us}
    assert rounds.sleeps(of) == {str(size): pytest.approx(0.03 * one, abs=0.01) for size, one in us.items()}


def test_both_workers_measure_and_only_recordings_sleep(
    rounds: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process of each on the tape. A sleep of 20 ms is a lower bound of every replay, whatever else runs here."""
    device = cpu_device()
    loaded = load_recipe(ROOT / "recipes" / "quickstart.yaml", rounds.overrides([1, 4], 64))
    cell = rounds.tiny_cell(loaded, device)
    assert (cell.lists[0].sizes, cell.gate, cell.profile_sizes) == ((1, 4), False, ())
    base, slowed = (rounds.Side(tmp_path / name, loaded, device, cell, 1) for name in ("base", "slowed"))
    base.measure(rounds.WORKER)
    slowed.measure(rounds.SLEEPY_WORKER, {"SLEEP_US": json.dumps({"1": 20_000, "4": 20_000})})
    points = read_sweep(slowed.path).cells[0].points
    replayed = [one for one in points if one.execution == "graph"]
    assert replayed and all(one.gpu_us is not None and min(one.gpu_us.us) >= 20_000 for one in replayed)
    eager = [one for one in points if one.execution == "eager"]
    assert eager and all(one.gpu_us is not None and min(one.gpu_us.us) < 20_000 for one in eager)
    again = rounds.Side(tmp_path / "base", loaded, device, cell, 1)
    assert [result.cell_id for result in again.cells] == [replace(cell, process=1).id]
