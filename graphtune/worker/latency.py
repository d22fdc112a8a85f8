"""What is timed while a list is live: decode steps and prefills, graph beside eager, and what a step launches."""

from __future__ import annotations

import bisect
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace

from graphtune.plan import Cell, LatencyAt, Measure, PrefillAt
from graphtune.results import CaptureList, Execution, LaunchProfile, Point, Timeline
from graphtune.worker.engine import Engine
from graphtune.worker.launches import StepTrace, trace_step
from graphtune.worker.nvml import Gpu
from graphtune.worker.runners.base import PaddedReplay
from graphtune.worker.runners.decode import GraphDecode
from graphtune.worker.runners.prefill import GraphPrefill
from graphtune.worker.runners.series import BatchSeries, PrefillSeries
from graphtune.worker.timing import Clock, Step, time_decode, time_padded, time_prefill

PREFILL_SHARE = 0.5
"""Of ``max_seconds``, what a prefill may take: one reading tells all its times, where a decode step has three."""

FEW_SAMPLES_ABOVE = 1024
"""Tokens above which a prefill is long enough for few samples to do."""

FEW_SAMPLES = 3

FEW_SAMPLES_S = 0.1
"""Seconds of sampling after which those few are enough, whatever their noise."""


@dataclass
class Latency:
    """Collects points and profiles of a cell; ``saved(stage, done, total)`` is called as they come."""

    cell: Cell
    engine: Engine
    gpu: Gpu | None
    saved: Callable[[str, int, int], None]
    points: list[Point] = field(default_factory=list)
    profiles: list[LaunchProfile] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def measure(self, runner: GraphDecode | GraphPrefill) -> None:
        """Time what the cell asks for on the sizes that ``runner`` holds."""
        clock = Clock(self.engine.device, self.gpu)
        try:
            if isinstance(runner, GraphDecode):
                self._decode(runner, clock)
            else:
                self._prefill(runner, clock)
        finally:
            clock.watch.release()

    def profile(self, runner: GraphDecode | GraphPrefill) -> bool:
        """Profile the cell's sizes; False where there is nothing to profile (the profiler used here sees GPUs only)."""
        if self.gpu is None or not self.cell.profile_sizes:
            return False
        with timed(self.seconds, "profile"):
            if isinstance(runner, GraphDecode):
                self._profile_decode(runner)
            else:
                self._profile_prefill(runner)
        self.saved("launch profiles", 1, 1)
        return True

    def _decode(self, runner: GraphDecode, clock: Clock) -> None:
        total = sum(len(at.sizes) for at in self.cell.latency)
        done = 0
        for at in self.cell.latency:
            with timed(self.seconds, f"latency_{at.context_tokens}"):
                for size in at.sizes:
                    with closing(self._batches(size, at.context_tokens)) as series:
                        steps = self._decode_steps(runner, at.executions, size)
                        self.points += time_decode(
                            steps,
                            series,
                            clock=clock,
                            measure=self.cell.measure,
                            backend=runner.list.backend,
                            attention=self.cell.attention,
                        )
                    done += 1
                    self.saved(f"latency at context {at.context_tokens}", done, total)
            if at.padded:
                with timed(self.seconds, "latency_padded"):
                    self._padded(runner, at, clock)

    def _padded(self, runner: GraphDecode, at: LatencyAt, clock: Clock) -> None:
        """Replays in buckets larger than the batch: which kernels run is the bucket's, what is read the batch's."""
        for done, padded in enumerate(at.padded, start=1):
            with closing(self._batches(padded.raw_size, at.context_tokens)) as series:
                for bucket in padded.buckets:
                    if bucket in runner.sizes:
                        self.points.append(
                            time_padded(
                                PaddedReplay(runner, bucket),
                                series,
                                padded_size=bucket,
                                clock=clock,
                                measure=self.cell.measure,
                                backend=runner.list.backend,
                                attention=self.cell.attention,
                            )
                        )
            self.saved(f"padded steps at context {at.context_tokens}", done, len(at.padded))

    def _decode_steps(self, runner: GraphDecode, executions: tuple[Execution, ...], size: int) -> dict[Execution, Step]:
        steps: dict[Execution, Step] = {}
        if "graph" in executions and size in runner.sizes:
            steps["graph"] = runner
        if "eager" in executions:
            steps["eager"] = self.engine.eager
        return steps

    def _prefill(self, runner: GraphPrefill, clock: Clock) -> None:
        total = sum(len(at.tokens) for at in self.cell.prefill_latency)
        done = 0
        with timed(self.seconds, "latency_prefill"):
            for at in self.cell.prefill_latency:
                for tokens in at.tokens:
                    with closing(self._prefills(tokens, at)) as series:
                        steps, padded = self._prefill_steps(runner, at.executions, tokens)
                        self.points += time_prefill(
                            steps,
                            series,
                            padded_tokens=padded,
                            clock=clock,
                            measure=self._prefill_measure(tokens),
                            backend=runner.list.backend,
                            attention=self.cell.attention,
                        )
                    done += 1
                    self.saved(f"prefill latency, {at.requests} requests", done, total)

    def _prefill_measure(self, tokens: int) -> Measure:
        measure = self.cell.measure
        seconds = PREFILL_SHARE * measure.max_seconds
        if tokens <= FEW_SAMPLES_ABOVE:
            return replace(measure, max_seconds=seconds)
        return replace(measure, min_samples=FEW_SAMPLES, max_seconds=min(seconds, FEW_SAMPLES_S))

    def _prefill_steps(
        self, runner: GraphPrefill, executions: tuple[Execution, ...], tokens: int
    ) -> tuple[dict[Execution, Step], int]:
        """The steps of ``tokens`` tokens, and the captured size that holds them."""
        assert self.engine.prefill is not None
        steps: dict[Execution, Step] = {}
        at = bisect.bisect_left(runner.sizes, tokens)
        padded = runner.sizes[at] if at < len(runner.sizes) else tokens
        if "graph" in executions and at < len(runner.sizes):
            steps["graph"] = PaddedReplay(runner, padded)
        if "eager" in executions:
            steps["eager"] = self.engine.prefill
        return steps, padded

    def _profile_decode(self, runner: GraphDecode) -> None:
        context = self.cell.latency[0].context_tokens
        for size in self.cell.profile_sizes:
            with closing(self._batches(size, context)) as series:
                for execution, step in self._decode_steps(runner, ("graph", "eager"), size).items():
                    self._keep(trace_step(step, series), runner.list, size, context, execution)

    def _profile_prefill(self, runner: GraphPrefill) -> None:
        for tokens in self.cell.profile_sizes:
            with closing(self._prefills(tokens, PrefillAt((tokens,)))) as series:
                steps, _ = self._prefill_steps(runner, ("graph", "eager"), tokens)
                for execution, step in steps.items():
                    self._keep(trace_step(step, series), runner.list, tokens, 0, execution)

    def _keep(self, trace: StepTrace, of: CaptureList, size: int, context: int, execution: Execution) -> None:
        backend = of.backend if execution == "graph" else "eager"
        profile = trace.profile(size, context, execution)
        if backend == "breakable":
            profile = replace(profile, segments=trace.graph_launches, launches_in_breaks=trace.kernel_launches)
        self.profiles.append(replace(profile, phase=of.phase, backend=backend))
        if size == min(self.cell.profile_sizes):
            timeline = trace.timeline(size, context, execution)
            self.timelines.append(replace(timeline, phase=of.phase, backend=backend))

    def _batches(self, size: int, context: int) -> BatchSeries:
        engine = self.engine
        return BatchSeries(
            engine.table,
            size=size,
            context=context,
            vocab_size=engine.model.config.vocab_size,
            seed=self.cell.seed + size,
        )

    def _prefills(self, tokens: int, at: PrefillAt) -> PrefillSeries:
        engine = self.engine
        return PrefillSeries(
            engine.table,
            tokens=tokens,
            requests=at.requests,
            prefix_tokens=at.prefix_tokens,
            longest=engine.room.context,
            vocab_size=engine.model.config.vocab_size,
            seed=self.cell.seed + tokens,
        )


@contextmanager
def timed(seconds: defaultdict[str, float], name: str) -> Iterator[None]:
    """Adds the block's wall seconds under a name, also when it ends with an error."""
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] += time.perf_counter() - started
