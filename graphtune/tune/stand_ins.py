"""Figures for what a process did not measure undisturbed, from the processes that did."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from graphtune.stats import combined_us

K = TypeVar("K", bound=Hashable)


def with_stand_ins(known: Mapping[K, Mapping[int, float]], kind: Callable[[K], Hashable]) -> dict[K, dict[int, float]]:
    """``known`` (point to process to time) with a time for every process at every point.

    A time that is missing is that of the other processes, each scaled by how the process compares with it elsewhere:
    the median ratio over the points of the same kind that both measured, 1 where there are none. So a process that is
    slower at everything is slower here too, and no comparison within it leans either way.
    """
    processes = sorted({process for by in known.values() for process in by})
    scales: dict[tuple[Hashable, int, int], float] = {}

    def scale(of: Hashable, process: int, other: int) -> float:
        if (of, process, other) not in scales:
            both = [by for key, by in known.items() if kind(key) == of and process in by and other in by]
            scales[of, process, other] = statistics.median(by[process] / by[other] for by in both) if both else 1.0
        return scales[of, process, other]

    return {
        key: {
            process: by[process]
            if process in by
            else combined_us({other: us * scale(kind(key), process, other) for other, us in by.items()})
            for process in processes
        }
        for key, by in known.items()
    }
