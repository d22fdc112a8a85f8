"""`compare`: verdicts that mirror, find and stay quiet; refusals; what is left out; thresholds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtune.compare.intervals import Pair, pooled_variance
from graphtune.compare.model import Comparison, Row
from graphtune.compare.sweeps import ALONE, compare_sweeps, read_comparable
from graphtune.compare.thresholds import Thresholds, parse_thresholds
from graphtune.errors import InputError
from graphtune.results import CaptureList, CellResult, Point
from graphtune.store import CELLS_FILE, Sweep
from tests.synthetic import MIB, captured_list, cell_result, h200_sweep, point, samples, small_sweep, sweep, write_sweep

SIZES = (1, 8, 32, 128)
OPPOSITE = {"faster": "slower", "slower": "faster", "smaller": "larger", "larger": "smaller"}


def timed(
    of_process: Callable[[int, int], float], processes: int = 3, sizes: Sequence[int] = SIZES, list_bytes: int = MIB
) -> Sweep:
    """Graph points whose step and device time are ``of_process(process, size)``, and one captured list."""
    of = captured_list(CaptureList("main", "decode", "full", tuple(sizes)), each_bytes=list_bytes)
    cells = []
    for process in range(1, processes + 1):
        points = [point(size, 1024, "graph", us := of_process(process, size), gpu_us=0.9 * us) for size in sizes]
        cells.append(cell_result([of], points, process=process))
    return sweep(cells)


def noisy(seed: int, *, common: float = 0.0, own: float = 0.002, factor: float = 1.0) -> Callable[[int, int], float]:
    """Times with noise that a process has in common and noise of each row, both relative."""
    rng = random.Random(seed)
    shifts = [rng.gauss(0, common) for _ in range(64)]
    return lambda process, size: factor * (1000 + 3 * size) * math.exp(shifts[process] + rng.gauss(0, own))


def times(comparison: Comparison) -> list[Row]:
    return [row for row in comparison.rows if row.what.kind == "time"]


def only(comparison: Comparison, quantity: str) -> Row:
    (row,) = [row for row in comparison.rows if row.what.quantity == quantity]
    return row


def test_a_sweep_compared_with_itself_is_silent() -> None:
    for of in (h200_sweep(), small_sweep(), small_sweep(processes=3), timed(noisy(1, common=0.05, own=0.05))):
        comparison = compare_sweeps(of, of)
        assert comparison.rows and {row.verdict for row in comparison.rows} == {"same"}
        assert {row.ratio for row in comparison.rows} == {1.0}
        assert not comparison.findings("any") and not comparison.worst() and not comparison.growth
        assert not comparison.changes


@given(
    seed=st.integers(0, 10_000),
    factor=st.floats(0.85, 1.18),
    own=st.floats(0.0, 0.01),
    processes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
@settings(max_examples=40, deadline=None)
def test_swapping_the_sweeps_mirrors_every_verdict(
    seed: int, factor: float, own: float, processes: tuple[int, int]
) -> None:
    base = timed(noisy(seed, own=own), processes[0])
    new = timed(noisy(seed + 1, own=own, factor=factor), processes[1], sizes=SIZES[1:], list_bytes=3 * MIB)
    there, back = compare_sweeps(base, new), compare_sweeps(new, base)
    assert [row.what for row in there.rows] == [row.what for row in back.rows]
    for one, other in zip(there.rows, back.rows, strict=True):
        assert other.verdict == OPPOSITE.get(one.verdict, one.verdict)
        if one.ratio is not None and other.ratio is not None:
            assert one.ratio * other.ratio == pytest.approx(1)
        if one.low is not None and other.high is not None:
            assert one.low * other.high == pytest.approx(1)


@given(seed=st.integers(0, 10_000), gain=st.floats(0.025, 0.5), up=st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_change_beyond_the_tolerance_is_found_when_noise_is_tight(seed: int, gain: float, up: bool) -> None:
    factor = 1 + gain if up else 1 / (1 + gain)
    comparison = compare_sweeps(timed(noisy(seed, own=0.0005), 4), timed(noisy(seed + 1, own=0.0005, factor=factor), 4))
    assert {row.verdict for row in times(comparison)} == {"slower" if up else "faster"}


@pytest.mark.parametrize(("common", "own"), [(0.0, 0.01), (0.01, 0.003)])
def test_intervals_hold_for_all_rows_together_as_often_as_they_say(common: float, own: float) -> None:
    """100 comparisons of two noisy sweeps, one 1.1 times the other: 95 % is promised."""
    held = 0
    for seed in range(100):
        base = timed(noisy(2 * seed, common=common, own=own), 3)
        rows = times(compare_sweeps(base, timed(noisy(2 * seed + 1, common=common, own=own, factor=1.1), 3)))
        held += all(row.low is not None and row.high is not None and row.low <= 1.1 <= row.high for row in rows)
    assert held >= 92


@given(seed=st.integers(0, 10_000), change=st.floats(0.9925, 1.0075))
@settings(max_examples=25, deadline=None)
def test_a_change_within_the_tolerance_is_the_same_when_noise_is_tight(seed: int, change: float) -> None:
    comparison = compare_sweeps(timed(noisy(seed, own=0.0002), 4), timed(noisy(seed + 1, own=0.0002, factor=change), 4))
    assert {row.verdict for row in times(comparison)} == {"same"}


@pytest.mark.parametrize(("common", "own"), [(0.0, 0.02), (0.02, 0.001), (0.01, 0.01), (0.05, 0.05)])
def test_two_sweeps_of_the_same_are_hardly_ever_told_apart(common: float, own: float) -> None:
    """Noise of whole processes, of rows, and of both, each beyond the tolerance: at most 1 % of rows are called."""
    rows = called = 0
    for seed in range(60):
        base, new = (timed(noisy(2 * seed + side, common=common, own=own), 3) for side in (0, 1))
        verdicts = [row.verdict for row in times(compare_sweeps(base, new))]
        rows += len(verdicts)
        called += sum(verdict in ("faster", "slower") for verdict in verdicts)
    assert rows == 480 and called <= 0.01 * rows


def test_noise_that_a_process_has_in_all_rows_gives_no_more_freedom_than_the_processes() -> None:
    rng = random.Random(3)

    def pairs(common: float, own: float) -> list[Pair]:
        shifts = {side: [rng.gauss(0, common) for _ in range(3)] for side in "bn"}
        sides = lambda side: {p: shifts[side][p] + rng.gauss(0, own) for p in range(3)}  # noqa: E731
        return [Pair(sides("b"), sides("n")) for _ in range(50)]

    together, apart = pooled_variance(pairs(0.02, 0.0)), pooled_variance(pairs(0.0, 0.02))
    assert together is not None and together.freedom == pytest.approx(4)
    assert apart is not None and apart.freedom > 150
    assert math.sqrt(apart.value) == pytest.approx(0.02, rel=0.15)


def test_one_process_on_each_side_decides_nothing_and_says_why() -> None:
    same, other = timed(lambda p, s: 1000.0, 1), timed(lambda p, s: 1300.0, 1, list_bytes=9 * MIB)
    comparison = compare_sweeps(same, other)
    differing = [row for row in comparison.rows if row.base != row.new]
    assert differing and {row.verdict for row in differing} == {"undecided"}
    assert {row.reason for row in differing} == {ALONE}
    assert {row.verdict for row in comparison.rows if row.base == row.new} == {"same"}
    assert comparison.tested == 0 and not comparison.findings("any")


def test_a_row_far_noisier_than_its_group_keeps_its_own_variance() -> None:
    def of(process: int, size: int) -> float:
        return 1000.0 * (1 + 0.03 * process if size == 8 else 1 + 0.0002 * process)

    sizes = tuple(range(1, 33))
    comparison = compare_sweeps(timed(of, 4, sizes), timed(lambda p, s: 1.08 * of(p, s), 4, sizes))
    undecided = {row.what.raw_size for row in times(comparison) if row.verdict == "undecided"}
    assert undecided == {8}
    assert all(row.verdict == "slower" for row in times(comparison) if row.what.raw_size != 8)


def test_memory_and_capture_time_have_verdicts_of_their_own() -> None:
    base = timed(lambda p, s: 1000.0, 2)
    grown = [replace(of, graph_bytes=200 * MIB, capture_s=9.0) for of in base.cells[0].captured_lists]
    new = replace(base, cells=tuple(replace(cell, captured_lists=tuple(grown)) for cell in base.cells))
    comparison = compare_sweeps(base, new)
    assert only(comparison, "graph_bytes").verdict == "larger"
    assert only(comparison, "capture_s").verdict == "slower"
    assert {row.what.quantity for row in comparison.findings("slower")} == {"capture_s"}
    assert {row.what.quantity for row in comparison.findings("memory")} == {"graph_bytes"}
    assert len(comparison.findings("any")) == 2 and not comparison.findings("none")


@pytest.mark.parametrize(("extra", "verdict"), [(3 * MIB, "same"), (5 * MIB, "larger")])
def test_memory_of_a_gpu_differs_by_pieces_of_the_driver(extra: int, verdict: str) -> None:
    base = timed(lambda p, s: 1000.0, 2)

    def with_bytes(count: int) -> Sweep:
        cells = [
            replace(cell, captured_lists=tuple(replace(of, graph_bytes=count) for of in cell.captured_lists))
            for cell in base.cells
        ]
        return replace(base, cells=tuple(cells))

    assert only(compare_sweeps(with_bytes(40 * MIB), with_bytes(40 * MIB + extra)), "graph_bytes").verdict == verdict
    assert only(compare_sweeps(with_bytes(0), with_bytes(extra)), "graph_bytes").verdict == verdict


def flag(cell: CellResult, sizes: Sequence[int]) -> CellResult:
    def flagged(one: Point) -> Point:
        slow = replace(samples(9e6), flags=("host slowed down 2.0x",))
        return replace(one, step_us=slow, gpu_us=slow) if one.raw_size in sizes else one

    return replace(cell, points=tuple(flagged(one) for one in cell.points))


def test_flagged_samples_are_left_out_and_counted() -> None:
    base = timed(noisy(5), 4)
    new = replace(base, cells=(flag(base.cells[0], (8,)), *(flag(cell, ()) for cell in base.cells[1:])))
    comparison = compare_sweeps(base, new)
    row = next(row for row in times(comparison) if row.what.raw_size == 8)
    assert (row.base_processes, row.new_processes, row.new_flagged) == (4, 3, 1)
    assert row.verdict in ("same", "undecided") and comparison.flagged == 2
    assert not comparison.findings("slower")


def test_seconds_of_a_disturbed_capture_are_left_out_and_its_bytes_are_not() -> None:
    base = timed(noisy(5), 3)
    lists = [replace(of, capture_s=90.0, flags=("host slowed down",)) for of in base.cells[0].captured_lists]
    new = replace(base, cells=(replace(base.cells[0], captured_lists=tuple(lists)), *base.cells[1:]))
    comparison = compare_sweeps(base, new)
    seconds, held = only(comparison, "capture_s"), only(comparison, "graph_bytes")
    assert (seconds.new_processes, seconds.new_flagged, held.new_processes) == (2, 1, 3)
    assert not comparison.findings("any")


def test_a_row_of_nothing_but_flagged_samples_is_undecided() -> None:
    base = timed(noisy(5), 2)
    comparison = compare_sweeps(base, replace(base, cells=tuple(flag(cell, (8,)) for cell in base.cells)))
    flagged = [row for row in times(comparison) if row.what.raw_size == 8]
    assert {row.verdict for row in flagged} == {"undecided"}
    assert all("flagged" in (row.reason or "") for row in flagged)


def test_what_one_side_lacks_is_missing_and_a_failure_gives_its_reason() -> None:
    base, new = timed(noisy(1), 2), timed(noisy(2), 2, sizes=(*SIZES[1:], 256))
    failed = tuple(
        replace(one, status="oom", reason="short 136 MiB", step_us=None, gpu_us=None) if one.raw_size == 32 else one
        for one in new.cells[0].points
    )
    new = replace(new, cells=(replace(new.cells[0], points=failed), replace(new.cells[1], points=failed)))
    comparison = compare_sweeps(base, new)
    missing = {row.what.raw_size: row for row in times(comparison) if row.verdict == "missing"}
    assert sorted(size or 0 for size in missing) == [1, 32, 256]
    assert missing[1].lost and missing[1].reason == "not measured in the candidate"
    assert missing[32].reason == "not measured in the candidate: short 136 MiB"
    assert not missing[256].lost and missing[256].reason == "not measured in the baseline"
    assert {row.what.raw_size for row in comparison.findings("any") if row.what.kind == "time"} == {1, 32}
    assert not comparison.findings("slower")


def changed(of: Sweep, **environment: object) -> Sweep:
    cells = [
        replace(cell, environment=replace(cell.environment, **environment)) if cell.environment else cell
        for cell in of.cells
    ]
    return replace(of, cells=tuple(cells))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("device", "NVIDIA H200 against NVIDIA H100"),
        ("driver", "580.00 against 590.1"),
        ("model", "config.hidden size 4096 against 5120"),
    ],
)
def test_different_devices_drivers_and_models_are_refused_unless_allowed(name: str, told: str) -> None:
    base = small_sweep(processes=2)
    if name == "device":
        new = changed(base, device_name="NVIDIA H100")
    elif name == "driver":
        new = changed(base, driver="590.1")
    else:
        config = {**base.cells[0].cell["model_config"], "hidden_size": 5120}
        new = replace(base, cells=tuple(replace(c, cell={**c.cell, "model_config": config}) for c in base.cells))
    with pytest.raises(InputError, match=told) as refused:
        compare_sweeps(base, new)
    assert f"--allow {name}" in str(refused.value) and refused.value.exit_code == 2
    comparison = compare_sweeps(base, new, allow=[name])
    assert comparison.changes and {row.verdict for row in comparison.rows} == {"same"}


def test_changed_software_is_named_and_readings_of_the_machine_are_not() -> None:
    base = small_sweep()
    new = changed(base, torch="2.13.0", clock_mhz_before=1200, launch_cost_us=9.0)
    assert [tuple(change) for change in compare_sweeps(base, new).changes] == [("torch", "2.11.0", "2.13.0")]


def test_a_graph_that_grew_is_explained_by_its_nodes() -> None:
    base = small_sweep(sizes=(1, 2))
    lists = [
        replace(of, captures=tuple(replace(capture, nodes=431) for capture in of.captures))
        for of in base.cells[0].captured_lists
    ]
    new = replace(base, cells=(replace(base.cells[0], captured_lists=tuple(lists)),))
    assert compare_sweeps(base, new).growth == (
        "decode list main: nodes per graph went from 427 to 431 at all 2 sizes",
    )


def test_a_damaged_folder_says_which_line(tmp_path: Path) -> None:
    folder = write_sweep(small_sweep(processes=3), tmp_path / "sweep")
    lines = (folder / CELLS_FILE).read_text().splitlines()
    (folder / CELLS_FILE).write_text("\n".join([lines[0], lines[1][:200], lines[2]]) + "\n")
    with pytest.raises(InputError, match="damaged line") as refused:
        read_comparable(folder)
    assert f"{CELLS_FILE}:2: damaged line" in str(refused.value)


def test_cells_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    folder = write_sweep(small_sweep(), tmp_path / "sweep")
    (folder / CELLS_FILE).unlink()
    (folder / CELLS_FILE).mkdir()
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_comparable(folder)


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    folder = write_sweep(sweep([]), tmp_path / "sweep")
    with pytest.raises(InputError, match="no result"):
        read_comparable(folder)


def test_thresholds_set_tolerances_and_leave_rows_out() -> None:
    text = """
