"""Timing of decode steps: device time, host time, and steps in a row, sampled until a stop rule holds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch

from graphtune.plan import Measure
from graphtune.results import Execution, Point, Samples, StopRule
from graphtune.worker.nvml import POWER_CAP, Gpu
from graphtune.worker.runners.decode import DecodeStep
from graphtune.worker.runners.series import BatchSeries

STORED = 20
STEPS_IN_A_ROW = 4
STEPS_OVERLAPPED = 9
MAX_SAMPLES = 200
MAX_REPEATS = 2
SLOW = 1.25
DELAY_CYCLES = 600_000  # 0.3 ms at 2 GHz, longer than launching a graph takes


@dataclass
class Sampler:
    """Collects samples of one quantity and says when to stop.

    ``noise``: standard deviation over mean at or below ``measure.noise`` with at least ``min_samples``. ``time``:
    ``max_seconds`` of sampling spent, again with at least ``min_samples``. ``count``: MAX_SAMPLES taken.
    """

    measure: Measure
    us: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, us: list[float], seconds: float) -> None:
        self.us += us
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


class HostPace:
    """Tells whether the host runs at the speed it has shown before.

    On shared machines a host falls to half its speed for a second or more at a time (seen on the H200's machine:
    eager steps of 5 and 9 ms in turn), and an eager step is host time. A fixed piece of Python is timed around every
    reading; one that takes over SLOW times the fastest so far means that somebody else has the core.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._fastest = math.inf
        for _ in range(20):
            self.slowdown()

    def slowdown(self) -> float:
        """Time of the fixed piece now over its fastest time so far."""
        now = min(self._spin() for _ in range(3))
        self._fastest = min(self._fastest, now)
        return now / self._fastest

    def wait(self) -> None:
        """Return once the host is fast, or when this process has waited ``patience_s`` in all."""
        while self._patience_s > 0 and self.slowdown() > SLOW:
            began = time.perf_counter()
            time.sleep(0.02)
            self._patience_s -= time.perf_counter() - began

    def worth_repeating(self) -> bool:
        """True when the host was slowed down just now and there is patience left to try again."""
        return self._patience_s > 0 and self.slowdown() > SLOW

    @staticmethod
    def _spin() -> float:
        began = time.perf_counter()
        total = 0
        for i in range(4000):
            total += i
        return time.perf_counter() - began


class Clock:
    """Times one step on a device. On the CPU the device time is the wall time of the forward.

    ``delay``: a replay is one launch, so a short spin kernel goes before it and its events bracket device work alone;
    without it they would count the launch's host time, which is part of ``host_us``. An eager forward is timed without
    the delay: waiting for launches is what it does.
    """

    def __init__(self, device: torch.device, gpu: Gpu | None = None) -> None:
        self._gpu = gpu
        self._cuda = device.type == "cuda"
        self.pace = HostPace(10.0 if self._cuda else 0.0)
        if self._cuda:
            self._start = torch.cuda.Event(enable_timing=True)
            self._end = torch.cuda.Event(enable_timing=True)
            self._output = (torch.cuda.Event(), torch.cuda.Event())

    def alone(self, step: DecodeStep, series: BatchSeries, *, delay: bool = True) -> dict[str, list[float]]:
        """One step with the device idle before: gpu, host and the host's parts, in µs."""
        self._wait_idle()
        begin = time.perf_counter()
        step.fill(series.middle)
        filled = time.perf_counter()
        step.plan()
        planned = time.perf_counter()
        if self._cuda:
            if delay:
                torch.cuda._sleep(DELAY_CYCLES)
            self._start.record()
        launching = time.perf_counter()
        step.launch()
        launched = time.perf_counter()
        if self._cuda:
            self._end.record()
        self._wait_idle()
        launch_us = (launched - launching) * 1e6
        return {
            "gpu_us": [self._start.elapsed_time(self._end) * 1e3 if self._cuda else launch_us],
            "host_us": [(planned - begin) * 1e6 + launch_us],
            "fill_us": [(filled - begin) * 1e6],
            "plan_us": [(planned - filled) * 1e6],
            "launch_us": [launch_us],
        }

    def disturbances(self) -> tuple[str, ...]:
        """What is wrong now. A power cap is not: a server under this load runs into it too."""
        slowdown = self.pace.slowdown()
        host = (f"host slowed down {slowdown:.1f}x",) if slowdown > SLOW else ()
        throttled = () if self._gpu is None else self._gpu.throttle_reasons()
        return (*host, *(reason for reason in throttled if reason != POWER_CAP))

    def in_a_row(self, step: DecodeStep, series: BatchSeries) -> dict[str, list[float]]:
        """Steps in a row, each ended by waiting for its output, as a server that reads the sampled tokens. One sample
        per step, from the end of the step before to its own end."""
        self._wait_idle()
        times = [time.perf_counter()]
        for _ in range(STEPS_IN_A_ROW):
            step.fill(series.next())
            step.plan()
            step.launch()
            if self._cuda:
                self._output[0].record()
                self._output[0].synchronize()
            times.append(time.perf_counter())
        return {"step_us": _intervals_us(times)}

    def overlapped(self, step: DecodeStep, series: BatchSeries) -> dict[str, list[float]]:
        """Steps in a row, the next one prepared while this one runs: a step's output is read after the next one's
        launch. One sample per step, between two outputs.

        ``plan`` itself waits until the device has read what the step before staged.
        """
        self._wait_idle()
        times = []
        for i in range(STEPS_OVERLAPPED):
            step.fill(series.next())
            step.plan()
            step.launch()
            if self._cuda:
                self._output[i % 2].record()
                if i:
                    self._output[(i + 1) % 2].synchronize()
            times.append(time.perf_counter())
        self._wait_idle()
        # The first two ends come before the pipeline is full.
        return {"overlap_us": _intervals_us(times[1:])}

    def _wait_idle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


