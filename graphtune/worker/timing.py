"""Timing of steps: device time, host time, and steps in a row, sampled until a stop rule holds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch

from graphtune.plan import Measure
from graphtune.results import Execution, Point, Samples, StopRule
from graphtune.worker.disturbance import HOST, PATIENCE_S, Watch
from graphtune.worker.nvml import Gpu
from graphtune.worker.runners.series import BatchSeries, PrefillSeries

STORED = 20
WARM_UP_TO = 1024
SETTLE_S = 0.05
STEPS_IN_A_ROW = 4
STEPS_OVERLAPPED = 9
MAX_SAMPLES = 200
PATIENT = 2
PADDED_SAMPLES, PADDED_SHARE = 3, 1 / 6  # of max_seconds: device time alone differs by some tenths of a percent
DELAY_CYCLES = 600_000  # 0.3 ms at 2 GHz, longer than launching a graph takes


class Step(Protocol):
    """One step, decode or prefill, in the three host parts that are timed apart."""

    def fill(self, live: Any) -> None:
        """Copy the step's inputs into the static buffers."""

    def plan(self) -> None:
        """The attention backend's out-of-graph half."""

    def launch(self) -> torch.Tensor:
        """Launch the forward; returns logits."""


class Series(Protocol):
    """Batches of one shape to step through."""

    @property
    def middle(self) -> Any:
        """The batch that stands for the series."""

    def next(self) -> Any:
        """The batch of the next step."""


@dataclass
class Sampler:
    """Collects samples of one quantity and says when to stop. Disturbed samples are kept apart.

    ``noise``: standard deviation over mean at or below ``measure.noise`` with at least ``min_samples``. ``time``:
    ``max_seconds`` of sampling spent, again with at least ``min_samples``; where disturbed ones are among them, only
    after PATIENT times as long. ``count``: MAX_SAMPLES taken.
    """

    measure: Measure
    us: list[float] = field(default_factory=list)
    disturbed_us: list[float] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)
    seconds: float = 0.0

    def add(self, us: list[float], seconds: float, disturbances: tuple[str, ...] = ()) -> None:
        (self.disturbed_us if disturbances else self.us).extend(us)
        self.reasons.update(disturbances)
        self.seconds += seconds

    @property
    def _least(self) -> int:
        return max(2, self.measure.min_samples)

    @property
    def stop(self) -> StopRule | None:
        if len(self.us) >= self._least and _spread(self.us) <= self.measure.noise:
            return "noise"
        if self.taken >= self._least and self.enough and self.seconds >= self.measure.max_seconds:
            return "time"
        return "count" if self.taken >= MAX_SAMPLES else None

    @property
    def taken(self) -> int:
        return len(self.us) + len(self.disturbed_us)

    @property
    def enough(self) -> bool:
        """True with enough undisturbed samples, or when patience has run out."""
        spent = self.seconds >= PATIENT * self.measure.max_seconds or self.taken >= MAX_SAMPLES
        return spent or len(self.us) >= self._least

    def samples(self, stop: StopRule) -> Samples:
        """The undisturbed samples; where there are too few of them all samples, with a flag for each disturbance."""
        if len(self.us) >= self._least:
            return Samples(_stored(self.us), self.taken, stop, disturbed_us=_stored(self.disturbed_us))
        return Samples(_stored([*self.us, *self.disturbed_us]), self.taken, stop, flags=tuple(sorted(self.reasons)))


def _spread(us: list[float]) -> float:
    """Standard deviation over mean, after every sample: ``statistics.stdev`` would take as long as a short step."""
    mean = statistics.fmean(us)
    return math.sqrt(sum((one - mean) ** 2 for one in us) / (len(us) - 1)) / mean if mean else math.inf


