"""The figure of predicted against measured memory."""

from __future__ import annotations

from graphtune.figures.predicted import draw_predicted, predicted_lists
from graphtune.memory_cells import is_held_out
from graphtune.tune.memory_prediction import memory_predictor
from tests.synthetic import cell_result
from tests.tune.test_memory_prediction import gpu_cells


def test_the_figure_holds_the_held_out_lists_and_nothing_else() -> None:
    found = memory_predictor(gpu_cells(1.0))
    assert found is not None
    data = predicted_lists(found)
    held_out = [one for one in found.checked if is_held_out(one.prediction.of)]
    assert len(data) == len(held_out) == 16
    assert sorted(one.measured_bytes for one in data) == sorted(one.measured_bytes for one in held_out)
    assert [one.measured_bytes for one in data] == sorted(one.measured_bytes for one in data)
    drawn = draw_predicted(data)
    assert len(drawn.table.rows) == 16 and all(row[8] == "0.0" for row in drawn.table.rows)
    assert "16 random lists" in drawn.says and "16 lie in the stated interval" in drawn.says
    assert "<svg" in drawn.wide and "var(--c1)" in drawn.narrow


def test_a_sweep_without_held_out_lists_has_no_figure() -> None:
    assert predicted_lists(None) == ()
    assert predicted_lists(memory_predictor([cell_result([], [])])) == ()
