"""Statistics derived from stored samples. Every figure that is shown names the one it is."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from graphtune.results import CellResult, Execution, Phase, Point, Samples

Time = Literal["gpu_us", "host_us", "step_us", "plan_us", "fill_us", "launch_us", "overlap_us"]

COMBINED = "median per process, geometric mean over processes"
STEADIED = "median per process, the host's part over sizes near each other, geometric mean over processes"
"""Of decode steps in a model: see tune/host_part."""
LEAST_TOLERANCE = 0.01
"""No two times are told apart that differ by less, and what is assumed where only one process measured."""


class PointKey(NamedTuple):
    """What two points must share to measure the same thing."""

    phase: Phase
    raw_size: int
    padded_size: int
    context_tokens: int
    execution: Execution
    attention: str
    backend: str
    requests: int | None


def key_of(point: Point) -> PointKey:
    return PointKey(
        point.phase,
        point.raw_size,
        point.padded_size,
        point.context_tokens,
        point.execution,
        point.attention,
        point.backend,
        point.requests,
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


class Median(NamedTuple):
    """The median of one process at one point. ``disturbed``: its samples carry a flag, as of a host slowed down."""

    us: float
    disturbed: bool


def all_medians(cells: Iterable[CellResult], time: Time = "step_us") -> dict[PointKey, dict[int, Median]]:
    """Per point, the median of each process that measured it, by process number, disturbed ones included.

    Points that failed or lack this time are left out. Cells of one process number that share a point are averaged.
    """
    found: dict[PointKey, dict[int, list[Median]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        process = int(cell.cell.get("process", 1))
        for point in cell.points:
            samples: Samples | None = getattr(point, time)
            median = median_us(samples)
            if point.status == "ok" and median is not None and samples is not None:
                found[key_of(point)][process].append(Median(median, bool(samples.flags)))
    return {
        key: {
            process: Median(statistics.fmean(one.us for one in same), any(one.disturbed for one in same))
            for process, same in by.items()
        }
        for key, by in found.items()
    }


def undisturbed(by_process: Mapping[int, Median]) -> dict[int, float]:
    """The medians that count: disturbed ones only when there are no others."""
    good = {process: one.us for process, one in by_process.items() if not one.disturbed}
    return good or {process: one.us for process, one in by_process.items()}


def process_medians(cells: Iterable[CellResult], time: Time = "step_us") -> dict[PointKey, dict[int, float]]:
    """Per point, the medians that count, by process number."""
    return {key: undisturbed(by) for key, by in all_medians(cells, time).items()}


def combined_us(by_process: Mapping[int, float]) -> float:
    """One figure for a point: the geometric mean of its processes' medians.

    Each process counts once, and one that is slower at everything changes no ratio of two figures.
    """
    return math.prod(by_process.values()) ** (1 / len(by_process))


@dataclass(frozen=True)
class Disturbances:
    """How many medians there are, how many of them are disturbed, and how many of those no process has undisturbed."""

    medians: int
    disturbed: int
    used: int


def disturbances(
    cells: Iterable[CellResult], time: Time = "step_us", execution: Execution | None = None
) -> Disturbances:
    """Disturbed medians of a sweep, of one execution or of both."""
    found = all_medians(cells, time)
    points = [by for key, by in found.items() if execution in (None, key.execution)]
    flagged = [sum(one.disturbed for one in by.values()) for by in points]
    used = sum(count for count, by in zip(flagged, points, strict=True) if count == len(by))
    return Disturbances(sum(map(len, points)), sum(flagged), used)


@dataclass(frozen=True)
class Ratio:
    """Expected time of one thing over another: combined, and within each process that measured both."""

    combined: float
    by_process: tuple[float, ...] = ()

    @property
    def assumed(self) -> bool:
        """True when there are no two processes whose disagreement would show the tolerance."""
        return len(self.by_process) < 2

    @property
    def tolerance(self) -> float:
        """How far the processes disagree about the ratio, at least 1 %."""
        return max(LEAST_TOLERANCE, max(self.by_process, default=0.0) - min(self.by_process, default=0.0))

    @property
    def faster(self) -> bool:
        """True when the first gains more than the tolerance in every process and combined: where figures of other
        processes stand in, the two may differ."""
        return all(1 - ratio > self.tolerance for ratio in (*self.by_process, self.combined))

    @property
    def leans(self) -> bool:
        """True when the first gains more than 1 % in all of them, however far the processes disagree about how much."""
        return all(1 - ratio > LEAST_TOLERANCE for ratio in (*self.by_process, self.combined))

    @property
    def slower(self) -> bool:
        """True when the first loses more than the tolerance in all of them."""
        return all(ratio - 1 > self.tolerance for ratio in (*self.by_process, self.combined))


@dataclass(frozen=True)
class Noise:
    """How far two processes of one sweep disagree about the device time of the same replay, relative to its figure.

    ``relative`` is the difference that nine of ten points stay below. ``assumed`` when no point was measured by two
    processes: it is then 1 %.
    """

    relative: float
    assumed: bool
    points: int

    @property
    def words(self) -> str:
        """What the figure says, in one phrase."""
        if self.assumed:
            return f"no point was measured by two processes, so {self.relative:.1%} is assumed"
        return f"nine in ten of {self.points} replays agree on gpu_us within {self.relative:.1%} between processes"


def differences(cells: Iterable[CellResult], time: Time, execution: Execution) -> list[float]:
    """Relative differences of the medians at points that two or more processes measured undisturbed, ascending."""
    points = [
        {process: one.us for process, one in by.items() if not one.disturbed}
        for key, by in all_medians(cells, time).items()
        if key.execution == execution
    ]
    return sorted(
        (max(by.values()) - min(by.values())) / combined_us(by) for by in points if len(by) > 1 and combined_us(by) > 0
    )


def noise_between_processes(cells: Iterable[CellResult]) -> Noise:
    """Noise of a sweep's replays."""
    apart = differences(cells, "gpu_us", "graph")
    if not apart:
        return Noise(LEAST_TOLERANCE, True, 0)
    return Noise(nine_of_ten(apart), False, len(apart))


def nine_of_ten(ascending: Sequence[float]) -> float:
    """The value that nine of ten stay below."""
    return statistics.quantiles(ascending, n=10, method="inclusive")[-1] if len(ascending) > 1 else ascending[0]
