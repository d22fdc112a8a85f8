"""A recommended list captured for real: what was predicted of it against what a fresh process measures.

The process loads the model, fills the device with a KV pool of the recommended size, captures the list, checks every
size's output against eager and times five sizes. Bytes must lie in the stated interval, the peak and the seconds must
not pass what was stated, and a replay must take what it took in the sweep. On a CPU times are shown and not judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from graphtune.errors import Finding
from graphtune.plan import STEP_TOKENS, CaptureLimit, Cell, LatencyAt
from graphtune.results import CapturedList, CellResult, Point
from graphtune.stats import Time, median_us
from graphtune.store import Sweep, decode_cell
from graphtune.tune.latency_model import latency_model
from graphtune.tune.verify_target import Target
from graphtune.units import MIB, GpuMemory

TIMED_SIZES = 5
REPLAY_TOLERANCE = 0.1
"""Two sweeps of one model on one card had replays within 2.6 % of each other at every point; a KV pool that fills the
card lies further apart than that of a sweep."""

SECONDS_FACTOR, SECONDS_MORE = 2.0, 1.0
"""Capturing is host work, which a busy host slows down: only what takes far longer than stated is a finding."""

PEAK_MORE_BYTES = 16 * MIB
"""Peaks are sampled, and what a driver needs for a moment is in none of the parts that a prediction is made of."""

Verdict = Literal["ok", "outside", "not judged"]
CheckUnit = Literal["bytes", "s", "us", "sizes", "tokens", "share"]


@dataclass(frozen=True)
class Check:
    """One figure: ``low`` and ``high`` bound what was predicted, null where that side is open."""

    name: str
    unit: CheckUnit
    predicted: float | None
    low: float | None
    high: float | None
    measured: float | None
    verdict: Verdict
    reason: str | None = None


@dataclass(frozen=True)
class Verification:
    """All checks of one list; ``passed`` when none is outside."""

    target: Target
    device_name: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.verdict != "outside" for check in self.checks)


def verification_cell(target: Target, sweep: Sweep, gpu: GpuMemory | None) -> Cell:
    """The process that captures the target with the model of ``sweep``. Raises Finding where its KV pool cannot hold
    the requests that the output check needs."""
    like = next((cell for cell in sweep.cells if cell.purpose == "main" and cell.model is not None), None)
    if like is None:
        raise Finding("no cell of this sweep loaded the model", where=str(sweep.path))
    cell = decode_cell(like.cell)
    page = cell.page_size
    # The pool has one page more than it is asked for: the sink of padded rows.
    tokens = cell.kv_tokens if target.kv_tokens is None else max(page, target.kv_tokens - page)
    least = (target.list.sizes[-1] + 1) * page
    if tokens < least:
        raise Finding(f"a KV cache of {tokens} tokens cannot hold the {least} that checking the largest size needs")
    context = measured_context(sweep, target)
    held = [size for size in target.list.sizes if size * math.ceil((context + STEP_TOKENS) / page) * page <= tokens]
    limit = None
    if gpu is not None and target.kv_tokens is not None:
        limit = CaptureLimit(gpu.cuda_total_bytes, target.peak_bytes)
    return replace(
        cell,
        lists=(target.list,),
        latency=(LatencyAt(spread(held), context, ("graph",)),) if held else (),
        prefill_latency=(),
        profile_sizes=(),
        kv_tokens=tokens,
        gate=True,
        purpose="verify",
        process=1,
        phase="decode",
        capture_limit=limit,
    )


def measured_context(sweep: Sweep, target: Target) -> int:
    """The context at which the sweep measured most sizes of the list, the one nearest to the target's of equals."""
    model = latency_model(sweep.cells)
    known = {context: set(model.sizes("graph", context)) & set(target.list.sizes) for context in model.contexts()}
    return max(known, key=lambda context: (len(known[context]), -abs(context - target.context_tokens)))


def spread(sizes: Sequence[int]) -> tuple[int, ...]:
    """Five of ``sizes`` from the smallest to the largest, evenly spread; all where there are no more."""
    if len(sizes) <= TIMED_SIZES:
        return tuple(sizes)
    last = len(sizes) - 1
    return tuple(dict.fromkeys(sizes[round(index * last / (TIMED_SIZES - 1))] for index in range(TIMED_SIZES)))


