"""What stored sweeps read of graph pools on GPUs, against play-back: from shapes alone, and from recorded requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphtune.config_file import Keys
from graphtune.memory_cells import is_held_out
from graphtune.model_shape import model_shape
from graphtune.results import CapturedList
from graphtune.store import Sweep, find_sweeps, read_sweep
from graphtune.tune.block_pool import TORCH_RULES, BlockPool
from graphtune.tune.memory_prediction import captured_order, memory_predictor
from graphtune.units import MIB
from tests.tune import memory_shapes

REPORTS = Path(__file__).parents[2] / "reports"
SWEEPS = [path for path in find_sweeps(REPORTS) if read_sweep(path).device == "cuda"]


def whole_lists(of: Sweep) -> list[CapturedList]:
    cells = (cell for cell in of.cells if cell.purpose in ("main", "control"))
    lists = (one for cell in cells for one in cell.captured_lists if one.status == "ok" and one.list.phase == "decode")
    return list({one.list: one for one in lists if one.pool_bytes}.values())


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.name)
def test_pools_of_all_decode_lists_follow_from_shapes(path: Path) -> None:
    sweep = read_sweep(path)
    shape = model_shape(Keys(sweep.recipe["model"], str(path)))
    for one in whole_lists(sweep):
        pool = BlockPool(TORCH_RULES)
        for index, size in enumerate(captured_order(one.list)):
            held = one.list.output == "per_size"
            memory_shapes.capture(pool, shape, size, first=index == 0, hold_output=held)
        # The first block is as large as a warm-up was seen to need, which differs by what allocators leave uncut.
        assert abs(pool.reserved_bytes - (one.pool_bytes or 0)) <= 2 * MIB, one.list


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.name)
def test_held_out_lists_are_within_the_bar(path: Path) -> None:
    found = memory_predictor(read_sweep(path).cells)
    checked = [one for one in found.checked if is_held_out(one.prediction.of)] if found else []
    for kind in {(one.prediction.of.phase, one.prediction.of.backend) for one in checked}:
        lists = [one for one in checked if (one.prediction.of.phase, one.prediction.of.backend) == kind]
        good = [one for one in lists if abs(one.error_bytes) <= max(0.02 * one.measured_bytes, 16 * MIB)]
        assert len(good) >= len(lists) * 15 / 16, kind
        assert sum(one.inside for one in lists) >= len(lists) * 15 / 16, kind


def test_measured_lists_follow_from_sizes_recorded_alone_on_the_gpu() -> None:
    """Qwen3 0.6B: every size was recorded alone on the H200, and no list was fitted."""
    sweep = read_sweep(REPORTS / "qwen3-0.6b-nvidia-h200")
    found = memory_predictor(sweep.cells)
    assert found is not None
    predicted = [(one, found.predict(one.list)) for one in whole_lists(sweep) if found.knows(one.list)]
    assert len(predicted) >= 9
    for measured, prediction in predicted:
        assert prediction is not None and measured.graph_bytes is not None
        low, high = prediction.interval
        assert abs(prediction.graph_bytes - measured.graph_bytes) <= 4 * MIB, measured.list
        assert low <= measured.graph_bytes <= high
