"""Events of a log put together into one summary per boot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from graphtune.engines import events as ev
from graphtune.engines.vllm.modes import ROUTINES
from graphtune.tune.log_records import (
    BootSummary,
    CaptureRecord,
    Failure,
    Readings,
    StepUse,
    rank_totals,
)

# Different amounts of the same thing on two ranks, as a share, that are worth a word.
KV_TOLERANCE = 0.01
MOST_EXAMPLES = 5


class BootAssembly:
    """One boot in work."""

    def __init__(self) -> None:
        self.version: str | None = None
        self.started: str | None = None
        self.settings: dict[str, Any] = {}
        self.captures: list[CaptureRecord] = []
        self.open: dict[tuple[str, str, str, int | None], tuple[CaptureRecord, int | None]] = {}
        self.seen_sizes: dict[tuple[str, str, str, int | None], set[int]] = {}
        self.last_open: tuple[str, str, str, int | None] | None = None
        self.last_progress: ev.CaptureProgress | None = None
        self.by_mode: dict[str, int] = {}
        self.estimated: int | None = None
        self.actual: int | None = None
        self.kv_tokens: dict[str, int] = {}
        self.kv_bytes: dict[str, int] = {}
        self.memory: dict[str, int] = {}
        self.decode = Readings()
        self.prefill = Readings()
        self.step_weights: Counter[tuple[int, int, str]] = Counter()
        self.modes: list[dict[str, str | None]] = []
        self.list_changes: list[str] = []
        self.list_top: int | None = None
        self.failures: list[Failure] = []
        self.utilization: dict[str, float] = {}
        self.disagreements: list[str] = []
        self.second: str | None = None
        self.same_second: dict[str, tuple[int, bool | None]] = {}
        self.over_ranks = Readings()
        self.split_seconds = 0
        self.prefill_off: str | None = None
        self.host_read: str | None = None

    def add(self, event: ev.Event) -> None:
        """Take one event in."""
        if type(event) is ev.Running:
            self._running(event)
        elif type(event) is ev.Prefill:
            self.prefill.weights[(event.tokens, event.graph)] += 1
            self.prefill.readings += 1
        elif type(event) is ev.Step:
            self.step_weights[(event.tokens, event.padded_tokens, event.mode)] += event.steps
        elif type(event) is ev.CaptureProgress:
            self._progress(event)
        else:
            self._start_up(event)

    def _running(self, event: ev.Running) -> None:
        readings = self.decode
        if event.aggregated:
            readings.aggregated += 1
            return
        readings.weights[(event.requests, event.graph)] += event.weight  # type: ignore[assignment]
        readings.readings += 1
        readings.weighting = event.weighting
        if event.at != self.second:
            self._close_second()
            self.second = event.at
        if event.at is not None:
            self.same_second[event.rank] = (event.requests, event.graph)

    def _close_second(self) -> None:
        """Ranks that step together use the size of the largest, and must all replay or all run eagerly."""
        if len(self.same_second) > 1:
            largest = max(requests for requests, _ in self.same_second.values())
            graphs = {graph for _, graph in self.same_second.values()}
            together = graphs.pop() if len(graphs) == 1 else None
            self.over_ranks.weights[(largest, together)] += 1
            self.over_ranks.readings += 1
            if together is None:
                self._split_second()
        self.same_second.clear()

    def _split_second(self) -> None:
        states = {name: graph for name, (_, graph) in self.same_second.items() if graph is not None}
        if len(set(states.values())) < 2:
            return
        self.split_seconds += 1
        if len(self.disagreements) < MOST_EXAMPLES:
            who = ", ".join(f"{name or 'no rank'} {graph}" for name, graph in sorted(states.items()))
            self.disagreements.append(f"at {self.second} the ranks differ on graphs: {who}")

    def _start_up(self, event: ev.Event) -> None:
        match event:
            case ev.Boot():
                self.version = event.version or self.version
                self.started = self.started or event.at
                self.settings.update(event.settings)
            case ev.Settings():
                self.settings.update(event.values)
            case ev.CaptureBegin():
                self._begin(event)
            case ev.CaptureSizes():
                self._sizes(event)
            case ev.CaptureEnd():
                self._end(event)
            case ev.KVSize():
                self._kv(event)
            case ev.Memory():
                self.memory[event.what] = max(event.size_bytes, self.memory.get(event.what, 0))
            case ev.GraphEstimate():
                self.by_mode.update({mode: count for mode, (count, _) in event.counts.items()})
                self.estimated = event.estimated_bytes if event.estimated_bytes is not None else self.estimated
                self.actual = event.actual_bytes if event.actual_bytes is not None else self.actual
            case ev.Utilization():
                pairs = (("current", event.current), ("suggested", event.suggested))
                self.utilization.update({name: value for name, value in pairs if value is not None})
            case ev.ModeChange():
                change = {"asked": event.asked, "runs": event.runs, "reason": event.reason}
                if change not in self.modes:
                    self.modes.append(change)
            case ev.ListChange():
                self._list_change(event)
            case ev.OutOfMemory() | ev.CaptureError():
                self._failure(event)
            case ev.CodeLine():
                self.host_read = event.operation
            case ev.PrefillGraphsOff():
                self.prefill_off = event.reason

    def _begin(self, event: ev.CaptureBegin) -> None:
        key = (event.rank, event.role, event.phase, event.step)
        record = CaptureRecord(
            event.rank,
            event.role,
            event.phase,
            event.backend,
            event.sizes,
            event.unit,
            event.width,
            len(event.sizes) if event.sizes else event.count,
            step=event.step,
        )
        self.open[key] = (record, event.available_bytes)
        self.last_open, self.last_progress = key, None

    def _sizes(self, event: ev.CaptureSizes) -> None:
        """A list on its own line is printed by one rank and holds for all that are capturing."""
        for key, (record, available) in self.open.items():
            if record.sizes is None and record.unit == event.unit:
                listed = tuple(sorted(event.sizes))
                self.open[key] = (replace(record, sizes=listed, count=len(listed)), available)

    def _progress(self, event: ev.CaptureProgress) -> None:
        self.last_progress = event
        if event.mode is not None and event.total is not None:
            self.by_mode.setdefault(event.mode.rsplit(", ", 1)[-1], event.total)
        if self.last_open is not None and event.size is not None:
            self.seen_sizes.setdefault(self.last_open, set()).add(event.size)

    def _end(self, event: ev.CaptureEnd) -> None:
        phase = event.phase or ""
        key = (event.rank, event.role, phase, event.step)
        begun = self.open.pop(key, None)
        if begun is None:
            same = [other for other in self.open if other[0] == event.rank and other[1:3] == (event.role, phase)]
            begun = self.open.pop(same[0]) if same else None
        record, before = begun or (CaptureRecord(event.rank, event.role, event.phase, step=event.step), None)
        used, how = event.used_bytes, "stated" if event.used_bytes is not None else None
        if used is None and before is not None and event.available_bytes is not None:
            used, how = before - event.available_bytes, "difference of free memory"
        sizes = record.sizes
        if sizes is None and key in self.seen_sizes:
            sizes = tuple(sorted(self.seen_sizes[key]))
        self.captures.append(
            replace(
                record,
                sizes=sizes,
                count=len(sizes) if sizes else record.count,
                seconds=event.seconds,
                used_bytes=used,
                used_from=how,
            )
        )
        if self.last_open == key:
            self.last_open = None

    def _kv(self, event: ev.KVSize) -> None:
        if event.tokens is not None:
            self.kv_tokens[event.rank] = event.tokens
        if event.size_bytes is not None:
            self.kv_bytes[event.rank] = event.size_bytes
        if event.blocks is not None:
            self.settings["kv_blocks"] = event.blocks

    def _list_change(self, event: ev.ListChange) -> None:
        text = event.reason
        if event.before and event.after:
            lost = sorted(set(event.before) - set(event.after))
            text += f": {len(event.before)} sizes became {len(event.after)}" + (f", without {lost[:8]}" if lost else "")
        elif event.top is not None:
            text += f": the largest size is {event.top}"
        self.list_top = event.top if event.top is not None else self.list_top
        if text not in self.list_changes:
            self.list_changes.append(text)

    def _failure(self, event: ev.OutOfMemory | ev.CaptureError) -> None:
        capturing = bool(self.open) or (self.last_progress is not None and not self.captures)
        progress = self.last_progress if capturing else None
        size = progress.size if progress else None
        unit = progress.unit if progress and progress.size is not None else None
        if isinstance(event, ev.CaptureError):
            operation = event.operation if self.host_read is None else f"{self.host_read} ({event.operation})"
            failure = Failure("capture", event.rank, event.at, operation, size, unit)
        else:
            asked, free = event.asked_bytes, event.free_bytes
            failure = Failure("memory", event.rank, event.at, None, size, unit, asked, free)
        if any(_same_failure(known, failure) for known in self.failures):
            return
        self.failures.append(failure)

    def finish(self, engine: str | None) -> BootSummary:
        """The summary of everything taken in."""
        self._close_second()
        if self.split_seconds > MOST_EXAMPLES:
            self.disagreements.append(f"ranks differ on graphs in {self.split_seconds} seconds in all")
        captures = [*self.captures, *self._unfinished()]
        captures = [self._with_settings(capture) for capture in captures]
        totals = rank_totals(captures)
        used = [total.used_bytes for total in totals if total.used_bytes is not None]
        seconds = [total.seconds for total in totals if total.seconds is not None]
        kv = self.kv_tokens
        return BootSummary(
            engine=engine,
            version=self.version,
            started=self.started,
            settings=self.settings,
            captures=tuple(captures),
            graphs_by_mode=self.by_mode,
            rank_totals=totals,
            graph_bytes=max(used) if used else None,
            capture_s=max(seconds) if seconds else None,
            estimated_bytes=self.estimated,
            actual_bytes=self.actual,
            kv_tokens=min(kv.values()) if kv else None,
            kv_bytes=max(self.kv_bytes.values()) if self.kv_bytes else None,
            memory=self.memory,
            decode=self.decode.use("requests", decode_top(captures, self.settings)),
            over_ranks=self.over_ranks.use("requests", decode_top(captures, self.settings)),
            prefill=self.prefill.use("tokens", _top(captures, ("prefill",), 1)),
            steps=self._steps(captures),
            modes=tuple(self.modes),
            list_changes=tuple(self.list_changes),
            failures=tuple(self.failures),
            utilization=self.utilization,
            disagreements=(*self._rank_lists(captures), *self._kv_differs(), *self.disagreements),
            prefill_off=self.prefill_off,
        )

    def _unfinished(self) -> list[CaptureRecord]:
        """Captures that never ended, with what stopped them; TensorRT-LLM does not print an end."""
        left = []
        for key, (record, _) in self.open.items():
            seen = self.seen_sizes.get(key)
            sizes = record.sizes if record.sizes is not None or not seen else tuple(sorted(seen))
            failure = next((f for f in self.failures if f.rank in ("", record.rank) or not record.rank), None)
            failed = None if failure is None else failure.operation or "out of memory"
            size = None if failure is None else failure.size
            left.append(replace(record, sizes=sizes, failed=failed, failed_size=size))
        return left

    def _with_settings(self, capture: CaptureRecord) -> CaptureRecord:
        """vLLM states its list in the start-up line; an engine's later cap counts over it."""
        if capture.phase is not None:
            return capture
        sizes = self.settings.get("cudagraph_capture_sizes")
        if sizes is not None and self.list_top is not None:
            sizes = tuple(size for size in sizes if size <= self.list_top)
        count = sum(self.by_mode.values()) or None
        return replace(capture, sizes=sizes, unit="tokens", count=count)

    def _steps(self, captures: Iterable[CaptureRecord]) -> StepUse | None:
        total = sum(self.step_weights.values())
        if not total:
            return None
        by_mode: Counter[str] = Counter()
        for (_, _, mode), steps in self.step_weights.items():
            by_mode[mode] += steps
        graphed = [(raw, padded, n) for (raw, padded, mode), n in self.step_weights.items() if mode != "NONE"]
        computed = sum(padded * n for _, padded, n in graphed)
        sizes = self.settings.get("cudagraph_capture_sizes")
        top = max(sizes) if sizes else None
        above = sum(n for (raw, _, _), n in self.step_weights.items() if top is not None and raw > top)
        return StepUse(
            total,
            by_mode["NONE"] / total,
            dict(by_mode),
            sum((padded - raw) * n for raw, padded, n in graphed) / computed if computed else None,
            top,
            above / total if top is not None else None,
        )

    def _rank_lists(self, captures: Iterable[CaptureRecord]) -> list[str]:
        """Lists of one phase that differ between ranks: then collectives of different shapes meet."""
        lists: dict[tuple[str, str | None], dict[tuple[int, ...], str]] = {}
        for capture in captures:
            if capture.sizes is not None and capture.step is None:
                lists.setdefault((capture.role, capture.phase), {}).setdefault(capture.sizes, capture.rank)
        return [
            f"{role} {phase or 'capture'}: ranks captured different lists ("
            + ", ".join(f"{rank or 'no rank'} {len(sizes)} sizes up to {max(sizes)}" for sizes, rank in by.items())
            + ")"
            for (role, phase), by in lists.items()
            if len(by) > 1
        ]

    def _kv_differs(self) -> list[str]:
        values = {rank: tokens for rank, tokens in self.kv_tokens.items() if rank}
        if len(values) < 2 or max(values.values()) - min(values.values()) <= KV_TOLERANCE * max(values.values()):
            return []
        low = min(values, key=values.__getitem__)
        high = max(values, key=values.__getitem__)
        return [f"KV tokens differ between ranks: {low} {values[low]:,}, {high} {values[high]:,}"]