def verify(target: Target, sweep: Sweep, result: CellResult) -> Verification:
    """Compare what the process measured with what was stated. Raises Finding when it captured nothing."""
    if not result.captured_lists or result.captured_lists[0].graph_bytes is None:
        raise Finding(result.reason or "the process captured nothing", where=f"{target.engine}, {result.status}")
    captured = result.captured_lists[0]
    on_gpu = result.environment is not None and result.environment.device == "cuda"
    checks = [
        within("graph memory", "bytes", target.graph_bytes, target.interval, captured.graph_bytes),
        _peak(target, captured),
        *_device(result, captured),
        gate_check(captured),
        _seconds(target, captured, judged=on_gpu),
        *_times(sweep, result.points, judged=on_gpu),
    ]
    name = result.environment.device_name if result.environment else "unknown device"
    return Verification(target, name, tuple(checks))


def within(
    name: str,
    unit: CheckUnit,
    predicted: float | None,
    bounds: tuple[float | None, float | None],
    measured: float | None,
    *,
    judged: bool = True,
    reason: str | None = None,
) -> Check:
    low, high = bounds
    verdict: Verdict = "not judged"
    if judged and measured is not None and predicted is not None:
        inside = (low is None or low <= measured) and (high is None or measured <= high)
        verdict = "ok" if inside else "outside"
    return Check(name, unit, predicted, low, high, measured, verdict, reason)


def _peak(target: Target, captured: CapturedList) -> Check:
    high = target.peak_bytes + target.interval[1] - target.graph_bytes + PEAK_MORE_BYTES
    return within("peak while capturing", "bytes", target.peak_bytes, (None, high), captured.peak_bytes)


def _device(result: CellResult, captured: CapturedList) -> list[Check]:
    """Device bytes at the peak against what the process may use; nothing where there is no limit."""
    limit = decode_cell(result.cell).capture_limit
    before = (
        next((mark for mark in result.ledger.marks if mark.stage == "before_list"), None) if result.ledger else None
    )
    if limit is None or before is None or before.free_delta_bytes is None or captured.peak_bytes is None:
        return []
    used = before.free_delta_bytes + captured.peak_bytes
    predicted = before.free_delta_bytes + limit.needed_bytes
    return [within("device memory at the peak", "bytes", predicted, (None, limit.device_bytes), used)]


def gate_check(captured: CapturedList, name: str = "outputs equal to eager's") -> Check:
    passed = sum(check.passed for check in captured.gate)
    failed = next((f"size {check.size}: {check.reason}" for check in captured.gate if not check.passed), None)
    many = len(captured.list.sizes)
    verdict: Verdict = "ok" if captured.gate_green else "outside"
    return Check(name, "sizes", many, many, many, passed, verdict, failed or captured.reason)


def _seconds(target: Target, captured: CapturedList, *, judged: bool) -> Check:
    high = None if target.capture_s is None else SECONDS_FACTOR * target.capture_s + SECONDS_MORE
    return within("seconds of capture", "s", target.capture_s, (None, high), captured.capture_s, judged=judged)


def _times(sweep: Sweep, points: Sequence[Point], *, judged: bool) -> list[Check]:
    """Replay and step of each timed size. Steps hold host time, which differs between hosts: they are not judged."""
    checks = []
    times: tuple[tuple[Time, str, bool], ...] = (("gpu_us", "replay", judged), ("step_us", "step", False))
    for time, name, counts in times:
        model = latency_model(sweep.cells, time=time)
        for point in points:
            figure = model.graph(point.padded_size, point.context_tokens)
            predicted = figure.us if figure is not None else None
            samples = getattr(point, time)
            off = REPLAY_TOLERANCE * (predicted or 0.0)
            bounds = (predicted - off, predicted + off) if predicted is not None else (None, None)
            flagged = ", ".join(samples.flags) if samples is not None and samples.flags else None
            checks.append(
                within(
                    f"{name} of {point.raw_size}",
                    "us",
                    predicted,
                    bounds,
                    median_us(samples),
                    judged=counts and flagged is None,
                    reason=flagged or point.reason,
                )
            )
    return checks