time: 0.05
memory_floor: 0B
rows:
  - match: "decode graph gpu_us, 8 *"
    tolerance: 0.001
  - match: "* capture_s*"
    ignore: true
"""
    thresholds = parse_thresholds(text, "limits.yaml")
    base, new = timed(noisy(1, own=0.0001), 3), timed(noisy(2, own=0.0001, factor=1.02), 3)
    comparison = compare_sweeps(base, new, thresholds)
    slower = [row.name for row in comparison.rows if row.verdict == "slower"]
    assert slower == ["decode graph gpu_us, 8 requests at 1024"]
    assert comparison.ignored == 1 and not any(row.what.kind == "capture" for row in comparison.rows)
    assert parse_thresholds("", "empty.yaml") == Thresholds()


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("tme: 0.1", "limits.yaml:1: tme"),
        ("time: fast", "limits.yaml:1: time"),
        ("time: -1", "limits.yaml:1: time"),
        ("- 1", "limits.yaml:1"),
        ("confidence: 1", "limits.yaml:1: confidence"),
        ("memory_floor: 4", "limits.yaml:1: memory_floor"),
        ("rows: 3", "limits.yaml:1: rows"),
        ("rows:\n - tolerance: 1", r"limits.yaml:2: rows\[0\]"),
        ("rows:\n - match: x", r"limits.yaml:2: rows\[0\]"),
        ("rows:\n - match: x\n   ignore: 1", r"limits.yaml:3: rows\[0\].ignore"),
        ("rows:\n - match: x\n   tolerance: 0.1\n   ignore: true", r"limits.yaml:2: rows\[0\]"),
    ],
)
def test_a_wrong_threshold_is_named_by_line_and_key(text: str, where: str) -> None:
    with pytest.raises(InputError, match=where):
        parse_thresholds(text, "limits.yaml")
