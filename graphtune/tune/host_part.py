"""The host's part of replayed steps, made steady over sizes.

A replay's step is its device time and what the host does before and after. The device's part is repeatable and differs
from size to size, as kernels do. The host's part changes slowly with size, and a shared host moves it by more than
neighbouring sizes differ: left as measured it would let a list pad 16 requests to 17. So each size's host part is the
median of those of the sizes near it, at the same context in the same process. What the device takes longer in a row
than alone, under its power cap, is in that part too.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import TypeVar

from graphtune.results import Execution

NEAR = 4
"""Requests by which sizes may differ and be near each other, however small they are."""

NEAR_SHARE = 0.25
"""The same as a share of the size."""

Key = TypeVar("Key", bound="tuple[Execution, int, int]")
ByProcess = Mapping[int, float]


def steadied(steps: Mapping[Key, ByProcess], device: Mapping[Key, ByProcess]) -> dict[Key, dict[int, float]]:
    """Step times in µs by (execution, context, size) and process, replays with their host part made steady.

    ``device`` holds device times; a step without one stays as it is, and so do eager steps, which are the host's.
    """
    rests: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    replayed: dict[tuple[Key, int], float] = {}
    for key, by in steps.items():
        execution, context, size = key
        if execution == "graph":
            for process in by.keys() & device.get(key, {}).keys():
                replayed[key, process] = device[key][process]
                rests[context, process][size] = by[process] - device[key][process]
    steady = {key: dict(by) for key, by in steps.items()}
    for (key, process), device_us in replayed.items():
        _, context, size = key
        steady[key][process] = device_us + _near(rests[context, process], size)
    return steady


def _near(rest: Mapping[int, float], size: int) -> float:
    within = max(NEAR, NEAR_SHARE * size)
    return statistics.median(part for other, part in rest.items() if abs(other - size) <= within)
