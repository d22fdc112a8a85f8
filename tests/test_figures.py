from __future__ import annotations

from dataclasses import replace

import pytest

from graphtune.figures import agreement, host, latency, launches, ledger, lists, memory, padding, wall_time
from graphtune.figures.base import us_cell
from graphtune.results import Point
from graphtune.stats import process_medians
from graphtune.tune.latency_model import latency_model
from graphtune.tune.memory_model import memory_model
from graphtune.tune.recommend import Question, recommend
from tests.synthetic import MIB, captured_list, h200_sweep, small_sweep


def test_step_curves_are_the_figures_of_the_recommendation() -> None:
    of = h200_sweep()
    answer, model = recommend(of, Question(gpu_mem="80", max_running_requests=256)), latency_model(of.cells)
    data = latency.step_times(model, answer)
    chosen = next(curve for curve in data.curves if curve.recommended)
    one = answer.engine("sglang").decode
    assert one is not None
    upto = [us for raw, us in zip(chosen.requests, chosen.step_us, strict=True) if raw <= 256]
    assert sum(upto) / 256 == pytest.approx(one.expected_step_us)
    assert any("TensorRT-LLM's default" in curve.label for curve in data.curves)
    assert len({curve.role for curve in data.curves}) == len(data.curves)


def test_the_csv_of_step_times_holds_every_curve() -> None:
    of = h200_sweep()
    answer, model = recommend(of, Question(gpu_mem="80", max_running_requests=256)), latency_model(of.cells)
    data = latency.step_times(model, answer)
    saved = latency.draw_step_times(data, on_cpu=False).data
    assert [column.title for column in saved.columns[3:]] == [f"{curve.label}, µs" for curve in data.curves]
    by_size = {row[0]: row for row in saved.rows}
    assert len(by_size) == len(saved.rows) == 512
    curve = data.curves[0]
    assert by_size["33"][1:3] == ("–", "–"), "not measured there"
    assert by_size["33"][3] == us_cell(curve.step_us[curve.requests.index(33)])


def test_speed_up_is_eager_over_replay() -> None:
    found = latency.speed_ups(latency_model(small_sweep((1, 2)).cells))
    assert found is not None
    assert found.by_context[1024][2] == pytest.approx(3020 / 1020)


def test_padding_shows_buckets_far_apart_and_every_replay_in_its_table() -> None:
    of = latency_model(h200_sweep().cells).padded
    assert of is not None
    assert padding.shown_buckets(of) == (2, 8, 32, 128, 512)
    drawn = padding.draw_padding(of)
    rows = {(int(row[0]), int(row[1])): row[2:] for row in drawn.table.rows}
    assert len(rows) == len(drawn.table.rows) == sum(map(len, of.padded.values()))
    assert rows[8, 24] == tuple(map(us_cell, (of.full[8], of.padded[24][8], of.full[24])))
    assert "1,024 KV tokens" in drawn.says and len(drawn.keys) == 6


def test_hidden_time_is_host_plus_gpu_minus_step() -> None:
    cells = small_sweep((1, 2, 4)).cells
    rows = host.host_rows(cells, latency_model(cells))
    assert [row.size for row in rows] == [1, 2, 4]
    for row in rows:
        assert row.host_us == pytest.approx(90.0)
        assert row.hidden_us == pytest.approx(row.host_us + row.gpu_us - row.step_us)
    assert len(process_medians(cells, "gpu_us")) == 6


def test_ledger_parts_add_up_to_the_reading_with_the_list_captured() -> None:
    found = ledger.first_ledger(h200_sweep().cells)
    assert found is not None
    _, stages = found
    parts = ledger.ledger_parts(stages)
    captured = next(stage for stage in stages if stage.name == "captured")
    assert sum(part.size_bytes for part in parts) == captured.free_reading_bytes
    assert captured.torch_bytes + captured.pool_bytes + captured.outside_bytes == captured.free_reading_bytes


def test_growth_is_cumulative_in_capture_order() -> None:
    found = memory.growths(h200_sweep().cells)
    assert found is not None
    name, curves = found
    assert name == "vllm" and len(curves) == 4
    for curve in curves:
        assert list(curve.total_bytes) == sorted(curve.total_bytes)
    assert curves[0].setting == "both shared, descending"
    assert curves[0].total_bytes[-1] == 140 * MIB and curves[0].sizes[0] == 512


def test_divisions_hold_every_term_of_the_budget() -> None:
    for division in memory.divisions(recommend(h200_sweep(), Question(gpu_mem="80"))):
        assert sum(size or 0 for _, size in division.terms) == division.total_bytes


def test_controls_show_their_difference() -> None:
    controls = lists.control_table(memory_model(h200_sweep().cells))
    assert controls is not None and controls.table.rows[0][-1] == "+2.00"
    assert lists.control_table(memory_model(small_sweep((1,)).cells)) is None


def test_profiles_are_averaged_over_processes() -> None:
    cells = h200_sweep().cells
    profiles = launches.step_profiles(cells, None)
    assert [one.size for one in profiles] == [1, 16, 64, 256]
    assert profiles[0].idle_share == pytest.approx(1 - 4600 / 6050)
    timed = launches.step_profiles(cells, model := latency_model(cells))[0]
    assert timed.step_us == model.table["eager", 1024][1]
    assert timed.idle_share == pytest.approx(1 - 4600 / timed.step_us)


