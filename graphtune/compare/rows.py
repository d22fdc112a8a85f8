"""Rows of a comparison from what both sides observed: ratio, interval, verdict and its reason."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from graphtune.compare.intervals import Interval, Pair, intervals
from graphtune.compare.model import Kind, Row, Verdict, What
from graphtune.compare.observation import Observation, names
from graphtune.compare.thresholds import Thresholds
from graphtune.units import format_bytes, format_duration_s

UNCLEAR = "the interval holds both a change and none; more processes (--rounds) narrow it"


@dataclass(frozen=True)
class Compared:
    """``tested`` rows have an interval; ``flagged`` readings were left out, and ``ignored`` rows by the thresholds."""

    rows: tuple[Row, ...]
    tested: int
    flagged: int
    ignored: int


def compare_observations(
    base: Mapping[What, Observation],
    new: Mapping[What, Observation],
    thresholds: Thresholds,
    *,
    floors: Mapping[Kind, float],
    alone: str,
) -> Compared:
    """One row per thing that either side measured, in the order of kinds, groups, contexts and sizes.

    ``floors``: differences up to this are the same, in bytes or seconds, by kind of row. ``alone`` is the reason given
    where one process on each side decides nothing.
    """
    flagged = sum(seen.flagged for found in (base, new) for seen in found.values())
    measured = {what for found in (base, new) for what, seen in found.items() if seen.by_process}
    whats = sorted(measured, key=lambda what: what.sort_key)
    nothing = Observation()
    pairs = [(base.get(what, nothing), new.get(what, nothing)) for what in whats]
    labels = [one.label or other.label for one, other in pairs]
    shown = names(list(zip(whats, labels, strict=True)))
    kept = [i for i, name in enumerate(shown) if not ((rule := thresholds.rule_for(name)) and rule.ignore)]
    tests = {whats[i]: pair for i in kept if (pair := _pair(*pairs[i])) is not None}
    bounds = _intervals(tests, thresholds.confidence)
    rows = [
        _row(
            whats[i],
            shown[i],
            *pairs[i],
            bounds.get(whats[i]),
            _Limits(thresholds.tolerance_of(whats[i].kind, shown[i]), floors.get(whats[i].kind, 0.0), alone),
        )
        for i in kept
    ]
    tested = sum(interval is not None for interval in bounds.values())
    return Compared(tuple(rows), tested, flagged, len(whats) - len(kept))


@dataclass(frozen=True)
class _Limits:
    """Of one row: relative tolerance, the absolute floor below which figures are the same, the reason of a lone
    process."""

    tolerance: float
    floor: float
    alone: str


def _pair(base: Observation, new: Observation) -> Pair | None:
    """What the statistics get; None where a side is lacking, a value has no logarithm, or there is nothing to ask."""
    values = (*base.by_process.values(), *new.by_process.values())
    if not base.by_process or not new.by_process or min(values) <= 0 or _equal(base, new):
        return None
    logs = [{process: math.log(v) for process, v in side.by_process.items()} for side in (base, new)]
    return Pair(*logs)


def _equal(base: Observation, new: Observation) -> bool:
    """The same figures on both sides, whichever process measured them."""
    return sorted(base.by_process.values()) == sorted(new.by_process.values())


def _intervals(tests: Mapping[What, Pair], confidence: float) -> dict[What, Interval | None]:
    groups: dict[str, list[What]] = defaultdict(list)
    for what in tests:
        groups[what.group].append(what)
    found = intervals({name: [tests[what] for what in whats] for name, whats in groups.items()}, confidence)
    return {what: one for name, whats in groups.items() for what, one in zip(whats, found[name], strict=True)}


def _row(
    what: What,
    name: str,
    base: Observation,
    new: Observation,
    interval: Interval | None,
    limits: _Limits,
) -> Row:
    before, after = _middle(base), _middle(new)
    tolerance = limits.tolerance
    if before and after and min(before, after) > 0:
        tolerance = max(tolerance, limits.floor / min(before, after))
    ratio = after / before if before is not None and after is not None and before > 0 and after > 0 else None
    low = high = None
    if interval is not None:
        ratio, low, high = interval.ratio
    verdict, reason = _verdict(what, base, new, interval, replace(limits, tolerance=tolerance))
    return Row(
        what=what,
        name=name,
        base=before,
        new=after,
        base_processes=len(base.by_process),
        new_processes=len(new.by_process),
        base_flagged=base.flagged,
        new_flagged=new.flagged,
        ratio=1.0 if verdict == "same" and ratio is not None and interval is None and _equal(base, new) else ratio,
        low=low,
        high=high,
        tolerance=tolerance,
        verdict=verdict,
        reason=reason,
    )


def _verdict(
    what: What, base: Observation, new: Observation, interval: Interval | None, limits: _Limits
) -> tuple[Verdict, str | None]:
    for side, seen in (("the baseline", base), ("the candidate", new)):
        if not seen.by_process:
            if seen.flagged:
                return "undecided", f"all {seen.flagged} readings of {side} are flagged as disturbed"
            return "missing", f"not measured in {side}" + (f": {seen.failure}" if seen.failure else "")
    if _equal(base, new):
        return "same", None
    worse, better = _words(what)
    values = (*base.by_process.values(), *new.by_process.values())
    if min(values) <= 0:
        return _by_difference(what, base, new, limits)
    if interval is None:
        return "undecided", limits.alone
    limit = math.log1p(limits.tolerance)
    if interval.low > limit:
        return worse, None
    if interval.high < -limit:
        return better, None
    if -limit <= interval.low and interval.high <= limit:
        return "same", None
    return "undecided", UNCLEAR


def _by_difference(what: What, base: Observation, new: Observation, limits: _Limits) -> tuple[Verdict, str | None]:
    """Figures at or below 0 have no ratio: only whole processes apart decide."""
    worse, better = _words(what)
    reason = "no ratio to 0: decided by the difference"
    if len(base.by_process) < 2 or len(new.by_process) < 2:
        return "undecided", limits.alone
    lows, highs = [], []
    for side in (base, new):
        lows.append(min(side.by_process.values()))
        highs.append(max(side.by_process.values()))
    if lows[1] - highs[0] > limits.floor:
        return worse, reason
    if lows[0] - highs[1] > limits.floor:
        return better, reason
    if max(highs) - min(lows) <= limits.floor:
        return "same", reason
    floor = format_bytes(round(limits.floor)) if what.kind == "memory" else format_duration_s(limits.floor)
    return "undecided", f"no ratio to 0, and the processes differ by more than {floor}"


def _words(what: What) -> tuple[Verdict, Verdict]:
    return ("larger", "smaller") if what.kind == "memory" else ("slower", "faster")


def _middle(seen: Observation) -> float | None:
    """One figure for a side: the geometric mean, or the plain one where a value has no logarithm."""
    values = list(seen.by_process.values())
    if not values:
        return None
    if min(values) <= 0:
        return math.fsum(values) / len(values)
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))