Reading = Callable[[DecodeStep, BatchSeries], dict[str, list[float]]]
Executions = Mapping[Execution, DecodeStep]


def _intervals_us(times: list[float]) -> list[float]:
    return [(after - before) * 1e6 for before, after in pairwise(times)]


def _each(read: Reading, steps: Executions) -> dict[Execution, Callable[[BatchSeries], dict[str, list[float]]]]:
    return {execution: partial(read, step) for execution, step in steps.items()}


def _sample(
    reading: Mapping[Execution, Callable[[BatchSeries], dict[str, list[float]]]], series: BatchSeries, measure: Measure
) -> dict[Execution, dict[str, Samples]]:
    """Take samples of a reading, executions in turn, until its first quantity stops; the others come with it."""
    samplers: dict[Execution, dict[str, Sampler]] = {execution: {} for execution in reading}
    taken: dict[Execution, dict[str, Samples]] = {}
    while len(taken) < len(reading):
        for execution, read in reading.items():
            if execution in taken:
                continue
            began = time.perf_counter()
            values = read(series)
            seconds = time.perf_counter() - began
            quantities = samplers[execution]
            for name, us in values.items():
                quantities.setdefault(name, Sampler(measure)).add(us, seconds)
            stop = next(iter(quantities.values())).stop
            if stop is not None:
                taken[execution] = {name: sampler.samples(stop) for name, sampler in quantities.items()}
    return taken


def time_point(
    steps: Executions,
    series: BatchSeries,
    *,
    clock: Clock,
    measure: Measure,
    backend: str,
    attention: str,
) -> list[Point]:
    """One point per execution at the series' size and context, executions interleaved sample by sample."""
    sampled: dict[Execution, dict[str, Samples]] = {execution: {} for execution in steps}
    for step in steps.values():
        clock.alone(step, series)  # warm-up
    graph: Executions = {execution: step for execution, step in steps.items() if execution == "graph"}
    eager: Executions = {execution: step for execution, step in steps.items() if execution == "eager"}
    for reading in (
        {**_each(clock.alone, graph), **_each(partial(clock.alone, delay=False), eager)},
        _each(clock.in_a_row, steps),
        _each(clock.overlapped, graph),
    ):
        clock.pace.wait()
        taken = _sample(reading, series, measure)
        for _ in range(MAX_REPEATS):
            if not clock.pace.worth_repeating():
                break
            clock.pace.wait()
            taken = _sample(reading, series, measure)
        flags = clock.disturbances()
        for execution, quantities in taken.items():
            sampled[execution].update({name: replace(kept, flags=flags) for name, kept in quantities.items()})
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
