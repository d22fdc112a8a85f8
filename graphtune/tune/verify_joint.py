"""Both phases' lists captured into one pool, as a server captures them: their bytes together, and both outputs."""

from __future__ import annotations

from dataclasses import replace

from graphtune.errors import Finding
from graphtune.plan import CaptureLimit, Cell
from graphtune.results import CaptureList, CellResult
from graphtune.store import Sweep
from graphtune.tune.memory_prediction import Prediction, memory_predictor
from graphtune.tune.verify import PEAK_MORE_BYTES, Check, gate_check, within
from graphtune.tune.verify_target import Target


def joint_cell(target: Target, sweep: Sweep, decode_cell: Cell) -> Cell | None:
    """The process of ``decode_cell`` that captures the prefill list before that of decode; None without one."""
    if target.prefill is None:
        return None
    lists = (_as_swept(target.prefill, sweep), target.list)
    limit = decode_cell.capture_limit
    expected = _prediction(sweep, lists)
    if limit is not None:
        peak = expected.peak_bytes if expected is not None else limit.needed_bytes + (target.joint_bytes or 0)
        limit = CaptureLimit(limit.device_bytes, peak)
    return replace(decode_cell, lists=lists, latency=(), purpose="joint", phase="prefill", capture_limit=limit)


def joint_checks(target: Target, sweep: Sweep, result: CellResult) -> tuple[Check, ...]:
    """What both lists took together against what is predicted of one pool, or at most what they were stated to take
    apart. Raises Finding when a list was not captured."""
    measured = [of.graph_bytes for of in result.captured_lists]
    if len(measured) < 2 or None in measured:
        raise Finding(result.reason or "the lists of both phases were not captured", where=f"both, {result.status}")
    total = sum(size for size in measured if size is not None)
    first, second = result.captured_lists
    peaks = (first.peak_bytes, second.peak_bytes)
    peak = None if None in peaks else max(peaks[0] or 0, (measured[0] or 0) + (peaks[1] or 0))
    expected = _prediction(sweep, (first.list, second.list))
    name = "graph memory of both phases"
    if expected is None:
        bytes_check = within(name, "bytes", target.joint_bytes, (None, target.joint_bytes), total)
        peak_check = within("peak of both phases", "bytes", None, (None, None), peak)
    else:
        bytes_check = within(name, "bytes", expected.graph_bytes, expected.interval, total)
        most = expected.peak_bytes + expected.interval[1] - expected.graph_bytes + PEAK_MORE_BYTES
        peak_check = within("peak of both phases", "bytes", expected.peak_bytes, (None, most), peak)
    gates = (gate_check(of, f"{of.list.phase} outputs, one pool") for of in (first, second))
    return (bytes_check, peak_check, *gates)


def _prediction(sweep: Sweep, lists: tuple[CaptureList, CaptureList]) -> Prediction | None:
    predictor = memory_predictor(sweep.cells)
    return predictor.predict_together(lists) if predictor is not None else None


def _as_swept(of: CaptureList, sweep: Sweep) -> CaptureList:
    """The list with what only the sweep knows of it: the cap on padding, and the request slots of a full prefill."""
    swept = (one.list for cell in sweep.cells for one in cell.captured_lists)
    like = next((one for one in swept if (one.phase, one.backend) == (of.phase, of.backend)), of)
    return replace(of, waste_cap=like.waste_cap, request_slots=like.request_slots)
