"""Ratios with intervals. The process is the unit: samples of one process agree with each other far too well.

Everything is computed on logarithms, so that swapping the two sweeps mirrors every verdict. A row's ratio is the
difference of the means of its processes' values; its variance is pooled over the rows of a group (one phase, execution
and quantity), as single rows have too few processes to show it. Rows of one process are not independent: a process that
is slow is often slow in all of them. So the degrees of freedom of a pooled variance follow Satterthwaite (Biometrics
Bulletin 2, 1946), from the part of it that processes have in common and the rest. They lie between those of the
processes alone and those of all rows. A row that is far noisier than its group (F test, 1 %) keeps its own variance.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

NOISIER = 0.01
"""Probability at which a row counts as noisier than its group."""
LARGEST_LOG = 300.0
"""Bounds beyond e^300 say nothing more and would overflow."""


@dataclass(frozen=True)
class Pair:
    """Logarithms of one row's values by process, for both sides. Processes of the two sides share no numbering."""

    base: Mapping[int, float]
    new: Mapping[int, float]

    @property
    def difference(self) -> float:
        return fmean(self.new.values()) - fmean(self.base.values())

    @property
    def residuals(self) -> dict[tuple[str, int], float]:
        """Deviation from the side's mean by (side, process)."""
        found: dict[tuple[str, int], float] = {}
        for side, values in (("base", self.base), ("new", self.new)):
            mean = fmean(values.values())
            found |= {(side, process): value - mean for process, value in values.items()}
        return found

    @property
    def freedom(self) -> int:
        return len(self.base) + len(self.new) - 2

    @property
    def sum_of_squares(self) -> float:
        return math.fsum(r * r for r in self.residuals.values())


@dataclass(frozen=True)
class Variance:
    """Of one process's value around its side's mean, relative; with its degrees of freedom."""

    value: float
    freedom: float


@dataclass(frozen=True)
class Interval:
    """Logarithm of a ratio and its corrected bounds."""

    middle: float
    low: float
    high: float

    @property
    def ratio(self) -> tuple[float, float, float]:
        """The ratio, its lower and its upper bound."""
        bounded = (min(max(value, -LARGEST_LOG), LARGEST_LOG) for value in (self.middle, self.low, self.high))
        middle, low, high = (math.exp(value) for value in bounded)
        return middle, low, high


def pooled_variance(pairs: Sequence[Pair]) -> Variance | None:
    """Variance between processes pooled over rows; None where no row has two processes on a side."""
    freedom = sum(pair.freedom for pair in pairs)
    if freedom == 0:
        return None
    by_process: dict[tuple[str, int], list[float]] = defaultdict(list)
    for pair in pairs:
        for key, residual in pair.residuals.items():
            by_process[key].append(residual)
    total = math.fsum(pair.sum_of_squares for pair in pairs)
    common = math.fsum(math.fsum(some) ** 2 / len(some) for some in by_process.values())
    sides = {side for side, _ in by_process}
    # A lone process of a side has no deviation and shows nothing.
    of_processes = min(max(1, len(by_process) - len(sides)), freedom)
    rest, of_rest = max(0.0, total - common), freedom - of_processes
    if total == 0 or of_rest == 0:
        return Variance(total / freedom, float(of_processes))
    effective = total**2 / (common**2 / of_processes + rest**2 / of_rest)
    return Variance(total / freedom, min(max(effective, float(of_processes)), float(freedom)))


def intervals(groups: Mapping[str, Sequence[Pair]], confidence: float) -> dict[str, list[Interval | None]]:
    """Corrected intervals of the rows of every group; None for the rows of a group whose noise is not known.

    The error probability ``1 - confidence`` is divided by the number of rows that get an interval (Bonferroni).
    """
    from scipy import stats

    variances = {name: pooled_variance(pairs) for name, pairs in groups.items()}
    tested = sum(len(groups[name]) for name, variance in variances.items() if variance is not None)
    found: dict[str, list[Interval | None]] = {}
    for name, pairs in groups.items():
        pooled = variances[name]
        if pooled is None:
            found[name] = [None] * len(pairs)
            continue
        rows: list[Interval | None] = []
        for pair in pairs:
            variance = _own_if_noisier(pair, pooled)
            quantile = float(stats.t.ppf(1 - (1 - confidence) / (2 * tested), variance.freedom))
            error = math.sqrt(variance.value * (1 / len(pair.base) + 1 / len(pair.new)))
            middle = pair.difference
            rows.append(Interval(middle, middle - quantile * error, middle + quantile * error))
        found[name] = rows
    return found


def _own_if_noisier(pair: Pair, pooled: Variance) -> Variance:
    from scipy import stats

    if pair.freedom == 0:
        return pooled
    own = pair.sum_of_squares / pair.freedom
    if pooled.value > 0 and own / pooled.value > float(stats.f.ppf(1 - NOISIER, pair.freedom, pooled.freedom)):
        return Variance(own, float(pair.freedom))
    return pooled