def _top(captures: Iterable[CaptureRecord], phases: tuple[str, ...], width: int) -> int | None:
    """The largest size that the target model captured in some phases; the smallest such over ranks."""
    tops = [max(c.sizes) // width for c in captures if c.role == "target" and c.phase in phases and c.sizes]
    return min(tops) if tops else None


def decode_top(captures: Iterable[CaptureRecord], settings: dict[str, Any]) -> int | None:
    """The largest decode batch with a graph, in requests."""
    captures = list(captures)
    for phases in (("verify",), ("decode",)):
        top = _top(captures, phases, 1)
        if top is not None:
            return top
    whole = [c for c in captures if c.phase is None and c.sizes]
    if not whole:
        return None
    mode = settings.get("cudagraph_mode", "FULL_AND_PIECEWISE")
    if ROUTINES.get(mode, ("FULL", "FULL"))[0] == "NONE":
        return 0
    return max(whole[-1].sizes or (0,)) // (1 + int(settings.get("spec_tokens", 0)))


def _same_failure(known: Failure, new: Failure) -> bool:
    """A failure is printed several times: by the operation, in a traceback, by the server, with a rank or without."""
    alike = (known.kind, known.operation, known.asked_bytes) == (new.kind, new.operation, new.asked_bytes)
    return alike and (known.rank == new.rank or not known.rank or not new.rank)
