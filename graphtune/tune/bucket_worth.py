"""What each bucket of a list earns, and what the steps above its top lose.

A bucket earns what the expected step would grow by without it: its steps would take the next size, or run eager above
the last one. What it costs is what it added when the list that the bytes come from was captured: device bytes around
its capture, and the seconds of warming up, recording and instantiating it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from graphtune.engines.base import Padding
from graphtune.results import Capture, CellResult
from graphtune.tune.candidates import Evaluator
from graphtune.tune.memory_model import GraphCost, ListKey, MemoryModel, key_of
from graphtune.units import MIB

NOT_CAPTURED = "it was not captured as a part of that list"
NO_BYTES = "its capture added no bytes"
NOT_READ = "the bytes that its capture added were not read"
NEVER = "it never pays back its capture: steps are no slower without it"
# Sums that differ by less are the same.
ROUNDING = 1e-12
# A server is started again, and captures again, sooner than this.
LONGEST_RUN_S = 30 * 24 * 3600.0


@dataclass(frozen=True)
class SizeCost:
    """What capturing one size of a list added: the most bytes that any process read, the mean seconds."""

    graph_bytes: int | None
    seconds: float | None


def size_costs(cells: Iterable[CellResult]) -> dict[ListKey, dict[int, SizeCost]]:
    """By list, for every size that was captured as a part of it."""
    found: dict[ListKey, dict[int, list[Capture]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        for captured in cell.captured_lists:
            if captured.status == "ok":
                for capture in captured.captures:
                    found[key_of(captured.list)][capture.size].append(capture)
    return {key: {size: _cost(captures) for size, captures in of.items()} for key, of in found.items()}


def predicted_size_costs(memory: MemoryModel, of: GraphCost) -> dict[int, SizeCost]:
    """What each size adds to a predicted list: the fall of the prediction without it, and its seconds as captured."""
    found = {}
    for size in of.of.sizes:
        rest = tuple(one for one in of.of.sizes if one != size)
        without = memory.cost(rest) if rest else None
        alike = without is not None and without.provenance == "predicted"
        left = without.graph_bytes if without is not None and alike else None if rest else 0
        added = None if left is None else max(0, of.graph_bytes - left)
        found[size] = SizeCost(added, memory.size_seconds.get(size))
    return found


def _cost(captures: Sequence[Capture]) -> SizeCost:
    added = [one.retained_bytes for one in captures if one.retained_bytes is not None]
    parts = [(one.warmup_s, one.record_s, one.instantiate_s) for one in captures]
    seconds = [sum(part for part in whole if part is not None) for whole in parts if any(p is not None for p in whole)]
    return SizeCost(max(added) if added else None, statistics.fmean(seconds) if seconds else None)


@dataclass(frozen=True)
class BucketWorth:
    """One bucket of a list. ``share`` of the steps is served by it; ``earned_us`` is what the expected step grows by
    without it. ``pays_back_s`` is how long a busy server runs until the bucket has saved its capture's seconds; null
    when it never does. Nulls have their reason in ``absent``.
    """

    size: int
    share: float
    earned_us: float | None
    graph_bytes: int | None
    capture_s: float | None
    us_per_mib: float | None
    us_per_capture_s: float | None
    pays_back_s: float | None
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def never_pays(self) -> bool:
        """True when the seconds of its capture are not saved within 30 days of serving."""
        if self.pays_back_s is None:
            return self.absent.get("pays_back_s") == NEVER
        return self.pays_back_s > LONGEST_RUN_S


@dataclass(frozen=True)
class Cliff:
    """Steps above the largest captured size: their share, and how much longer the expected step is than with a graph of
    each of their own sizes (null where those were not measured)."""

    share: float
    cost_us: float | None


def bucket_worths(
    evaluator: Evaluator, sizes: tuple[int, ...], padding: Padding, costs: Mapping[int, SizeCost]
) -> tuple[BucketWorth, ...]:
    """For each size of a list, ascending; ``costs`` by size."""
    expected = evaluator.evaluate(sizes, padding).expected_step_us
    return tuple(_worth(evaluator, sizes, size, padding, costs.get(size), expected) for size in sizes)


def _worth(
    evaluator: Evaluator,
    sizes: tuple[int, ...],
    size: int,
    padding: Padding,
    cost: SizeCost | None,
    expected_us: float | None,
) -> BucketWorth:
    rest = tuple(one for one in sizes if one != size)
    served = [step for step in evaluator.steps if evaluator.bucket(step.requests, sizes, padding) == size]
    share = sum(step.weight for step in served) / evaluator.weight
    earned: float | None = 0.0
    for step in served:
        here = evaluator.model.step(step.requests, size, step.context_tokens)
        without = evaluator.bucket(step.requests, rest, padding)
        there = evaluator.model.step(step.requests, without, step.context_tokens)
        if here is None or there is None:
            earned = None
            break
        assert earned is not None
        earned += step.weight / evaluator.weight * (there.us - here.us)
    if earned is not None and expected_us is not None and abs(earned) < ROUNDING * expected_us:
        earned = 0.0
    graph_bytes, seconds = (cost.graph_bytes, cost.seconds) if cost else (None, None)
    per_mib = earned / (graph_bytes / MIB) if earned is not None and graph_bytes else None
    per_second = earned / seconds if earned is not None and seconds else None
    pays = earned is not None and earned > 0 and expected_us is not None and seconds is not None
    absent = {}
    if earned is None:
        absent["earned_us"] = "steps without this bucket were not measured"
    if graph_bytes is None:
        absent["graph_bytes"] = NOT_CAPTURED if cost is None else NOT_READ
    if seconds is None:
        absent["capture_s"] = NOT_CAPTURED if cost is None else "its capture was not timed"
    if per_mib is None:
        absent["us_per_mib"] = absent.get("earned_us") or absent.get("graph_bytes") or NO_BYTES
    if per_second is None:
        absent["us_per_capture_s"] = absent.get("earned_us") or absent.get("capture_s") or "its capture took no time"
    if not pays:
        never = earned is not None and earned <= 0
        absent["pays_back_s"] = NEVER if never else absent.get("us_per_capture_s") or "the list has no expected step"
    return BucketWorth(
        size=size,
        share=share,
        earned_us=earned,
        graph_bytes=graph_bytes,
        capture_s=seconds,
        us_per_mib=per_mib,
        us_per_capture_s=per_second,
        # Of a second without the bucket, earned / (expected + earned) is saved.
        pays_back_s=seconds * (expected_us + earned) / earned if pays and seconds and expected_us and earned else None,
        absent=absent,
    )


def cliff(evaluator: Evaluator, sizes: tuple[int, ...]) -> Cliff:
    """What lies above the top of a list."""
    top = sizes[-1] if sizes else 0
    above = [step for step in evaluator.steps if step.requests > top]
    share, cost = sum(step.weight for step in above) / evaluator.weight, 0.0
    for step in above:
        eager = evaluator.model.step(step.requests, None, step.context_tokens)
        replay = evaluator.model.step(step.requests, step.requests, step.context_tokens)
        if eager is None or replay is None:
            return Cliff(share, None)
        cost += step.weight / evaluator.weight * (eager.us - replay.us)
    return Cliff(share, cost)