def test_the_speed_up_is_explained_by_launches_and_kernel_time() -> None:
    cells = h200_sweep().cells
    text = launches.explanation(launches.step_profiles(cells, latency_model(cells)), launches.launch_cost_us(cells))
    assert "launches 427 kernels, which run for 4.60 ms" in text
    assert "A launch costs the host 4.1 µs on this machine, all of them 1.75 ms" in text
    assert launches.explanation((), 4.1) == ""


def test_wall_time_is_split_without_counting_anything_twice() -> None:
    cell = small_sweep((1, 2)).cells[0]
    seconds = {"start": 0.1, "import_torch": 3.0, "weights": 1.0, "first_measurement": 4.1, "capture": 2.0}
    seconds |= {"latency_1024": 20.0, "latency_512": 5.0, "odd": 0.5, "total": 33.0}
    (wall,) = wall_time.wall_times([replace(cell, phase_seconds=seconds)])
    assert wall.total_s == pytest.approx(33.0) and wall.first_s == 4.1
    assert wall.parts["timing steps"] == 25.0 and wall.parts["start and imports"] == pytest.approx(3.1)
    assert wall.parts[wall_time.REST] == pytest.approx(33.0 - 31.1)
    assert wall_time.wall_times([replace(cell, phase_seconds={})]) == ()


def slowed(of: Point, factor: float) -> Point:
    """A point of a disturbed process: every time is longer and flagged."""
    changed = {}
    for name in ("gpu_us", "host_us", "step_us", "plan_us", "fill_us", "launch_us"):
        if (samples := getattr(of, name)) is not None:
            us = tuple(one * factor for one in samples.us)
            changed[name] = replace(samples, us=us, flags=("host slowed down 1.8x",))
    return replace(of, **changed)


def test_host_times_come_from_processes_that_nothing_disturbed() -> None:
    first = small_sweep((1, 2, 4)).cells[0]
    disturbed = tuple(slowed(p, 1.8) if p.raw_size == 2 else p for p in first.points)
    second = replace(first, cell={**first.cell, "process": 2}, points=disturbed)
    rows = host.host_rows([first, second], latency_model([first, second]))
    assert [row.host_us for row in rows] == pytest.approx([90.0] * 3)
    (alone,) = [row for row in host.host_rows([second], latency_model([second])) if row.size == 2]
    assert alone.host_us == pytest.approx(162.0)


def test_agreement_leaves_disturbed_medians_out_and_counts_them() -> None:
    first = small_sweep((1, 2, 4)).cells[0]
    disturbed = tuple(slowed(p, 1.8) if p.raw_size == 2 else p for p in first.points)
    second = replace(first, cell={**first.cell, "process": 2}, points=disturbed)
    found = agreement.table([first, second])
    assert found is not None
    by_label = {row[0]: row[1:] for row in found.table.rows}
    assert by_label["decode replay, gpu_us"] == ("2", "0.0%", "0.0%", "0.0%", "1 of 6", "1")
    assert agreement.table([first]) is None


def test_a_gate_that_ran_in_one_process_is_one_green_row() -> None:
    first = small_sweep((1, 2, 4)).cells[0]
    unchecked = tuple(replace(of, gate=()) for of in first.captured_lists)
    second = replace(first, cell={**first.cell, "process": 2}, captured_lists=unchecked)
    (table,) = lists.gate_tables([first, second])
    assert table.says.startswith("1 of 1 lists are green.")
    assert len(table.table.rows) == 1 and table.table.rows[0][3] == "3 of 3"
    bad = replace(first, captured_lists=tuple(captured_list(of.list, failing=(2,)) for of in first.captured_lists))
    summary, failures = lists.gate_tables([first, replace(bad, cell={**bad.cell, "process": 3})])
    assert summary.says.startswith("0 of 1 lists are green.") and summary.table.rows[0][3] == "2 of 3"
    assert failures.table.rows[0][3] == "2"


def test_lists_show_which_bytes_were_measured_and_which_composed() -> None:
    first = small_sweep((1, 2, 4)).cells[0]
    shared = replace(first.captured_lists[0], outside_source="measured", torch_bytes=46 * MIB)
    per_size = replace(
        captured_list(replace(shared.list, output="per_size", workspace="per_size"), position=2),
        outside_source="composed",
        torch_bytes=46 * MIB,
    )
    cell = replace(first, captured_lists=(shared, per_size))
    totals = lists.list_totals(memory_model([cell]))
    assert totals is not None
    assert [row[7] for row in totals.table.rows] == ["measured", "composed"]
    _, curves = memory.growths([cell]) or ("", ())
    kept = {curve.setting: curve.kept_bytes for curve in curves}
    assert kept["both shared, descending"] == 0 and kept["both per size, descending"] == 46 * MIB


def test_peaks_are_those_so_far() -> None:
    found = memory.growths(h200_sweep().cells)
    assert found is not None
    for curve in found[1]:
        peaks = [peak for peak in curve.peak_bytes if peak is not None]
        assert len(peaks) == len(curve.total_bytes) and peaks == sorted(peaks)
