"""Timing of decode steps: device time, host time, and steps in a row, sampled until a stop rule holds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from graphtune.plan import Measure
from graphtune.results import Execution, Point, Samples, StopRule
from graphtune.worker.runners.decode import DecodeStep
from graphtune.worker.runners.series import BatchSeries

STORED = 20
STEPS_PER_SAMPLE = 2
MAX_SAMPLES = 200


@dataclass
class Sampler:
    """Collects samples of one quantity and says when to stop.

    ``noise``: standard deviation over mean at or below ``measure.noise`` with at least ``min_samples``. ``time``:
    ``max_seconds`` of sampling spent, again with at least ``min_samples``. ``count``: MAX_SAMPLES taken.
    """

    measure: Measure
    us: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, us: float, seconds: float) -> None:
        self.us.append(us)
        self.seconds += seconds

    @property
    def stop(self) -> StopRule | None:
        if len(self.us) < max(2, self.measure.min_samples):
            return None
        if statistics.stdev(self.us) <= self.measure.noise * statistics.fmean(self.us):
            return "noise"
        if self.seconds >= self.measure.max_seconds:
            return "time"
        return "count" if len(self.us) >= MAX_SAMPLES else None

    def samples(self, stop: StopRule) -> Samples:
        stride = max(1, -(-len(self.us) // STORED))
        return Samples(tuple(round(us, 2) for us in self.us[::stride]), len(self.us), stop)


class Clock:
    """Times one step on a device. On the CPU the device time is the wall time of the forward."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._start = torch.cuda.Event(enable_timing=True)
            self._end = torch.cuda.Event(enable_timing=True)
            self._output = (torch.cuda.Event(), torch.cuda.Event())

    def alone(self, step: DecodeStep, series: BatchSeries) -> dict[str, float]:
        """One step with the device idle before: gpu, host and the host's parts, in µs."""
        self._wait_idle()
        begin = time.perf_counter()
        step.fill(series.middle)
        filled = time.perf_counter()
        step.plan()
        planned = time.perf_counter()
        if self._cuda:
            self._start.record()
        step.launch()
        if self._cuda:
            self._end.record()
        launched = time.perf_counter()
        self._wait_idle()
        device = self._start.elapsed_time(self._end) * 1e3 if self._cuda else (launched - planned) * 1e6
        return {
            "gpu_us": device,
            "host_us": (launched - begin) * 1e6,
            "fill_us": (filled - begin) * 1e6,
            "plan_us": (planned - filled) * 1e6,
            "launch_us": (launched - planned) * 1e6,
        }

    def in_a_row(self, step: DecodeStep, series: BatchSeries) -> dict[str, float]:
        """Steps in a row, each ended by waiting for its output, as a server that reads the sampled tokens."""
        self._wait_idle()
        begin = time.perf_counter()
        for _ in range(STEPS_PER_SAMPLE):
            step.fill(series.next())
            step.plan()
            step.launch()
            if self._cuda:
                self._output[0].record()
                self._output[0].synchronize()
        return {"step_us": (time.perf_counter() - begin) / STEPS_PER_SAMPLE * 1e6}

    def overlapped(self, step: DecodeStep, series: BatchSeries) -> dict[str, float]:
        """Steps in a row, the next one prepared while this one runs; a step's output is read one step later.

        ``plan`` itself waits until the device has read what the step before staged.
        """
        self._wait_idle()
        begin = time.perf_counter()
        for i in range(2 * STEPS_PER_SAMPLE):
            step.fill(series.next())
            step.plan()
            step.launch()
            if self._cuda:
                self._output[i % 2].record()
                if i:
                    self._output[(i + 1) % 2].synchronize()
        self._wait_idle()
        return {"overlap_us": (time.perf_counter() - begin) / (2 * STEPS_PER_SAMPLE) * 1e6}

    def _wait_idle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


SETTLE_WINDOW_S = 0.3
SETTLE_LIMIT_S = 6.0
SETTLE_AGREEMENT = 0.05


def settle(step: DecodeStep, series: BatchSeries, clock: Clock) -> None:
    """Step until the median host time of two windows in a row differs by at most 5 %, or for 6 s."""
    began = time.perf_counter()
    before = 0.0
    while time.perf_counter() - began < SETTLE_LIMIT_S:
        window = time.perf_counter()
        host = []
        while time.perf_counter() - window < SETTLE_WINDOW_S:
            host.append(clock.alone(step, series)["host_us"])
        now = statistics.median(host)
        if abs(now - before) <= SETTLE_AGREEMENT * now:
            return
        before = now


Reading = Callable[[DecodeStep, BatchSeries], dict[str, float]]


def time_point(
    steps: Mapping[Execution, DecodeStep],
    series: BatchSeries,
    *,
    clock: Clock,
    measure: Measure,
    backend: str,
    attention: str,
) -> list[Point]:
    """One point per execution at the series' size and context, executions interleaved sample by sample."""
    sampled: dict[Execution, dict[str, Samples]] = {execution: {} for execution in steps}
    readings: list[tuple[Reading, tuple[Execution, ...]]] = [
        (clock.alone, tuple(steps)),
        (clock.in_a_row, tuple(steps)),
        (clock.overlapped, tuple(execution for execution in steps if execution == "graph")),
    ]
    for read, executions in readings:
        samplers: dict[Execution, dict[str, Sampler]] = {execution: {} for execution in executions}
        pending = list(executions)
        for execution in executions:
            read(steps[execution], series)  # warm-up
        while pending:
            for execution in list(pending):
                began = time.perf_counter()
                values = read(steps[execution], series)
                seconds = time.perf_counter() - began
                quantities = samplers[execution]
                for name, us in values.items():
                    quantities.setdefault(name, Sampler(measure)).add(us, seconds)
                # The first quantity of a reading decides; its companions come with it.
                stop = next(iter(quantities.values())).stop
                if stop is not None:
                    sampled[execution].update({name: sampler.samples(stop) for name, sampler in quantities.items()})
                    pending.remove(execution)
    return [
        Point(
            phase="decode",
            raw_size=series.size,
            padded_size=series.size,
            context_tokens=series.context,
            execution=execution,
            backend=backend if execution == "graph" else "eager",
            attention=attention,
            gpu_us=values.get("gpu_us"),
            host_us=values.get("host_us"),
            step_us=values.get("step_us"),
            plan_us=values.get("plan_us"),
            fill_us=values.get("fill_us"),
            launch_us=values.get("launch_us"),
            overlap_us=values.get("overlap_us"),
        )
        for execution, values in sampled.items()
    ]
