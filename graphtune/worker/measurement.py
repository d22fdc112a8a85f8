"""What one cell measures, in order: each capture list captured and checked, latency and launches on the first."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from graphtune.plan import Cell, LatencyAt
from graphtune.results import (
    Capture,
    CapturedList,
    CaptureList,
    Execution,
    GateCheck,
    LaunchProfile,
    Mark,
    Point,
    Status,
    Timeline,
)
from graphtune.worker.allocations import allocation_recorder
from graphtune.worker.engine import Engine
from graphtune.worker.gate import check_list
from graphtune.worker.graphs.shape_key import ShapeKey
from graphtune.worker.launches import trace_step
from graphtune.worker.memory import Ledger, device_bytes, in_torch, outside_torch
from graphtune.worker.nvml import Gpu, PeakSampler
from graphtune.worker.runners.decode import CaptureFailure, DecodeStep, GraphDecode
from graphtune.worker.runners.series import BatchSeries
from graphtune.worker.timing import Clock, time_point

LEFTOVER_LIMIT_BYTES = 4 << 20


@dataclass
class Measurement:
    """Collects a cell's results; ``saved()`` is called after every list and every latency group."""

    cell: Cell
    engine: Engine
    ledger: Ledger
    gpu: Gpu | None
    saved: Callable[[str, int, int], None]
    captured_lists: list[CapturedList] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    launch_profiles: list[LaunchProfile] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    admission: Counter[str] = field(default_factory=Counter)
    unmeasured: tuple[CaptureList, ...] = ()
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def run(self) -> None:
        """Capture the lists in turn; stop, leaving the rest unmeasured, when the process is no longer clean."""
        for index, capture_list in enumerate(self.cell.lists):
            self._run_list(index, capture_list)
            done = self.captured_lists[-1]
            leftover = done.leftover_bytes
            clean = done.status == "ok" and (leftover is None or leftover <= LEFTOVER_LIMIT_BYTES)
            if not clean and index + 1 < len(self.cell.lists):
                self.unmeasured = self.cell.lists[index + 1 :]
                return

    def _run_list(self, index: int, capture_list: CaptureList) -> None:
        cell, engine, ledger = self.cell, self.engine, self.ledger
        backend = engine.make_backend(capture_list.output)
        runner = GraphDecode(engine.eager, backend, capture_list)
        before = ledger.mark("before_list", list_index=index)
        captures: list[Capture] = []
        status: Status = "ok"
        reason: str | None = None
        gate: tuple[GateCheck, ...] = ()
        after = before
        try:
            captures = self._capture(runner, index, before)
            failed = [capture for capture in captures if capture.status != "ok"]
            if failed:
                status = "capture_failed"
                reason = "; ".join(f"size {capture.size}: {capture.reason}" for capture in failed)
                reason += ". This is not a memory problem."
            after = ledger.mark("captured", list_index=index, pool_bytes=backend.pool_bytes())
            if cell.gate:
                with _timed(self.seconds, "gate"):
                    gate = check_list(runner, seed=cell.seed)
                ledger.mark("replayed", list_index=index, pool_bytes=backend.pool_bytes())
            if index == 0:
                self._latency(runner)
                ledger.mark("measured", list_index=index, pool_bytes=backend.pool_bytes())
                if self._launches(runner):
                    ledger.mark("profiled", list_index=index, pool_bytes=backend.pool_bytes())
        except torch.cuda.OutOfMemoryError as error:
            status, reason = "oom", str(error).strip().splitlines()[0]
        pool_bytes = backend.pool_bytes()
        peaks = [capture.peak_bytes for capture in captures if capture.peak_bytes is not None]
        self.admission.update(runner.admitted)
        runner.tear_down()
        torn_down = ledger.mark("torn_down", list_index=index)
        # A failed capture leaks its pool, so its bytes are not those of a list.
        torch_bytes = in_torch(after) - in_torch(before) if status == "ok" else None
        outside_bytes, outside_source = self._outside(capture_list, before, after) if status == "ok" else (None, None)
        self.captured_lists.append(
            CapturedList(
                list=capture_list,
                position_in_process=index + 1,
                status=status,
                reason=reason,
                captures=tuple(captures),
                gate=gate,
                graph_bytes=None if torch_bytes is None or outside_bytes is None else torch_bytes + outside_bytes,
                pool_bytes=pool_bytes if status == "ok" else None,
                outside_torch_bytes=outside_bytes,
                peak_bytes=max(peaks) if peaks else None,
                capture_s=_total_seconds(captures) if status == "ok" else None,
                leftover_bytes=in_torch(torn_down) - in_torch(before),
                torch_bytes=torch_bytes,
                outside_source=outside_source,
            )
        )
        self.saved("lists", index + 1, len(cell.lists))

    def _outside(
        self, capture_list: CaptureList, before: Mark, after: Mark
    ) -> tuple[int | None, Literal["measured", "composed"] | None]:
        """Bytes outside torch of a list: what grew when it is the process's first, else those of the first list if that
        had the same sizes; unknown otherwise, because the driver serves it from what it kept."""
        if self.gpu is None:
            return 0, "measured"
        if not self.captured_lists:
            return outside_torch(after) - outside_torch(before), "measured"
        first = self.captured_lists[0]
        if first.list.sizes == capture_list.sizes and first.outside_torch_bytes is not None:
            return first.outside_torch_bytes, "composed"
        return None, None

    def _capture(self, runner: GraphDecode, index: int, before: Mark) -> list[Capture]:
        captures: list[Capture] = []
        previous = before
        backend = runner.backend
        total = len(runner.list.sizes)
        with ExitStack() as stack, _timed(self.seconds, "capture"):
            sampler = stack.enter_context(PeakSampler(self.gpu)) if self.gpu else None
            used_before = self.gpu.used_bytes() if self.gpu else 0
            alone = self.cell.purpose == "memory" and total == 1
            recorder = allocation_recorder(backend) if alone else None
            for done, (size, outcome) in enumerate(runner.capture(), start=1):
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
                    )
                )
                previous = mark
                self.saved(f"capture {runner.list.name}", done, total)
        return captures

    def _latency(self, runner: GraphDecode) -> None:
        clock = Clock(self.engine.device, self.gpu)
        total = sum(len(at.sizes) for at in self.cell.latency)
        done = 0
        for at in self.cell.latency:
            with _timed(self.seconds, f"latency_{at.context_tokens}"):
                for size in at.sizes:
                    self._points(runner, clock, at, size)
                    done += 1
                    self.saved(f"latency at context {at.context_tokens}", done, total)

    def _points(self, runner: GraphDecode, clock: Clock, at: LatencyAt, size: int) -> None:
        series = self._series(size, at.context_tokens)
        try:
            self.points += time_point(
                self._steps(runner, at.executions, size),
                series,
                clock=clock,
                measure=self.cell.measure,
                backend=runner.list.backend,
                attention=self.cell.attention,
            )
        finally:
            series.close()

    def _steps(self, runner: GraphDecode, executions: tuple[Execution, ...], size: int) -> dict[Execution, DecodeStep]:
        steps: dict[Execution, DecodeStep] = {}
        if "graph" in executions and size in runner.sizes:
            steps["graph"] = runner
        if "eager" in executions:
            steps["eager"] = self.engine.eager
        return steps

    def _launches(self, runner: GraphDecode) -> bool:
        """Profile the cell's sizes; False where there is nothing to profile (the profiler used here sees GPUs only)."""
        if self.gpu is None or not self.cell.profile_sizes:
            return False
        context = self.cell.latency[0].context_tokens
        with _timed(self.seconds, "profile"):
            for size in self.cell.profile_sizes:
                series = self._series(size, context)
                try:
                    for execution, step in self._steps(runner, ("graph", "eager"), size).items():
                        trace = trace_step(step, series)
                        self.launch_profiles.append(trace.profile(size, context, execution))
                        if size == min(self.cell.profile_sizes):
                            self.timelines.append(trace.timeline(size, context, execution))
                finally:
                    series.close()
        self.saved("launch profiles", 1, 1)
        return True

    def _series(self, size: int, context: int) -> BatchSeries:
        engine = self.engine
        return BatchSeries(
            engine.table,
            size=size,
            context=context,
            vocab_size=engine.model.config.vocab_size,
            seed=self.cell.seed + size,
        )


@contextmanager
def _timed(seconds: defaultdict[str, float], name: str) -> Iterator[None]:
    """Adds the block's wall seconds under a name, also when it ends with an error."""
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] += time.perf_counter() - started


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
