"""What a server log says of graphs: captures, memory, batch sizes, graph use. One summary per boot, in flat memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graphtune.engines.base import Unit

REPORTED_QUANTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class CaptureRecord:
    """One captured list on one rank. ``phase`` None: everything the boot captured, as vLLM reports it.

    ``used_from`` says whether the line states the memory or it is the fall of free memory from begin to end.
    ``failed`` names what stopped the capture and ``failed_size`` the size in progress.
    """

    rank: str
    role: str
    phase: str | None
    backend: str | None = None
    sizes: tuple[int, ...] | None = None
    unit: Unit = "requests"
    width: int | None = None
    count: int | None = None
    seconds: float | None = None
    used_bytes: int | None = None
    used_from: str | None = None
    step: int | None = None
    failed: str | None = None
    failed_size: int | None = None


@dataclass(frozen=True)
class RankTotal:
    """Memory and time of all captures of one rank. ``unknown`` counts captures whose memory is not stated."""

    rank: str
    captures: int
    used_bytes: int | None
    seconds: float | None
    unknown: int


@dataclass(frozen=True)
class BatchUse:
    """Running or prefill batches. ``weighting`` is what a weight counts: iterations or seconds.

    Shares are of weight; None when no reading says. ``off_graph`` is among readings that tell whether a graph ran.
    """

    unit: Unit
    weighting: str
    readings: int
    weight: float
    percentiles: dict[str, int]
    histogram: tuple[tuple[int, float], ...]
    top: int | None
    above_top: float | None
    off_graph: float | None
    graph_unknown: float
    aggregated_readings: int = 0


@dataclass(frozen=True)
class StepUse:
    """Per-step tables: exact counts. ``eager`` and ``padding_waste`` are shares over the steps counted."""

    steps: int
    eager: float
    by_mode: dict[str, int]
    padding_waste: float | None
    top: int | None
    above_top: float | None


@dataclass(frozen=True)
class Failure:
    """An allocation or a capture that failed. ``size`` is the size in progress when it did."""

    kind: str
    rank: str
    at: str | None
    operation: str | None = None
    size: int | None = None
    unit: Unit | None = None
    asked_bytes: int | None = None
    free_bytes: int | None = None

    @property
    def short_bytes(self) -> int | None:
        """How much more free memory the allocation needed."""
        if self.asked_bytes is None or self.free_bytes is None:
            return None
        return self.asked_bytes - self.free_bytes


@dataclass(frozen=True)
class BootSummary:
    """One start of a server and what followed it. ``over_ranks`` is the largest batch of all ranks at one second, by
    which ranks that gather choose their size; None when one rank at a time is seen."""

    engine: str | None
    version: str | None
    started: str | None
    settings: dict[str, Any]
    captures: tuple[CaptureRecord, ...]
    graphs_by_mode: dict[str, int]
    rank_totals: tuple[RankTotal, ...]
    graph_bytes: int | None
    capture_s: float | None
    estimated_bytes: int | None
    actual_bytes: int | None
    kv_tokens: int | None
    kv_bytes: int | None
    memory: dict[str, int]
    decode: BatchUse | None
    prefill: BatchUse | None
    steps: StepUse | None
    modes: tuple[dict[str, str | None], ...]
    list_changes: tuple[str, ...]
    failures: tuple[Failure, ...]
    utilization: dict[str, float]
    disagreements: tuple[str, ...]
    prefill_off: str | None = None
    over_ranks: BatchUse | None = None

    def captured(self, *phases: str) -> tuple[CaptureRecord, ...]:
        """Captures of the target model in the given phases."""
        return tuple(c for c in self.captures if c.role == "target" and (c.phase in phases or c.phase is None))


@dataclass(frozen=True)
class LogSummary:
    """One file. ``lines`` = ``read`` + the sum of ``skipped``."""

    source: str
    engine: str | None
    lines: int
    read: int
    skipped: dict[str, int]
    boots: tuple[BootSummary, ...]
    kind: str = "log"


@dataclass
class Readings:
    """A weighted histogram in work: size to weight by what the line says of graphs."""

    weights: Counter[tuple[int, bool | None]] = field(default_factory=Counter)
    readings: int = 0
    aggregated: int = 0
    weighting: str = "iterations"

    def use(self, unit: Unit, top: int | None) -> BatchUse | None:
        """The finished figures; ``top`` is the largest captured size, in the same unit."""
        if not self.readings and not self.aggregated:
            return None
        by_size: Counter[int] = Counter()
        by_graph: Counter[bool | None] = Counter()
        for (size, graph), weight in self.weights.items():
            by_size[size] += weight
            by_graph[graph] += weight
        total = sum(by_size.values())
        known = by_graph[True] + by_graph[False]
        above = sum(weight for size, weight in by_size.items() if top is not None and size > top)
        return BatchUse(
            unit,
            self.weighting,
            self.readings,
            total,
            percentiles(by_size),
            tuple(sorted(by_size.items())),
            top,
            above / total if top is not None and total else None,
            by_graph[False] / known if known else None,
            by_graph[None] / total if total else 0.0,
            self.aggregated,
        )


def percentiles(weights: Mapping[int, float]) -> dict[str, int]:
    """Weighted nearest-rank percentiles and the maximum; empty for an empty histogram."""
    if not weights:
        return {}
    total = sum(weights.values())
    found: dict[str, int] = {}
    reached = 0.0
    wanted = [(quantile, total * quantile / 100) for quantile in REPORTED_QUANTILES]
    for size in sorted(weights):
        reached += weights[size]
        while wanted and reached >= wanted[0][1] - 1e-9:
            found[f"p{wanted.pop(0)[0]}"] = size
    found["max"] = max(weights)
    return found


def rank_totals(captures: Iterable[CaptureRecord]) -> tuple[RankTotal, ...]:
    """Sums over the captures of each rank. A draft model's and each phase's capture count."""
    by_rank: dict[str, list[CaptureRecord]] = {}
    for capture in captures:
        by_rank.setdefault(capture.rank, []).append(capture)
    totals = []
    for name in sorted(by_rank):
        own = by_rank[name]
        used = [capture.used_bytes for capture in own if capture.used_bytes is not None]
        seconds = [capture.seconds for capture in own if capture.seconds is not None]
        totals.append(
            RankTotal(
                name,
                len(own),
                sum(used) if used else None,
                round(sum(seconds), 3) if seconds else None,
                len(own) - len(used),
            )
        )
    return tuple(totals)