def _stored(us: list[float]) -> tuple[float, ...]:
    stride = max(1, -(-len(us) // STORED))
    return tuple(round(one, 2) for one in us[::stride])


class Clock:
    """Times one step on a device. On the CPU the device time is the wall time of the forward.

    ``delay``: a replay is one launch, so a short spin kernel goes before it and its events bracket device work alone;
    without it they would count the launch's host time, which is part of ``host_us``. An eager forward is timed without
    the delay: waiting for launches is what it does.
    """

    def __init__(self, device: torch.device, gpu: Gpu | None = None) -> None:
        self._cuda = device.type == "cuda"
        self.watch = Watch(gpu, PATIENCE_S if self._cuda else 0.0)
        if self._cuda:
            self._start = torch.cuda.Event(enable_timing=True)
            self._end = torch.cuda.Event(enable_timing=True)
            self._output = (torch.cuda.Event(), torch.cuda.Event())

    def alone(self, step: Step, series: Series, *, delay: bool = True) -> dict[str, list[float]]:
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

    def device_alone(self, backend: str) -> Collection[tuple[Execution, str]]:
        """What ``alone`` reads with a delay and holds nothing of the host: on a GPU a full graph is one launch, which
        has returned before the delay ends."""
        return {("graph", "gpu_us")} if self._cuda and backend == "full" else ()

    def whole(self, step: Step, series: Series) -> dict[str, list[float]]:
        """One step with the device idle before, its output waited for: all times of the same run, in µs."""
        self._wait_idle()
        begin = time.perf_counter()
        step.fill(series.next())
        filled = time.perf_counter()
        step.plan()
        planned = time.perf_counter()
        if self._cuda:
            self._start.record()
        launching = time.perf_counter()
        step.launch()
        launched = time.perf_counter()
        if self._cuda:
            self._end.record()
            self._end.synchronize()
        ended = time.perf_counter()
        launch_us = (launched - launching) * 1e6
        return {
            "step_us": [(ended - begin) * 1e6],
            "gpu_us": [self._start.elapsed_time(self._end) * 1e3 if self._cuda else launch_us],
            "host_us": [(planned - begin) * 1e6 + launch_us],
            "fill_us": [(filled - begin) * 1e6],
            "plan_us": [(planned - filled) * 1e6],
            "launch_us": [launch_us],
        }

    def in_a_row(self, step: Step, series: Series) -> dict[str, list[float]]:
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

    def overlapped(self, step: Step, series: Series) -> dict[str, list[float]]:
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


Reading = Callable[[Step, Series], dict[str, list[float]]]
Executions = Mapping[Execution, Step]


def _intervals_us(times: list[float]) -> list[float]:
    return [(after - before) * 1e6 for before, after in pairwise(times)]


def _each(read: Reading, steps: Executions) -> dict[Execution, Callable[[Series], dict[str, list[float]]]]:
    return {execution: partial(read, step) for execution, step in steps.items()}


def sample(
    reading: Mapping[Execution, Callable[[Series], dict[str, list[float]]]],
    series: Series,
    measure: Measure,
    watch: Watch,
    device_alone: Collection[tuple[Execution, str]] = (),
) -> dict[Execution, dict[str, Samples]]:
    """Take samples of a reading, executions in turn, until its first quantity stops; the others come with it.

    A sample counts as disturbed when something is wrong before or after it; the next one then waits for a quiet host.
    ``device_alone`` are quantities that hold nothing of the host, so that a slow one does not disturb them. While any
    quantity lacks undisturbed samples there is patience for more.
    """
    samplers: dict[Execution, dict[str, Sampler]] = {execution: {} for execution in reading}
    taken: dict[Execution, dict[str, Samples]] = {}
    watch.wait()
    before = watch.now()
    while len(taken) < len(reading):
        for execution, read in reading.items():
            if execution in taken:
                continue
            began = time.perf_counter()
            values = read(series)
            seconds = time.perf_counter() - began
            after = watch.now()
            quantities = samplers[execution]
            for name, us in values.items():
                found = before + after
                if (execution, name) in device_alone:
                    found = tuple(one for one in found if one != HOST)
                quantities.setdefault(name, Sampler(measure)).add(us, seconds, found)
            if after:
                watch.wait()
                after = watch.now()
            before = after
            stop = next(iter(quantities.values())).stop
            if stop is not None and all(sampler.enough for sampler in quantities.values()):
                taken[execution] = {name: sampler.samples(stop) for name, sampler in quantities.items()}
    return taken


def time_decode(
    steps: Executions,
    series: BatchSeries,
    *,
    clock: Clock,
    measure: Measure,
    backend: str,
    attention: str,
) -> list[Point]:
    """One point per execution at the series' size and context, executions interleaved sample by sample.

    The seconds that ``measure`` allows are those of a point, shared by its readings.
    """
    sampled: dict[Execution, dict[str, Samples]] = {execution: {} for execution in steps}
    # Steps in a row for a while: under a load that runs into its power cap a GPU lowers its clock, and a step timed
    # before that would be faster than any that a server sees.
    loaded_until = time.perf_counter() + SETTLE_S
    for step in steps.values():
        clock.in_a_row(step, series)
    while time.perf_counter() < loaded_until:
        for step in steps.values():
            clock.in_a_row(step, series)
    graph: Executions = {execution: step for execution, step in steps.items() if execution == "graph"}
    eager: Executions = {execution: step for execution, step in steps.items() if execution == "eager"}
    readings = (
        {**_each(clock.alone, graph), **_each(partial(clock.alone, delay=False), eager)},
        _each(clock.in_a_row, steps),
        _each(clock.overlapped, graph),
    )
    share = replace(measure, max_seconds=measure.max_seconds / len(readings))
    for reading in readings:
        found = sample(reading, series, share, clock.watch, clock.device_alone(backend))
        for execution, quantities in found.items():
            sampled[execution].update(quantities)
    size = series.size
    return [
        _point(
            execution,
            values,
            phase="decode",
            raw_size=size,
            padded_size=size,
            context_tokens=series.context,
            backend=backend,
            attention=attention,
        )
        for execution, values in sampled.items()
    ]


def time_padded(
    step: Step, series: BatchSeries, *, padded_size: int, clock: Clock, measure: Measure, backend: str, attention: str
) -> Point:
    """The point of the series' steps replayed in the bucket ``padded_size``: its device time, and no other."""

    def device_time(series: Series) -> dict[str, list[float]]:
        return {"gpu_us": clock.alone(step, series)["gpu_us"]}

    clock.in_a_row(step, series)
    few = replace(measure, min_samples=PADDED_SAMPLES, max_seconds=PADDED_SHARE * measure.max_seconds)
    found = sample({"graph": device_time}, series, few, clock.watch, clock.device_alone(backend))
    return _point(
        "graph",
        found["graph"],
        phase="decode",
        raw_size=series.size,
        padded_size=padded_size,
        context_tokens=series.context,
        backend=backend,
        attention=attention,
    )


def time_prefill(
    steps: Executions,
    series: PrefillSeries,
    *,
    padded_tokens: int,
    clock: Clock,
    measure: Measure,
    backend: str,
    attention: str,
) -> list[Point]:
    """One point per execution for the series' prefills, executions interleaved sample by sample.

    Eager runs the real tokens, the graph ``padded_tokens``. Prefills above ``WARM_UP_TO`` tokens are not warmed up: a
    first launch that loads something is a small part of them, and one of at least three samples.
    """
    if series.tokens <= WARM_UP_TO:
        for step in steps.values():
            clock.whole(step, series)
    sampled = sample(_each(clock.whole, steps), series, measure, clock.watch)
    return [
        _point(
            execution,
            values,
            phase="prefill",
            raw_size=series.tokens,
            padded_size=padded_tokens if execution == "graph" else series.tokens,
            context_tokens=series.prefix_tokens,
            backend=backend,
            attention=attention,
            requests=series.requests,
        )
        for execution, values in sampled.items()
    ]


def _point(execution: Execution, values: Mapping[str, Samples], *, backend: str, **of: Any) -> Point:
    """The point of one execution; quantities that were not sampled are null. ``of`` are the other fields of a Point."""
    times: dict[str, Any] = {"gpu_us": None, "host_us": None, "step_us": None, **values}
    return Point(execution=execution, backend=backend if execution == "graph" else "eager", **of, **times)
