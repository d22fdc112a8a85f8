"""One profiled step: its kernels, how long they run, what launched them, and how much the device idles in between."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from graphtune.results import Execution, LaunchProfile, Timeline
from graphtune.worker.timing import Series, Step

MOST_KERNELS = 512
"""Kernels that a timeline keeps: enough for a whole decode step of some 30 layers."""

LAUNCH_CALL = re.compile(r"cu(da)?(Launch\w*Kernel|GraphLaunch|Memcpy\w*Async|Memset\w*Async)")
"""Host calls that put work on a stream, as CUPTI names them."""


@dataclass(frozen=True)
class Span:
    """A kernel or a host call, in µs of the profiler's clock."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class StepTrace:
    """What the profiler saw of one step; both in order of their starts."""

    kernels: tuple[Span, ...]
    calls: tuple[Span, ...]

    @property
    def graph_launches(self) -> int:
        """Graphs that the host launched."""
        return sum("GraphLaunch" in call.name for call in self.calls)

    @property
    def kernel_launches(self) -> int:
        """Kernels, copies and fills that the host launched one by one."""
        return len(self.calls) - self.graph_launches

    def profile(self, size: int, context_tokens: int, execution: Execution) -> LaunchProfile:
        """``span_us`` runs from the first kernel's start to the last one's end; idle is what kernels do not cover."""
        busy, reached = 0.0, self.kernels[0].start_us
        for kernel in self.kernels:
            busy += max(0.0, kernel.end_us - max(kernel.start_us, reached))
            reached = max(reached, kernel.end_us)
        span = reached - self.kernels[0].start_us
        return LaunchProfile(
            size=size,
            context_tokens=context_tokens,
            execution=execution,
            launches=len(self.kernels),
            kernel_us=round(busy, 2),
            span_us=round(span, 2),
            idle_share=round(1.0 - busy / span, 4),
        )

    def timeline(
        self, size: int, context_tokens: int, execution: Execution, most_kernels: int = MOST_KERNELS
    ) -> Timeline:
        """The first kernels and the calls up to the last of them, each name stored once."""
        shown = self.kernels[:most_kernels]
        calls = [call for call in self.calls if call.start_us <= shown[-1].start_us]
        zero = min(span.start_us for span in (*shown[:1], *calls[:1]))
        names = tuple(dict.fromkeys(kernel.name for kernel in shown))
        index = {name: at for at, name in enumerate(names)}
        return Timeline(
            size=size,
            context_tokens=context_tokens,
            execution=execution,
            names=names,
            kernels=tuple(index[kernel.name] for kernel in shown),
            starts_us=_starts(shown, zero),
            lengths_us=_lengths(shown),
            call_starts_us=_starts(calls, zero),
            call_lengths_us=_lengths(calls),
            left_out=len(self.kernels) - len(shown),
        )


def trace_step(step: Step, series: Series) -> StepTrace:
    """Profile the launch part of one step on the GPU, metadata and fill apart."""
    for _ in range(2):
        step.fill(series.middle)
        step.plan()
        step.launch()
    step.fill(series.middle)
    step.plan()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step.launch()
        torch.cuda.synchronize()
    return read_events(profiler.events())


def read_events(events: Iterable[Any]) -> StepTrace:
    """Kernels and launching calls among a profiler's events. Raises RuntimeError where there is no kernel.

    A call within another one is the driver's side of the same launch and not counted again.
    """
    kernels: list[Span] = []
    calls: list[Span] = []
    for event in events:
        span = Span(event.name, event.time_range.start, event.time_range.end)
        if event.device_type == DeviceType.CUDA:
            kernels.append(span)
        elif LAUNCH_CALL.match(event.name):
            calls.append(span)
    if not kernels:
        raise RuntimeError("the profiler saw no kernels; is another profiler attached to this process?")
    kernels.sort(key=lambda span: (span.start_us, span.end_us))
    calls.sort(key=lambda span: (span.start_us, -span.end_us))
    outer: list[Span] = []
    for call in calls:
        if not outer or call.start_us >= outer[-1].end_us:
            outer.append(call)
    return StepTrace(tuple(kernels), tuple(outer))


def _starts(spans: Iterable[Span], zero: float) -> tuple[float, ...]:
    return tuple(round(span.start_us - zero, 2) for span in spans)


def _lengths(spans: Iterable[Span]) -> tuple[float, ...]:
    return tuple(round(span.end_us - span.start_us, 2) for span in spans)
