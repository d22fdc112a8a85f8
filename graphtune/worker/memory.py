"""The memory ledger: device memory at named moments, read twice by independent means.

On the CPU only the tape's pool is read; the other figures are None.
"""

from __future__ import annotations

import gc
import time

import torch

from graphtune.plan import CaptureLimit
from graphtune.results import Mark, MemoryLedger
from graphtune.units import format_bytes
from graphtune.worker.nvml import Gpu

DISAGREEMENT_LIMIT_BYTES = 16 << 20

UNEVENTFUL = ("before_list", "measured")
"""Stages that end an interval in which nothing may grow outside torch. Every other stage has a cause with a name:
context creation, loading of modules and libraries (kernels of a new kind run first during eager warm-up), graph
executables, what a first replay uploads, the profiler, what teardown leaves."""


class Ledger:
    """Takes marks. Make it before the CUDA context exists: the device's free bytes then are the baseline."""

    def __init__(self, gpu: Gpu | None) -> None:
        self._gpu = gpu
        self._free_before = gpu.free_bytes() if gpu else None
        self._used_before = gpu.used_bytes() if gpu else None
        self._started = time.perf_counter()
        self.marks: list[Mark] = []

    def mark(self, stage: str, *, list_index: int | None = None, size: int | None = None, pool_bytes: int = 0) -> Mark:
        """Read memory after synchronise, garbage collection and emptying torch's cache."""
        gc.collect()
        if self._gpu is None:
            mark = Mark(stage, list_index, size, None, None, pool_bytes, None, None, None, self._at())
        else:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
            assert self._free_before is not None and self._used_before is not None
            mark = Mark(
                stage=stage,
                list_index=list_index,
                size=size,
                torch_allocated_bytes=torch.cuda.memory_allocated(),
                torch_reserved_bytes=torch.cuda.memory_reserved(),
                pool_bytes=pool_bytes,
                nvml_process_bytes=self._gpu.process_bytes(),
                nvml_device_bytes=self._gpu.used_bytes() - self._used_before,
                free_delta_bytes=self._free_before - free,
                at_s=self._at(),
            )
        self.marks.append(mark)
        return mark

    def _at(self) -> float:
        return round(time.perf_counter() - self._started, 4)

    def summary(self) -> MemoryLedger:
        """Marks with the largest disagreement of the two readings and the bytes that nothing listed explains."""
        if self._gpu is None:
            return MemoryLedger(tuple(self.marks), "none", None, None)
        by_process = all(mark.nvml_process_bytes is not None for mark in self.marks)
        gaps = [abs(second_reading(mark, by_process) - (mark.free_delta_bytes or 0)) for mark in self.marks]
        disagreement = max(gaps, default=0)
        growth = sum(
            max(0, outside_torch(after) - outside_torch(before))
            for before, after in zip(self.marks, self.marks[1:], strict=False)
            if after.stage in UNEVENTFUL
        )
        return MemoryLedger(
            tuple(self.marks), "nvml_process" if by_process else "nvml_device", disagreement, growth + disagreement
        )


def refusal(limit: CaptureLimit | None, mark: Mark) -> str | None:
    """Why captures that need what ``limit`` says must not begin at ``mark``; None when they may, or on a CPU."""
    if limit is None or mark.free_delta_bytes is None:
        return None
    short = mark.free_delta_bytes + limit.needed_bytes - limit.device_bytes
    if short <= 0:
        return None
    held, needed, allowed = map(format_bytes, (mark.free_delta_bytes, limit.needed_bytes, limit.device_bytes))
    return (
        f"nothing was captured: the process holds {held} and captures need {needed} at their peak, "
        f"{format_bytes(short)} more than the {allowed} it may use"
    )


def second_reading(mark: Mark, by_process: bool) -> int:
    """The NVML figure of a mark: the process's bytes, or the device's growth where processes are hidden."""
    value = mark.nvml_process_bytes if by_process else mark.nvml_device_bytes
    assert value is not None
    return value


def in_torch(mark: Mark) -> int:
    """Device bytes of a mark that torch's allocator owns; on the CPU the bytes of the graph pool."""
    return mark.pool_bytes if mark.torch_reserved_bytes is None else mark.torch_reserved_bytes


def outside_torch(mark: Mark) -> int:
    """Device bytes of a mark that torch's allocator does not own."""
    assert mark.free_delta_bytes is not None and mark.torch_reserved_bytes is not None
    return mark.free_delta_bytes - mark.torch_reserved_bytes


def device_bytes(mark: Mark) -> int:
    """Device bytes in use at a mark: the fall of free bytes; on the CPU the bytes of the graph pool."""
    return mark.pool_bytes if mark.free_delta_bytes is None else mark.free_delta_bytes
