"""The host's part of steps, made steady over sizes.

A step is its device time and what the host does before and after. The device's part is repeatable and differs from
size to size, as kernels do. The host's part changes slowly with size, and a shared host moves it by more than
neighbouring sizes differ: left as measured it would let a list pad 16 requests to 17. So each size's host part is the
median of those of the sizes near it that were measured undisturbed, at the same context in the same process. What the
device takes longer in a row than alone, under its power cap, is in that part too. The device time of an eager step
holds its waits for launches.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import TypeVar

from graphtune.results import Execution
from graphtune.stats import Median, undisturbed

NEAR = 4
"""Requests by which sizes may differ and be near each other, however small they are."""

NEAR_SHARE = 0.25
"""The same as a share of the size."""

Key = TypeVar("Key", bound="tuple[Execution, int, int]")
ByProcess = Mapping[int, Median]


def steadied(steps: Mapping[Key, ByProcess], device: Mapping[Key, ByProcess]) -> dict[Key, dict[int, float]]:
    """Step times in µs that count, by (execution, context, size) and process, with a steady host part.

    A step counts by its undisturbed device time and the host part near it, however its own host part was disturbed;
    without either it counts as it was measured, and when it was disturbed, only where no other process has the point.
    """
    rests: dict[tuple[Execution, int, int], dict[int, float]] = defaultdict(dict)
    for key, by in steps.items():
        execution, context, size = key
        for process, us in _good(device.get(key, {})).items():
            if process in by and not by[process].disturbed:
                rests[execution, context, process][size] = by[process].us - us
    counting: dict[Key, dict[int, float]] = {}
    for key, by in steps.items():
        execution, context, size = key
        steady = {}
        for process, us in _good(device.get(key, {})).items():
            rest = _near(rests[execution, context, process], size) if process in by else None
            if rest is not None:
                steady[process] = us + rest
        left = {process: one for process, one in by.items() if process not in steady}
        counting[key] = steady | (_good(left) if steady else undisturbed(left))
    return counting


def only_disturbed(by: ByProcess, counting: Mapping[int, float]) -> bool:
    """Whether every figure that counts is a step as it was measured while something disturbed it."""
    return all(process in by and by[process] == Median(us, True) for process, us in counting.items())


def _good(by: ByProcess) -> dict[int, float]:
    return {process: one.us for process, one in by.items() if not one.disturbed}


def _near(rest: Mapping[int, float], size: int) -> float | None:
    """The median host part of the sizes near ``size``; None where none of them was measured undisturbed."""
    within = max(NEAR, NEAR_SHARE * size)
    near = [part for other, part in rest.items() if abs(other - size) <= within]
    return statistics.median(near) if near else None
