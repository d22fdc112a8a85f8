"""Compares two server logs, or a server's own accounts (SGLang's /server_info): captures, memory, lists, settings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from graphtune.compare.model import Change, Comparison, Kind, Side, What
from graphtune.compare.observation import Observation
from graphtune.compare.rows import compare_observations
from graphtune.compare.thresholds import Thresholds
from graphtune.errors import InputError
from graphtune.tune.log_records import BootSummary, CaptureRecord, LogSummary
from graphtune.tune.log_summary import GRAPH_TOLERANCE_BYTES, summarise_file
from graphtune.units import format_bytes

ALONE = (
    "one start on each side, so nothing shows how far starts disagree: a log may hold several starts of the same server"
)
SECONDS_ROUNDED = {"vllm": 1.0}
"""vLLM prints whole seconds of capture, the others two decimals."""
LEAST_SECONDS = 0.02


def compare_logs(base: str, new: str, thresholds: Thresholds | None = None) -> Comparison:
    """Compare two files as `graphtune log summary` reads them. Each start of a server counts once.

    Bytes and seconds are rows with verdicts; versions, settings, lists, KV tokens and the use of graphs are told as
    changes. Raises InputError for files that say nothing, and for logs of different engines.
    """
    thresholds = thresholds or Thresholds()
    sides = [summarise_file(name) for name in (base, new)]
    starts = [_starts(side) for side in sides]
    engines = [some[-1].engine or side.engine for some, side in zip(starts, sides, strict=True)]
    if engines[0] != engines[1]:
        raise InputError(
            f"the logs are of different engines: {engines[0] or 'unknown'} against {engines[1] or 'unknown'}",
            where=f"{base} and {new}",
            action="Compare logs of one engine.",
        )
    seconds = SECONDS_ROUNDED.get(engines[0] or "", LEAST_SECONDS)
    floors: dict[Kind, float] = {
        "memory": max(thresholds.memory_floor_bytes, GRAPH_TOLERANCE_BYTES),
        "capture": seconds,
    }
    found = compare_observations(_observe(starts[0]), _observe(starts[1]), thresholds, floors=floors, alone=ALONE)
    return Comparison(
        base=_side(sides[0], starts[0], engines[0]),
        new=_side(sides[1], starts[1], engines[1]),
        confidence=thresholds.confidence,
        tested=found.tested,
        rows=found.rows,
        changes=_changes(starts[0][-1], starts[1][-1]),
        notes=tuple(_notes(sides, starts)),
        flagged=found.flagged,
        ignored=found.ignored,
        compared="logs",
    )


def _starts(of: LogSummary) -> tuple[BootSummary, ...]:
    """The last start that captured anything, after those before it that captured the same lists."""
    captured = [boot for boot in of.boots if boot.captures] or [of.boots[-1]]
    return tuple(boot for boot in captured if _lists(boot) == _lists(captured[-1]))


def _lists(boot: BootSummary) -> set[tuple[Any, ...]]:
    return {(boot.version, one.role, one.phase, one.backend, one.sizes) for one in boot.captures}


def _observe(starts: Sequence[BootSummary]) -> dict[What, Observation]:
    """Bytes and seconds of every capture (of ranks the largest), their sums, and the engine's own account."""
    found: dict[What, Observation] = defaultdict(Observation)

    def see(start: int, kind: Kind, phase: str, quantity: str, value: float | None, backend: str | None = None) -> None:
        if value is not None:
            what = What(kind, phase, quantity, attention="", page_size=0, backend=backend)
            found[what].by_process[start] = float(value)

    for start, boot in enumerate(starts, 1):
        for (phase, backend), records in _by_phase(boot).items():
            failed = next((one.failed for one in records if one.failed), None)
            if failed:
                found[What("memory", phase, "graph_bytes", "", 0, backend=backend)].failure = failed
                continue
            see(start, "memory", phase, "graph_bytes", _largest(one.used_bytes for one in records), backend)
            see(start, "capture", phase, "capture_s", _largest(one.seconds for one in records), backend)
        if len(_by_phase(boot)) > 1:
            see(start, "memory", "all phases", "graph_bytes", boot.graph_bytes)
            see(start, "capture", "all phases", "capture_s", boot.capture_s)
        see(start, "memory", "all phases", "weights_bytes", boot.memory.get("weights"))
    return dict(found)


