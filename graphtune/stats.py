"""Statistics derived from stored samples. Every figure that is shown names the one it is."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from graphtune.results import CellResult, Execution, Phase, Point, Samples

Time = Literal["gpu_us", "host_us", "step_us", "plan_us", "fill_us", "launch_us", "overlap_us"]

COMBINED = "median per process, mean over processes"
ASSUMED_NOISE = 0.01


class PointKey(NamedTuple):
    """What two points must share to measure the same thing."""

    phase: Phase
    raw_size: int
    padded_size: int
    context_tokens: int
    execution: Execution
    attention: str


def key_of(point: Point) -> PointKey:
    return PointKey(
        point.phase, point.raw_size, point.padded_size, point.context_tokens, point.execution, point.attention
    )


def median_us(samples: Samples | None) -> float | None:
    """Median of the stored samples; None where nothing was measured."""
    return statistics.median(samples.us) if samples is not None and samples.us else None


def spread_us(samples: Samples | None) -> tuple[float, float] | None:
    """First and third quartile of the stored samples."""
    if samples is None or not samples.us:
        return None
    if len(samples.us) == 1:
        return samples.us[0], samples.us[0]
    low, _, high = statistics.quantiles(samples.us, n=4, method="inclusive")
    return low, high


def process_medians(cells: Iterable[CellResult], time: Time = "step_us") -> dict[PointKey, dict[int, float]]:
    """Per point, the median of each process that measured it, by process number.

    Points that failed or lack this time are left out. Cells of one process number that share a point are averaged.
    """
    found: dict[PointKey, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        process = int(cell.cell.get("process", 1))
        for point in cell.points:
            median = median_us(getattr(point, time))
            if point.status == "ok" and median is not None:
                found[key_of(point)][process].append(median)
    return {key: {p: statistics.fmean(us) for p, us in by.items()} for key, by in found.items()}


def combined_us(by_process: dict[int, float]) -> float:
    """One figure for a point: the mean of its processes' medians, so that each process counts once."""
    return statistics.fmean(by_process.values())


@dataclass(frozen=True)
class Noise:
    """How far two processes of one sweep disagree about the same point, relative to their mean.

    ``relative`` is the difference that nine of ten points stay below. ``assumed`` when no point was measured by two
    processes: it is then 1 %.
    """

    relative: float
    assumed: bool
    points: int

    @property
    def words(self) -> str:
        """The tolerance and where it comes from, in one phrase."""
        if self.assumed:
            return f"{self.relative:.1%}, assumed: no point was measured by two processes"
        return f"{self.relative:.1%}: nine of ten medians of {self.points} points differ by less between two processes"


def noise_between_processes(cells: Iterable[CellResult], time: Time = "step_us") -> Noise:
    """Noise of a sweep from points that two or more of its processes measured."""
    differences = sorted(
        (max(by.values()) - min(by.values())) / combined_us(by)
        for by in process_medians(cells, time).values()
        if len(by) > 1 and combined_us(by) > 0
    )
    if not differences:
        return Noise(ASSUMED_NOISE, True, 0)
    if len(differences) == 1:
        return Noise(differences[0], False, 1)
    return Noise(statistics.quantiles(differences, n=10, method="inclusive")[-1], False, len(differences))
