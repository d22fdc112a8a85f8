from __future__ import annotations

from dataclasses import replace

from graphtune.results import CapturedList, CaptureList, CellResult
from graphtune.tune.memory_model import memory_model, peak_bytes
from tests.synthetic import MIB, captured_list, cell_result
from tests.tune.memory_shapes import SGLANG
from tests.tune.test_memory_prediction import gpu_cells

SIZES = (1, 2, 4)
SHARED = CaptureList("a", "decode", "full", SIZES)
PER_SIZE = CaptureList("a", "decode", "full", SIZES, output="per_size", workspace="per_size")


def later_in_a_process(of: CapturedList) -> CapturedList:
    """As the worker stores it: bytes outside torch are those of the first list, and the peak lacks them."""
    return replace(of, outside_source="composed", torch_bytes=(of.graph_bytes or 0) - (of.outside_torch_bytes or 0))


def cells() -> list[CellResult]:
    first = replace(captured_list(SHARED), outside_source="measured", torch_bytes=46 * MIB)
    later = later_in_a_process(captured_list(PER_SIZE, position=2, gate=False))
    checked = later_in_a_process(captured_list(PER_SIZE, position=2))
    return [cell_result([first, checked], []), cell_result([first, later], [], process=2)]


def test_bytes_say_whether_they_were_measured_or_composed() -> None:
    shared, per_size = memory_model(cells()).lists
    assert not shared.composed and per_size.composed
    assert per_size.torch_bytes == (46 * MIB,) * 2 and per_size.outside_bytes == (46 * MIB,) * 2
    model = memory_model(cells()[:1])
    found = {one.list.output: one for one in model.lists}
    assert found["per_size"].composed
    cost = model.cost(SIZES)
    assert cost is not None and cost.provenance == "measured"


def test_a_composed_list_on_its_own_costs_composed_bytes() -> None:
    later = later_in_a_process(captured_list(PER_SIZE, position=2))
    cost = memory_model([cell_result([later], [])]).cost(SIZES)
    assert cost is not None and cost.provenance == "composed"
    assert memory_model([cell_result([later], [])]).cost((1, 2)) is not None


def test_a_control_turns_composed_bytes_into_measured_ones_and_shows_the_difference() -> None:
    alone = replace(captured_list(PER_SIZE, first_bytes=93 * MIB), outside_source="measured")
    model = memory_model([*cells(), cell_result([alone], [], purpose="control")])
    per_size = next(one for one in model.lists if one.list.output == "per_size")
    assert not per_size.composed and per_size.largest_bytes == 95 * MIB
    (control,) = model.controls
    assert control.shared_composed and control.difference_bytes == 3 * MIB


def test_the_peak_of_a_composed_list_holds_the_executables_that_the_driver_had_kept() -> None:
    plain = captured_list(PER_SIZE)
    later = later_in_a_process(plain)
    assert plain.peak_bytes is not None and plain.outside_torch_bytes is not None
    assert peak_bytes(plain) == plain.peak_bytes
    assert peak_bytes(later) == plain.peak_bytes + plain.outside_torch_bytes
    assert peak_bytes(replace(later, peak_bytes=None)) is None


def test_a_list_is_green_when_some_process_checked_every_size() -> None:
    per_size = next(one for one in memory_model(cells()).lists if one.list.output == "per_size")
    assert per_size.serves(SIZES)
    bad = captured_list(PER_SIZE, position=2, failing=(2,))
    spoiled = memory_model([*cells(), cell_result([bad], [], process=3)])
    per_size = next(one for one in spoiled.lists if one.list.output == "per_size")
    assert per_size.serves((1, 4)) and not per_size.serves(SIZES)


def swept() -> list[CellResult]:
    """A made-up sweep whose sizes were captured alone, with one whole list that passed the gate but for one size."""
    shared = CaptureList("all", "decode", "full", SGLANG)
    whole = captured_list(shared, failing=(12,))
    first = replace(whole, outside_torch_bytes=42 * MIB, outside_source="measured", torch_bytes=78 * MIB)
    per_size = replace(captured_list(replace(shared, output="per_size"), first_bytes=900 * MIB), status="ok")
    memory, _ = gpu_cells(1.0)
    return [memory, cell_result([first, per_size], [])]


def test_a_list_that_was_not_measured_is_predicted_under_the_cheapest_setting() -> None:
    model = memory_model(swept())
    sizes = (8, 64, 256)
    cost = model.cost(sizes)
    assert cost is not None and cost.provenance == "predicted"
    assert (cost.of.sizes, cost.of.output, cost.of.order) == (sizes, "shared", "descending")
    assert cost.interval is not None and cost.interval[0] < cost.graph_bytes < cost.interval[1]
    assert cost.activation_peak_bytes is not None and cost.activation_peak_bytes >= 0
    assert cost.capture_s is not None and 0 < cost.capture_s < sum(model.size_seconds.values())
    assert cost.cell_ids == model.evidence != ()


def test_a_size_that_failed_the_gate_is_not_predicted_as_checked() -> None:
    model = memory_model(swept())
    checked = model.cost((8, 12))
    assert checked is not None and (checked.provenance, checked.of.output) == ("bound", "per_size")
    unchecked = model.cost((8, 12), checked=False)
    assert unchecked is not None and unchecked.provenance == "predicted"


def test_measured_counts_before_predicted_and_predicted_before_a_bound() -> None:
    cells = swept()
    whole = memory_model(cells).cost(SGLANG, checked=False)
    assert whole is not None and whole.provenance == "measured"
    bound = memory_model([cell for cell in cells if cell.purpose == "main"]).cost((8, 64, 256))
    assert bound is not None and bound.provenance == "bound"


def test_lists_for_memory_alone_are_no_measured_lists() -> None:
    model = memory_model(swept())
    assert {one.list.name for one in model.lists} == {"all"}
    assert memory_model(swept(), "prefill").lists == () == memory_model(swept(), backend="breakable").lists
