"""A server's log after roll-out against the recommendation that it runs: list, memory, graph use, traffic."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphtune.errors import Finding
from graphtune.tune.log_records import BatchUse, BootSummary, CaptureRecord, LogSummary
from graphtune.tune.verify import Check, CheckUnit, Verdict

KV_SHARE = 0.98
"""Of the recommended KV tokens that a server must have: engines round to pages and blocks."""

COVERAGE_LESS = 0.02
DRIFT_LIMIT = 0.2
"""Share of steps that would have to move to another bucket for the two traffics to be the same."""

OWN_BUFFERS = "a server's figure holds its own buffers too"


@dataclass(frozen=True)
class LogVerification:
    """What the last start of a server does, beside what was recommended."""

    engine: str
    source: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.verdict != "outside" for check in self.checks)


def verify_log(data: Mapping[str, Any], engine: str | None, log: LogSummary) -> LogVerification:
    """Compare the last start in ``log`` with the answer for its engine in a recommendation's JSON.

    Raises Finding when the log's engine is not in it or nothing was captured or recommended.
    """
    name = engine or log.engine
    answer = data["engines"].get(name) if name else None
    if name is None or answer is None or answer.get("decode") is None:
        known = ", ".join(data["engines"])
        raise Finding(f"the recommendation has no list for {name or 'an unknown engine'} (it has {known})")
    boot = log.boots[-1]
    decode = answer["decode"]
    sizes = tuple(decode["capture_sizes"])
    record = next(iter(boot.captured("decode")), None)
    checks = [
        _list(sizes, record),
        _shown("graph memory", "bytes", decode["graph_bytes"], record.used_bytes if record else boot.graph_bytes),
        _shown("seconds of capture", "s", decode["capture_s"], record.seconds if record else boot.capture_s),
        *_kv_tokens(answer.get("memory"), boot),
        *_coverage(decode["coverage"], boot),
        *_drift(data["workload"]["decode"], sizes, boot.decode),
    ]
    return LogVerification(name, log.source, tuple(checks))


def _list(sizes: tuple[int, ...], record: CaptureRecord | None) -> Check:
    if record is None or record.sizes is None:
        reason = "the log does not name the captured sizes"
        return Check("captured sizes", "sizes", len(sizes), None, None, None, "not judged", reason)
    missing, extra = sorted(set(sizes) - set(record.sizes)), sorted(set(record.sizes) - set(sizes))
    differ = [f"missing {_listed(missing)}"] * bool(missing) + [f"beyond it {_listed(extra)}"] * bool(extra)
    verdict: Verdict = "outside" if differ else "ok"
    many = len(sizes)
    return Check("captured sizes", "sizes", many, many, many, len(record.sizes), verdict, "; ".join(differ) or None)


def _listed(sizes: Sequence[int]) -> str:
    shown = ", ".join(str(size) for size in sizes[:8])
    return shown if len(sizes) <= 8 else f"{shown} and {len(sizes) - 8} more"


def _shown(name: str, unit: CheckUnit, predicted: float | None, measured: float | None) -> Check:
    return Check(name, unit, predicted, None, None, measured, "not judged", OWN_BUFFERS if unit == "bytes" else None)


def _judged(
    name: str, unit: CheckUnit, predicted: float, low: float | None, high: float | None, measured: float
) -> Check:
    inside = (low is None or measured >= low) and (high is None or measured <= high)
    return Check(name, unit, predicted, low, high, measured, "ok" if inside else "outside")


def _kv_tokens(memory: Mapping[str, Any] | None, boot: BootSummary) -> list[Check]:
    if memory is None or boot.kv_tokens is None:
        return []
    least = KV_SHARE * memory["kv_tokens"]
    return [_judged("KV tokens", "tokens", memory["kv_tokens"], least, None, boot.kv_tokens)]


def _coverage(predicted: float | None, boot: BootSummary) -> list[Check]:
    """The share of decode steps that a graph served, where the log tells."""
    off = boot.steps.eager if boot.steps is not None else boot.decode.off_graph if boot.decode is not None else None
    if predicted is None or off is None:
        return []
    return [_judged("steps on graphs", "share", predicted, predicted - COVERAGE_LESS, None, 1 - off)]


def _drift(shares: Iterable[Mapping[str, Any]], sizes: tuple[int, ...], use: BatchUse | None) -> list[Check]:
    """How much of the traffic lies in other buckets than was assumed."""
    if use is None or not use.histogram or not sizes:
        return []
    assumed = _by_bucket(((share["requests"], share["weight"]) for share in shares), sizes)
    seen = _by_bucket(use.histogram, sizes)
    places = assumed.keys() | seen.keys()
    moved = sum(abs(assumed.get(place, 0.0) - seen.get(place, 0.0)) for place in places) / 2
    return [_judged("traffic in other buckets", "share", 0.0, None, DRIFT_LIMIT, moved)]


def _by_bucket(histogram: Iterable[tuple[int, float]], sizes: Sequence[int]) -> dict[int, float]:
    """Share of steps per bucket, by its place in ``sizes``; those above the top share one place."""
    weights: dict[int, float] = defaultdict(float)
    for requests, weight in histogram:
        weights[bisect_left(sizes, requests)] += weight
    total = sum(weights.values()) or 1.0
    return {place: weight / total for place, weight in weights.items()}