def _by_phase(boot: BootSummary) -> dict[tuple[str, str | None], list[CaptureRecord]]:
    found: dict[tuple[str, str | None], list[CaptureRecord]] = defaultdict(list)
    for one in boot.captures:
        role = "" if one.role == "target" else f"{one.role} "
        found[f"{role}{one.phase or 'all phases'}", one.backend].append(one)
    return found


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _side(of: LogSummary, starts: Sequence[BootSummary], engine: str | None) -> Side:
    version = starts[-1].version
    return Side(
        path=of.source,
        recipe_name="",
        model_name=f"{engine or 'unknown engine'} {version or '(version not stated)'}",
        device_name="",
        driver=None,
        date=starts[-1].started or "time not stated",
        processes=len(starts),
    )


def _changes(base: BootSummary, new: BootSummary) -> tuple[Change, ...]:
    before, after = _facts(base), _facts(new)
    return tuple(
        Change(name, *_texts(before.get(name), after.get(name)))
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    )


def _facts(boot: BootSummary) -> dict[str, Any]:
    """What a start says of itself beside bytes and seconds, by a name for people."""
    facts: dict[str, Any] = {"version": boot.version}
    facts |= {name.replace("_", " "): value for name, value in boot.settings.items()}
    for (phase, backend), records in _by_phase(boot).items():
        kind = f"{phase} {backend}" if backend else phase
        facts[f"{kind} capture sizes"] = records[-1].sizes
        facts[f"{kind} graphs"] = records[-1].count
    facts |= {f"graphs of mode {mode}": count for mode, count in boot.graphs_by_mode.items()}
    facts["KV tokens"] = boot.kv_tokens
    facts["KV cache"] = None if boot.kv_bytes is None else format_bytes(boot.kv_bytes)
    facts["prefill graphs off because"] = boot.prefill_off
    for name, use in (("decode", boot.decode), ("prefill", boot.prefill)):
        if use is not None:
            facts[f"{name} batches ({use.unit})"] = ", ".join(f"{mark} {at:,}" for mark, at in use.percentiles.items())
            facts[f"{name} steps without a graph"] = None if use.off_graph is None else f"{use.off_graph:.1%}"
    return {name: value for name, value in facts.items() if value is not None}


def _texts(base: Any, new: Any) -> tuple[str, str]:
    """Both values in words; lists of sizes by their ends, or by what each has alone where their ends are alike."""
    if not (_is_list(base) and _is_list(new)):
        return _text(base), _text(new)
    before, after = _text(base), _text(new)
    if before != after:
        return before, after
    return f"{before}, with {_only(base, new)}", f"{after}, with {_only(new, base)}"


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple | list) and bool(value) and all(isinstance(one, int) for one in value)


def _text(value: Any) -> str:
    if value is None:
        return "not stated"
    if _is_list(value):
        return f"{len(value)} sizes {min(value)}…{max(value)}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _only(one: Sequence[int], other: Sequence[int]) -> str:
    return ", ".join(str(size) for size in sorted(set(one) - set(other))) or "the same in another order"


def _notes(sides: Sequence[LogSummary], starts: Sequence[Sequence[BootSummary]]) -> Iterable[str]:
    for name, side, used in zip(("baseline", "candidate"), sides, starts, strict=True):
        left = sum(bool(boot.captures) for boot in side.boots) - len(used)
        if left > 0:
            yield f"{name}: {left} earlier start{'s' if left > 1 else ''} with other lists left out"
        for failure in used[-1].failures:
            at = f" at size {failure.size}" if failure.size is not None else ""
            yield f"{name}: {failure.kind}{at}: {failure.operation or 'see the log'}"
        yield from (f"{name}: {text}" for text in used[-1].disagreements)
