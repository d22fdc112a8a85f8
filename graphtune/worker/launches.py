"""Kernel launches of one step: how many, how long they run, and how much of the step the device idles between them."""

from __future__ import annotations

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from graphtune.results import Execution, LaunchProfile
from graphtune.worker.runners.decode import DecodeStep
from graphtune.worker.runners.series import BatchSeries


def profile_step(step: DecodeStep, series: BatchSeries, *, execution: Execution) -> LaunchProfile:
    """Profile the launch part of one step on the GPU, metadata and fill apart.

    ``span_us`` runs from the first kernel's start to the last one's end; the idle share is what kernels do not cover.
    """
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
    kernels = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )
    if not kernels:
        raise RuntimeError("the profiler saw no kernels; is another profiler attached to this process?")
    busy, reached = 0.0, kernels[0][0]
    for start, end in kernels:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    span = reached - kernels[0][0]
    return LaunchProfile(
        size=series.size,
        context_tokens=series.context,
        execution=execution,
        launches=len(kernels),
        kernel_us=round(busy, 2),
        span_us=round(span, 2),
        idle_share=round(1.0 - busy / span, 4),
    )
