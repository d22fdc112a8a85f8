"""Predicted graph memory against what was captured: on the tape for real, and with made-up readings of a GPU."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtune.memory_cells import is_held_out, memory_cells
from graphtune.plan import Cell
from graphtune.recipe_keys import MemoryChoice
from graphtune.results import AllocationTrace, CapturedList, CaptureList, CellResult, EventRun
from graphtune.tune.block_pool import TORCH_RULES, BlockPool
from graphtune.tune.memory_prediction import MemoryPredictor, memory_predictor, spare_bytes, two_sample_bytes
from graphtune.units import MIB
from graphtune.worker.measurement import Measurement
from graphtune.worker.memory import Ledger
from tests.synthetic import captured_list, cell_result
from tests.test_memory_cells import SHARINGS, lists_of
from tests.tune import memory_shapes
from tests.worker import tiny

SIZES = (1, 8, 24, 48)
WIDE = {**tiny.CONFIG, "vocab_size": 6000}


def capture(cell: Cell) -> CellResult:
    """The cell as the worker would run it on the CPU."""
    with torch.inference_mode():
        engine = tiny.engine(cell)
        engine.eager.warm_up(SIZES)
        measured = Measurement(cell, engine, Ledger(None), None, lambda *_: None)
        gc.collect()
        gc.freeze()  # as the worker does
        measured.run()
        gc.unfreeze()
    return replace(
        cell_result(measured.captured_lists, [], device="cpu", purpose=cell.purpose, with_ledger=False),
        cell_id=cell.id,
    )


@cache
def on_tape() -> CellResult:
    base = tiny.cell(lists=lists_of(SIZES), latency=(), kv_tokens=8192, model_config=WIDE)
    (cell,) = memory_cells((base,), MemoryChoice(fit=1, held_out=8), "tape")
    return capture(cell)


def predictor(*cells: CellResult) -> MemoryPredictor:
    found = memory_predictor(cells)
    assert found is not None
    return found


def test_held_out_lists_are_predicted_to_the_byte_on_the_tape() -> None:
    found = predictor(on_tape())
    held_out = [one for one in found.checked if is_held_out(one.prediction.of)]
    assert len(held_out) == 16 and len({one.measured_bytes for one in held_out}) > 3
    assert {one.error_bytes for one in found.checked} == {0}
    assert all(one.inside for one in found.checked)
    assert [fit.growth_factor for fit in found.fits.values()] == [1.0]


@settings(max_examples=5, deadline=None)
@given(st.lists(st.sampled_from(SIZES), min_size=1, unique=True), st.booleans(), st.booleans())
def test_any_list_is_predicted_on_the_tape(sizes: list[int], ascending: bool, apart: bool) -> None:
    output, workspace = SHARINGS[apart]
    order = "ascending" if ascending else "descending"
    of = CaptureList("any", "decode", "full", tuple(sorted(sizes)), order, output, workspace)  # type: ignore[arg-type]
    (captured,) = capture(
        tiny.cell(lists=(of,), latency=(), gate=False, kv_tokens=8192, model_config=WIDE)
    ).captured_lists
    prediction = predictor(on_tape()).predict(of)
    assert prediction is not None and prediction.graph_bytes == captured.graph_bytes
    low, high = prediction.interval
    assert low <= prediction.graph_bytes <= high and prediction.peak_bytes >= prediction.graph_bytes


def test_a_list_with_a_size_that_was_not_captured_alone_has_no_prediction() -> None:
    assert predictor(*gpu_cells(1.0)).predict(tiny.capture_list(1, 3)) is None
    assert memory_predictor([cell_result([], [])]) is None


def on_gpu(of: CaptureList, *, factor: float = 1.0) -> CapturedList:
    """A captured list as a GPU would have it: torch's bytes by torch's rules; what grows later times ``factor``."""
    shape, held = memory_shapes.QWEN_06B, of.output == "per_size"
    order = sorted(of.sizes, reverse=of.order == "descending")
    pool, first_bytes = BlockPool(TORCH_RULES), 0
    for index, size in enumerate(order):
        memory_shapes.capture(pool, shape, size, first=index == 0, hold_output=held)
        first_bytes = first_bytes or pool.reserved_bytes
    torch_bytes = first_bytes + round((pool.reserved_bytes - first_bytes) * factor)
    made = captured_list(of, gate=False)
    trace = memory_shapes.trace(shape, order[0], hold_output=held) if len(order) == 1 else None
    return replace(
        made,
        captures=(replace(made.captures[0], trace=trace, segments=1), *made.captures[1:]),
        torch_bytes=torch_bytes,
        graph_bytes=None,
        outside_torch_bytes=None,
        outside_source=None,
    )


def gpu_cells(factor: float) -> tuple[CellResult, ...]:
    sizes = memory_shapes.SGLANG
    (cell,) = memory_cells((tiny.cell(lists=lists_of(sizes)),), MemoryChoice(fit=6), "gpu")
    memory = cell_result([on_gpu(of, factor=factor) for of in cell.lists], [], purpose="memory")
    whole = captured_list(CaptureList("all", "decode", "full", sizes))
    first = replace(whole, outside_torch_bytes=42 * MIB, outside_source="measured", torch_bytes=78 * MIB)
    return memory, cell_result([first], [])


@pytest.mark.parametrize("factor", [1.0, 0.8, 1.3])
def test_what_play_back_misses_of_the_growth_is_fitted_and_the_held_out_lists_stay_within_the_bar(
    factor: float,
) -> None:
    found = predictor(*gpu_cells(factor))
    (fit,) = found.fits.values()
    assert fit.growth_factor == pytest.approx(factor, abs=0.02)
    held_out = [one for one in found.checked if is_held_out(one.prediction.of)]
    assert len(held_out) == 16
    assert all(abs(one.error_bytes) <= max(0.02 * one.measured_bytes, 16 * MIB) for one in held_out)
    assert sum(one.inside for one in held_out) >= 15


def test_bytes_outside_torch_come_from_first_lists() -> None:
    found = predictor(*gpu_cells(1.0))
    (outside,) = found.outside.values()
    assert (outside.per_executable_bytes, outside.lists) == (42 * MIB / 36, 1)
    prediction = found.predict(CaptureList("some", "decode", "full", memory_shapes.SGLANG[:18]))
    assert prediction is not None and prediction.outside_bytes == 21 * MIB


def test_nothing_is_learned_from_lists_that_are_held_out() -> None:
    memory, whole = gpu_cells(1.0)
    spoiled = [
        replace(of, torch_bytes=(of.torch_bytes or 0) * 3) if is_held_out(of.list) else of
        for of in memory.captured_lists
    ]
    found = predictor(replace(memory, captured_lists=tuple(spoiled)), whole)
    assert found.fits == predictor(memory, whole).fits
    assert not any(one.inside for one in found.checked if is_held_out(one.prediction.of))


def test_lists_captured_into_one_pool_share_it() -> None:
    found = predictor(*gpu_cells(1.0))
    large = CaptureList("large", "decode", "full", memory_shapes.SGLANG)
    small = CaptureList("small", "decode", "full", memory_shapes.SGLANG[:20])
    together, alone = found.predict_together([large, small]), found.predict(large)
    assert together is not None and alone is not None
    assert together.torch_bytes == alone.torch_bytes
    assert together.outside_bytes == alone.outside_bytes * 56 // 36


def test_the_two_sample_estimate_counts_the_second_graph_for_every_other() -> None:
    captures = captured_list(CaptureList("a", "decode", "full", (1, 2, 4))).captures
    first, second, third = (
        replace(capture, retained_bytes=size * MIB) for capture, size in zip(captures, (900, 80, 6), strict=True)
    )
    assert two_sample_bytes((first, second, third)) == (900 + 2 * 80) * MIB
    assert two_sample_bytes((first, replace(second, retained_bytes=0), third)) == 902 * MIB
    assert two_sample_bytes((first,)) is None


def test_the_peak_holds_what_a_warm_up_takes_beside_the_pool_and_the_executables_made_so_far() -> None:
    """The first size warms up with 74 MiB beside its pool; by then one executable of 36 exists."""
    found = predictor(*gpu_cells(1.0))
    of = CaptureList("all", "decode", "full", memory_shapes.SGLANG)
    setting = next(setting for setting in found.alone if setting.output == "shared")
    warm_up = (EventRun(2, (74 * MIB, -1)),)
    known = dict(found.alone[setting])
    known[256] = replace(known[256], trace=replace(known[256].trace, beside=warm_up))
    warmed = replace(found, alone={**found.alone, setting: known}, _played={})
    prediction = warmed.predict(of)
    assert prediction is not None
    assert prediction.peak_bytes == prediction.torch_bytes + 74 * MIB + round(42 * MIB / 36)
    assert prediction.graph_bytes < prediction.peak_bytes


@pytest.mark.parametrize(
    ("output_mib", "beside_mib", "spare_mib"),
    [
        (16, 32, 16),  # in a segment that a warm-up had left
        (16, 16, 0),  # in one of its own
        (16, 0, 0),  # where something else had left room
        (15.5, 16, 0),  # segments come in steps of 2 MiB
        (5, 20, 0),  # and below 10 MiB in one size
        (0, 32, 0),  # nothing shared
    ],
)
def test_what_is_left_beside_the_shared_output_may_be_missing_elsewhere(
    output_mib: float, beside_mib: int, spare_mib: int
) -> None:
    of = replace(
        captured_list(CaptureList("alone-8", "prefill", "breakable", (8,))),
        pool_bytes=224 * MIB,
        torch_bytes=(224 + beside_mib) * MIB,
    )
    trace = AllocationTrace(0, (), shared_output_bytes=round(output_mib * MIB))
    assert spare_bytes(of, trace, TORCH_RULES) == spare_mib * MIB
