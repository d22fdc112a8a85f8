"""A stored sweep reads back as written, and a damaged one says where."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.errors import InputError
from graphtune.plan import Cell, LatencyAt, Measure, Skip
from graphtune.results import CaptureList, CellResult, Samples
from graphtune.store import (
    CELLS_FILE,
    RUN_FILE,
    Run,
    SweepWriter,
    decode_cell,
    decode_result,
    encode_cell,
    encode_result,
    find_sweeps,
    read_run,
    read_sweep,
    tidy_frame,
    write_atomically,
)
from tests.synthetic import small_sweep

RUN = Run(
    recipe_name="made-up",
    recipe={"name": "made-up"},
    recipe_sha="0" * 64,
    model_name="tiny",
    device="cpu",
    device_name="a CPU",
    started_at="2026-01-01T00:00:00+00:00",
    skips=(Skip("step times of 64 requests", "no room"),),
    notes=("one note",),
)


def results() -> tuple[CellResult, ...]:
    return small_sweep((1, 2), processes=3).cells


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    writer = SweepWriter(tmp_path / "sweep", RUN)
    for result in results():
        writer.append(result)
    return writer.path


def canonical(result: CellResult) -> CellResult:
    """What JSON makes of the free-form part: lists for tuples."""
    return replace(result, cell=json.loads(json.dumps(result.cell)))


def test_a_sweep_reads_back_as_written(folder: Path) -> None:
    sweep = read_sweep(folder)
    assert sweep.cells == tuple(canonical(result) for result in results())
    assert len(sweep.cells) > 1
    assert {name: getattr(sweep, name) for name in asdict(RUN)} == {name: getattr(RUN, name) for name in asdict(RUN)}
    assert (sweep.path, sweep.damaged_lines) == (folder, ())


def test_the_newest_result_of_a_cell_counts(folder: Path) -> None:
    first = results()[0]
    SweepWriter(folder, RUN).append(replace(first, status="failed", reason="again"))
    sweep = read_sweep(folder)
    assert len(sweep.cells) == len(results())
    assert {cell.cell_id: cell.reason for cell in sweep.cells}[first.cell_id] == "again"


@given(cut=st.integers(min_value=1, max_value=10_000))
def test_a_torn_last_line_is_tolerated_wherever_it_is_cut(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("torn")
    writer = SweepWriter(path, RUN)
    all_results = results()
    for result in all_results:
        writer.append(result)
    content = (path / CELLS_FILE).read_bytes()
    last = len(encode_result(all_results[-1]).encode())
    cut = 1 + cut % (last + 1)
    (path / CELLS_FILE).write_bytes(content[:-cut])
    sweep = read_sweep(path)
    whole = len(all_results) if cut == 1 else len(all_results) - 1
    assert len(sweep.cells) == whole
    assert sweep.damaged_lines == ()
    assert any("torn" in note for note in sweep.notes) == (1 < cut < last + 1)
    SweepWriter(path, RUN).append(all_results[-1])
    again = read_sweep(path)
    assert len(again.cells) == len(all_results)
    assert again.damaged_lines == ()
    assert again.notes == RUN.notes


def test_a_damaged_line_inside_is_named_and_the_rest_is_read(folder: Path) -> None:
    lines = (folder / CELLS_FILE).read_text().splitlines()
    broken = [lines[0], lines[1][: len(lines[1]) // 2], '{"schema": 1}', *lines[2:]]
    (folder / CELLS_FILE).write_text("\n".join(broken) + "\n")
    sweep = read_sweep(folder)
    assert sweep.damaged_lines == (2, 3)
    assert len(sweep.cells) == len(lines) - 1
    assert any(f"{CELLS_FILE}:3" in note and "cell_id" in note for note in sweep.notes)


def test_a_line_of_a_newer_graphtune_is_refused(folder: Path) -> None:
    lines = (folder / CELLS_FILE).read_text().splitlines()
    newer = json.dumps({**json.loads(lines[1]), "schema": 2})
    (folder / CELLS_FILE).write_text("\n".join([lines[0], newer]) + "\n")
    with pytest.raises(InputError, match=f"{CELLS_FILE}:2: schema 2 is newer"):
        read_sweep(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"run.json:1: is not JSON"),
        (b'{\n"schema": 1,\n]', r"run.json:3: is not JSON"),
        (b"[]", "must hold a JSON object"),
        (b"{}", "has no schema number"),
        (b'{"schema": 99}', "schema 99 is newer"),
        (b'{"schema": 1, "recipe_name": 3}', "recipe_name: Input should be a valid string"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_a_damaged_head_says_what_is_wrong(folder: Path, content: bytes, message: str) -> None:
    (folder / RUN_FILE).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_sweep(folder)


def test_a_folder_that_is_no_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such sweep folder"):
        read_sweep(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"run\.json: cannot be read"):
        read_sweep(tmp_path)


def test_a_sweep_without_any_result_reads_as_empty(tmp_path: Path) -> None:
    SweepWriter(tmp_path / "sweep", RUN)
    assert read_sweep(tmp_path / "sweep").cells == ()


def test_sweeps_are_found_below_a_folder(tmp_path: Path) -> None:
    for name in ("b", "a", "deep/c", "far/too/deep"):
        SweepWriter(tmp_path / name, RUN)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / RUN_FILE).write_text("{}")
    assert find_sweeps(tmp_path) == tuple(tmp_path / name for name in ("a", "b", "deep/c"))
    assert find_sweeps(tmp_path / "a") == (tmp_path / "a",)
    assert find_sweeps(tmp_path / "nowhere") == ()


def test_the_head_can_be_replaced(folder: Path) -> None:
    SweepWriter(folder, RUN).update(replace(RUN, finished_at="2026-01-01T00:01:00+00:00"))
    assert read_run(folder).finished_at == "2026-01-01T00:01:00+00:00"
    assert [file.name for file in folder.iterdir() if file.name.startswith(RUN_FILE)] == [RUN_FILE]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "\ud800")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_the_frame_has_one_row_per_point_with_named_statistics() -> None:
    sweep = small_sweep()
    frame = tidy_frame(sweep)
    points = [point for cell in sweep.cells for point in cell.points]
    assert len(frame) == len(points) > 0
    assert list(frame["raw_size"]) == [point.raw_size for point in points]
    samples = points[0].gpu_us
    assert samples is not None
    assert frame["gpu_us_median"][0] == sorted(samples.us)[len(samples.us) // 2]
    assert frame["gpu_us_taken"][0] == samples.taken
    assert frame["gpu_us_stop"][0] == samples.stop


def test_disturbed_samples_are_counted_and_named_in_the_frame() -> None:
    sweep = small_sweep()
    (cell,) = sweep.cells
    apart = Samples((3.0, 3.0), 3, "noise", disturbed_us=(9.0,))
    flagged = Samples((9.0, 9.0), 2, "time", flags=("host slowed down", "thermal (hardware)"))
    one = replace(cell.points[0], gpu_us=apart, step_us=flagged)
    frame = tidy_frame(replace(sweep, cells=(replace(cell, points=(one,)),)))
    assert (frame["gpu_us_median"][0], frame["gpu_us_disturbed"][0], frame["gpu_us_flags"][0]) == (3.0, 1, "")
    assert (frame["step_us_disturbed"][0], frame["step_us_flags"][0]) == (0, "host slowed down, thermal (hardware)")


def test_a_time_that_was_not_measured_is_missing_in_the_frame() -> None:
    sweep = small_sweep()
    cell = next(cell for cell in sweep.cells if cell.points)
    bare = replace(cell.points[0], gpu_us=None, step_us=Samples((3.0,), 1, "time"))
    frame = tidy_frame(replace(sweep, cells=(replace(cell, points=(bare,)),)))
    assert frame["gpu_us_median"].isna().all()
    assert (frame["step_us_low"][0], frame["step_us_high"][0]) == (3.0, 3.0)


floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
sizes = st.lists(st.integers(1, 4096), min_size=1, max_size=6, unique=True).map(lambda some: tuple(sorted(some)))
cells = st.builds(
    Cell,
    model_name=st.text(max_size=20),
    model_config=st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=4),
    weights=st.none() | st.text(max_size=10),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    shard=st.integers(1, 8),
    seed=st.integers(0, 100),
    phase=st.just("decode"),
    attention=st.sampled_from(["sdpa", "flashinfer"]),
    page_size=st.sampled_from([1, 16, 64]),
    kv_tokens=st.integers(1, 10**9),
    lists=st.lists(st.builds(CaptureList, st.text(max_size=8), st.just("decode"), st.just("full"), sizes)).map(tuple),
    latency=st.lists(st.builds(LatencyAt, sizes, st.integers(1, 10**6))).map(tuple),
    measure=st.builds(Measure, st.integers(2, 20), floats, floats),
)


@given(cell=cells)
def test_a_cell_keeps_its_id_through_json(cell: Cell) -> None:
    text = encode_cell(cell)
    assert decode_cell(text) == cell
    assert decode_cell(json.loads(text)) == cell
    assert decode_cell(text).id == cell.id


@given(value=st.floats())
def test_what_is_written_is_strict_json(value: float) -> None:
    result = replace(results()[0], phase_seconds={"x": value})
    text = encode_result(result)
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    if math.isfinite(value):
        assert decode_result(text).phase_seconds == {"x": value}
