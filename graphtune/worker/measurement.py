"""What one cell measures, in order: each capture list captured and checked, latency and launches on the first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from graphtune.plan import Cell
from graphtune.results import (
    Capture,
    CapturedList,
    CaptureList,
    GateCheck,
    Mark,
    Status,
)
from graphtune.worker.allocations import allocation_recorder
from graphtune.worker.disturbance import Watch
from graphtune.worker.engine import Engine, Runner
from graphtune.worker.gate import check_list
from graphtune.worker.graphs.shape_key import ShapeKey
from graphtune.worker.latency import Latency, timed
from graphtune.worker.memory import Ledger, device_bytes, in_torch, outside_torch
from graphtune.worker.nvml import Gpu, PeakSampler
from graphtune.worker.prefill_gate import check_prefill
from graphtune.worker.runners.base import CaptureFailure
from graphtune.worker.runners.decode import GraphDecode

LEFTOVER_LIMIT_BYTES = 4 << 20

CHECKED_TOGETHER = 8
"""Sizes of each list that are checked again beside another list in one pool; a process of its own checked all."""


@dataclass
class _Live:
    """A list that is captured and not yet torn down. ``after`` is the mark when its last size was captured."""

    index: int
    runner: Runner
    before: Mark
    after: Mark
    captures: list[Capture] = field(default_factory=list)
    flags: tuple[str, ...] = ()
    segments: int = 0
    gate: tuple[GateCheck, ...] = ()
    status: Status = "ok"
    reason: str | None = None


@dataclass
class Measurement:
    """Collects a cell's results; ``saved()`` is called after every list and every latency group."""

    cell: Cell
    engine: Engine
    ledger: Ledger
    gpu: Gpu | None
    saved: Callable[[str, int, int], None]
    captured_lists: list[CapturedList] = field(default_factory=list)
    admission: Counter[str] = field(default_factory=Counter)
    unmeasured: tuple[CaptureList, ...] = ()
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    latency: Latency = field(init=False)
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = Watch(self.gpu, patience_s=0.0)
        self.latency = Latency(self.cell, self.engine, self.gpu, self.saved, seconds=self.seconds)

    def run(self) -> None:
        """Capture the lists in turn; stop, leaving the rest unmeasured, when the process is no longer clean."""
        if self.cell.purpose == "joint":
            self._run_together()
            return
        for index, capture_list in enumerate(self.cell.lists):
            live = self._captured(index, capture_list)
            self._tear_down(live, live.before)
            done = self.captured_lists[-1]
            leftover = done.leftover_bytes
            clean = done.status == "ok" and (leftover is None or leftover <= LEFTOVER_LIMIT_BYTES)
            if not clean and index + 1 < len(self.cell.lists):
                self.unmeasured = self.cell.lists[index + 1 :]
                return

    def _run_together(self) -> None:
        """Capture every list into one pool, checked while all are live, and tear them down together."""
        pools: list[Any] = []
        lives = [self._captured(index, of, pools) for index, of in enumerate(self.cell.lists)]
        for live in lives:
            if self.cell.gate and live.status == "ok":
                live.gate = self._check(live, most=CHECKED_TOGETHER)
        for live in reversed(lives):
            live.runner.backend.cleanup()
        for live in lives:
            self._tear_down(live, lives[0].before)

    def _captured(self, index: int, capture_list: CaptureList, pools: list[Any] | None = None) -> _Live:
        """Capture a list; the first one of a process is timed, and one with a pool of its own checked at once."""
        ledger, cell = self.ledger, self.cell
        runner = self.engine.runner(capture_list, pools)
        before = ledger.mark("before_list", list_index=index, pool_bytes=runner.backend.pool_bytes())
        live = _Live(index, runner, before, before)
        try:
            live.captures, live.flags = self._capture(runner, index, before)
            failed = [capture for capture in live.captures if capture.status != "ok"]
            if failed:
                live.status = "capture_failed"
                live.reason = "; ".join(f"size {capture.size}: {capture.reason}" for capture in failed)
                live.reason += ". This is not a memory problem."
            live.after = self._mark("captured", live)
            live.segments = len(runner.backend.pool_segments())
            if pools is None:
                if cell.gate:
                    live.gate = self._check(live)
                if index == 0:
                    self.latency.measure(runner)
                    self._mark("measured", live)
                    if self.latency.profile(runner):
                        self._mark("profiled", live)
        except torch.cuda.OutOfMemoryError as error:
            live.status, live.reason = "oom", str(error).strip().splitlines()[0]
        return live

    def _check(self, live: _Live, most: int | None = None) -> tuple[GateCheck, ...]:
        with timed(self.seconds, "gate"):
            checks = check_runner(live.runner, seed=self.cell.seed, most=most)
        self._mark("replayed", live)
        return checks

    def _mark(self, stage: str, live: _Live) -> Mark:
        return self.ledger.mark(stage, list_index=live.index, pool_bytes=live.runner.backend.pool_bytes())

    def _tear_down(self, live: _Live, clean: Mark) -> None:
        """Drop the list's graphs and keep what they took; ``clean`` is the mark that memory must return to."""
        runner, captures, before, after = live.runner, live.captures, live.before, live.after
        status, capture_list = live.status, live.runner.list
        pool_bytes = after.pool_bytes
        peaks = [capture.peak_bytes for capture in captures if capture.peak_bytes is not None]
        self.admission.update(runner.admitted)
        runner.tear_down()
        torn_down = self.ledger.mark("torn_down", list_index=live.index)
        # A failed capture leaks its pool, so its bytes are not those of a list.
        torch_bytes = in_torch(after) - in_torch(before) if status == "ok" else None
        outside_bytes, outside_source = self._outside(capture_list, before, after) if status == "ok" else (None, None)
        self.captured_lists.append(
            CapturedList(
                list=capture_list,
                position_in_process=live.index + 1,
                status=status,
                reason=live.reason,
                captures=tuple(captures),
                gate=live.gate,
                graph_bytes=None if torch_bytes is None or outside_bytes is None else torch_bytes + outside_bytes,
                pool_bytes=pool_bytes if status == "ok" else None,
                outside_torch_bytes=outside_bytes,
                peak_bytes=max(peaks) if peaks else None,
                capture_s=_total_seconds(captures) if status == "ok" else None,
                leftover_bytes=in_torch(torn_down) - in_torch(clean),
                torch_bytes=torch_bytes,
                outside_source=outside_source,
                flags=live.flags,
                pool_segments=live.segments if status == "ok" else None,
            )
        )
        self.saved("lists", live.index + 1, len(self.cell.lists))

    def _outside(
        self, capture_list: CaptureList, before: Mark, after: Mark
    ) -> tuple[int | None, Literal["measured", "composed"] | None]:
        """Bytes outside torch of a list: what grew when it is the process's first, or nothing before it was torn down;
        else those of the first list if that had the same sizes; unknown otherwise, because the driver serves it from
        what it kept."""
        if self.gpu is None:
            return 0, "measured"
        if not self.captured_lists or self.cell.purpose == "joint":
            return outside_torch(after) - outside_torch(before), "measured"
        first = self.captured_lists[0]
        if first.list.sizes == capture_list.sizes and first.outside_torch_bytes is not None:
            return first.outside_torch_bytes, "composed"
        return None, None

    def _capture(self, runner: Runner, index: int, before: Mark) -> tuple[list[Capture], tuple[str, ...]]:
        """The list's captures, and what disturbed the machine before, between and after them."""
        captures: list[Capture] = []
        disturbances = set(self.watch.now())
        previous = before
        backend = runner.backend
        total = len(runner.list.sizes)
        with ExitStack() as stack, timed(self.seconds, "capture"):
            sampler = stack.enter_context(PeakSampler(self.gpu)) if self.gpu else None
            used_before = self.gpu.used_bytes() if self.gpu else 0
            # The same in every process and under every order: once is enough.
            tells_kernels = index == 0 and self.cell.purpose == "main" and self.cell.process == 1
            alone = self.cell.purpose == "memory" and total == 1
            recorder = allocation_recorder(backend) if alone else None
            for done, (size, outcome) in enumerate(runner.capture(), start=1):
                disturbances.update(self.watch.now())
                captured = not isinstance(outcome, CaptureFailure)
                trace = recorder.take(ShapeKey(size)) if recorder and captured else None
                # Torch keeps what the warm-ups took until the mark empties its cache, so this reading holds their peak.
                peak = sampler.take() - used_before if sampler else None
                mark = self.ledger.mark("capture", list_index=index, size=size, pool_bytes=backend.pool_bytes())
                if isinstance(outcome, CaptureFailure):
                    captures.append(_failed(outcome))
                    previous = mark
                    continue
                captures.append(
                    Capture(
                        size=size,
                        warmup_s=round(outcome.warmup_s, 6),
                        record_s=round(outcome.record_s, 6),
                        instantiate_s=round(outcome.instantiate_s, 6),
                        pool_growth_bytes=mark.pool_bytes - previous.pool_bytes,
                        retained_bytes=device_bytes(mark) - device_bytes(previous),
                        peak_bytes=peak,
                        nodes=outcome.nodes,
                        segments=outcome.segments,
                        key=str(size),
                        trace=trace,
                        kernels=backend.kernels(ShapeKey(size)) if tells_kernels else None,
                    )
                )
                previous = mark
                if self.cell.purpose != "memory":  # many short lists: it is enough to save each when it is done
                    self.saved(f"capture {runner.list.name}", done, total)
        return captures, tuple(sorted(disturbances))


def check_runner(runner: Runner, *, seed: int, most: int | None = None) -> tuple[GateCheck, ...]:
    """The correctness gate of the runner's phase, over all sizes or ``most`` of them."""
    if isinstance(runner, GraphDecode):
        return check_list(runner, seed=seed, most=most)
    return check_prefill(runner, seed=seed, most=most)


def _failed(failure: CaptureFailure) -> Capture:
    return Capture(
        size=failure.size,
        warmup_s=None,
        record_s=None,
        instantiate_s=None,
        pool_growth_bytes=None,
        retained_bytes=None,
        peak_bytes=None,
        nodes=None,
        segments=None,
        key=str(failure.size),
        status="capture_failed",
        reason=failure.reason,
    )


def _total_seconds(captures: list[Capture]) -> float:
    parts = [(c.warmup_s or 0.0) + (c.record_s or 0.0) + (c.instantiate_s or 0.0) for c in captures]
    return round(sum(parts), 6)
