"""Workloads from what servers print about their batches, weighted as they print it.

SGLang prints a decode line every so many iterations (40 unless told otherwise), TensorRT-LLM one per step, vLLM a
reading every ten seconds and, when asked to, tables that count every step. Those are different things: a log's tables
are used where it has some and its readings otherwise, never both, and logs of two kinds are not added up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from graphtune.engines import events as ev
from graphtune.engines.log_lines import open_log
from graphtune.engines.log_reader import LogReader
from graphtune.engines.sglang.log import DECODE_LOG_INTERVAL
from graphtune.errors import InputError
from graphtune.tune.workload import DecodeShare, PrefillShare, Weighting, Workload

LIMIT_SETTINGS = ("max_running_requests", "max_num_seqs", "max_num_requests", "max_batch_size")
CHUNK_SETTINGS = ("chunked_prefill_size", "max_num_batched_tokens", "max_num_tokens")


@dataclass(frozen=True)
class LoggedWorkload:
    """A workload with what its log says about it. ``captured`` is the decode list that the watched server had, None
    where the log does not say; ``notes`` are for the reader."""

    workload: Workload
    captured: tuple[int, ...] | None
    notes: tuple[str, ...]


@dataclass
class _Tally:
    """One log in work. Weights are in what ``weighting`` says."""

    name: str
    engine: str | None = None
    weights: Counter[int] = field(default_factory=Counter)
    kv: dict[int, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))
    intervals: set[tuple[str, float]] = field(default_factory=set)
    ranks: set[str] = field(default_factory=set)
    by_graph: Counter[bool] = field(default_factory=Counter)
    above_top: float = 0.0
    steps: Counter[tuple[int, str]] = field(default_factory=Counter)
    prefill: Counter[int] = field(default_factory=Counter)
    listed: tuple[int, ...] | None = None
    in_tokens: bool = False
    settings: dict[str, object] = field(default_factory=dict)
    idle: int = 0
    sums: int = 0
    boots: int = 0
    lines_skipped: int = 0
    lines: int = 0

    def add(self, event: ev.Event) -> None:
        match event:
            case ev.Running():
                self._running(event)
            case ev.Prefill():
                self.prefill[event.tokens] += 1
            case ev.Step():
                self.steps[event.tokens, event.mode] += event.steps
            case ev.Boot() | ev.Settings():
                values = event.settings if isinstance(event, ev.Boot) else event.values
                self.settings |= values
                listed = values.get("cudagraph_capture_sizes")
                if listed:
                    self.listed, self.in_tokens = tuple(sorted(listed)), True
            case ev.CaptureBegin() if event.role == "target" and event.phase == "decode" and event.sizes:
                self.listed = tuple(sorted(event.sizes))
                self.in_tokens = event.unit == "tokens"

    def _running(self, event: ev.Running) -> None:
        if event.aggregated:
            self.sums += 1
        elif event.requests < 1:
            self.idle += 1
        else:
            self.weights[event.requests] += event.weight  # type: ignore[assignment]
            self.intervals.add((event.weighting, event.weight))
            self.ranks.add(event.rank)
            if event.graph is not None:
                self.by_graph[event.graph] += event.weight  # type: ignore[assignment]
            elif (captured := self.captured) and event.requests > captured[-1]:
                self.above_top += event.weight
            if event.tokens:
                sums = self.kv[event.requests]
                sums[0] += event.weight * event.tokens
                sums[1] += event.weight * event.requests

    @property
    def width(self) -> int:
        """Rows of one decode request."""
        spec = self.settings.get("spec_tokens")
        return 1 + (spec if isinstance(spec, int) else 0)

    @property
    def captured(self) -> tuple[int, ...] | None:
        """The decode list in requests, None where the log does not say."""
        if self.listed is None or not self.in_tokens:
            return self.listed
        return tuple(sorted({size // self.width for size in self.listed if size >= self.width}))

    @property
    def limit(self) -> int | None:
        return _setting(self.settings, LIMIT_SETTINGS)


def _setting(values: dict[str, object], names: Sequence[str]) -> int | None:
    return next((v for name in names if isinstance(v := values.get(name), int) and v > 0), None)


def from_logs(names: Sequence[str], engine: str | None = None) -> LoggedWorkload:
    """The workload of one or more logs of one kind; ``-`` is standard input.

    Raises InputError when a log holds no batches, or when two of them are weighted differently.
    """
    read = [_with_batches(_read(name, engine)) for name in names]
    kinds = {kind for kind, *_ in read}
    if len(kinds) > 1:
        raise InputError(
            f"the logs count different things ({', '.join(sorted(kinds))}) and cannot be added up",
            action="Make a workload of each.",
        )
    weighting = read[0][1]
    weights: Counter[int] = Counter()
    prefill: Counter[int] = Counter()
    kv: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for _, _, decode_of, prefill_of, tally in read:
        weights.update(decode_of)
        prefill.update(prefill_of)
        for size, (tokens, requests) in tally.kv.items():
            kv[size][0] += tokens
            kv[size][1] += requests
    tallies = [tally for *_, tally in read]
    decode = tuple(
        DecodeShare(size, float(weights[size]), max(1.0, kv[size][0] / kv[size][1]) if kv[size][1] else None)
        for size in sorted(weights)
    )
    limits = [tally.limit for tally in tallies]
    largest = max(weights, default=1)
    notes = tuple(note for tally in tallies for note in _notes(tally))
    inflated = [note for note in notes if "inflated" in note]
    lists = {tally.captured for tally in tallies}
    return LoggedWorkload(
        Workload(
            decode=decode,
            prefill=tuple(PrefillShare(tokens, float(prefill[tokens])) for tokens in sorted(prefill)),
            max_running_requests=max([largest, *(limit for limit in limits if limit is not None)]),
            chunk_size=next((c for t in tallies if (c := _setting(t.settings, CHUNK_SETTINGS))), None),
            source="; ".join([f"{', '.join(Path(name).name for name in names)} ({read[0][0]})", *inflated]),
            weighting=weighting,
            lines_skipped=sum(tally.lines_skipped for tally in tallies),
        ),
        lists.pop() if len(lists) == 1 else None,
        notes,
    )


def _read(name: str, engine: str | None) -> _Tally:
    reader, tally = LogReader(engine), _Tally(name)
    with open_log(name) as stream:
        for event in reader.events(stream):
            tally.add(event)
    tally.engine, tally.lines, tally.boots = reader.engine, reader.lines, reader.boots
    tally.lines_skipped = sum(reader.skipped.values())
    return tally


def _with_batches(tally: _Tally) -> tuple[str, Weighting, Counter[int], Counter[int], _Tally]:
    """What kind of counts a log holds, in words and as a weighting; decode and prefill counts."""
    if tally.steps:
        decode, prefill = _split_steps(tally)
        if decode or prefill:
            return f"{tally.engine}, every step", "per_step", decode, prefill, tally
    if not tally.weights:
        what = "only readings of an idle server" if tally.idle else "no batch lines"
        raise InputError(
            f"{what} in {tally.lines:,} lines",
            where=tally.name,
            action="Log a server under load: SGLang's decode lines, vLLM's stats or step tables, TensorRT-LLM's "
            "iteration log.",
        )
    kinds = {kind for kind, _ in tally.intervals}
    if kinds == {"seconds"}:
        return f"{tally.engine}, 10-second snapshots", "per_second", tally.weights, tally.prefill, tally
    spacing = sorted({int(weight) for _, weight in tally.intervals})
    if spacing == [1]:
        return f"{tally.engine}, every step", "per_step", tally.weights, tally.prefill, tally
    words = " and ".join(f"every {interval}th iteration" for interval in spacing)
    usual = spacing == [DECODE_LOG_INTERVAL]
    return f"{tally.engine}, {words}", "every_40th_step" if usual else "per_step", tally.weights, tally.prefill, tally


def _split_steps(tally: _Tally) -> tuple[Counter[int], Counter[int]]:
    """Steps of a table as decode steps in requests, and as prefill or mixed steps in tokens.

    A table counts tokens. Full graphs are of decode steps; in their absence (graphs off, or cut at attention for
    everything) steps of no more tokens than the server runs requests are taken as decode. Raises InputError when
    neither tells them apart.
    """
    width = tally.width
    full = any(mode == "FULL" for _, mode in tally.steps)
    limit = tally.limit
    if not full and limit is None:
        raise InputError(
            "its step table does not tell decode steps from prefill steps, nor does the log say max_num_seqs",
            where=tally.name,
        )
    decode: Counter[int] = Counter()
    prefill: Counter[int] = Counter()
    for (tokens, mode), steps in tally.steps.items():
        small = limit is not None and tokens <= limit * width
        if tokens < 1:
            tally.idle += steps
        elif mode == "FULL" or (small and (mode == "NONE" or not full)):
            decode[-(-tokens // width)] += steps
            tally.by_graph[mode != "NONE"] += steps
        else:
            prefill[tokens] += steps
    return decode, prefill


def _notes(tally: _Tally) -> list[str]:
    """What a reader of the workload has to know about this log."""
    notes = []
    told = tally.by_graph[True] + tally.by_graph[False]
    total = told or sum(tally.weights.values())
    off = (tally.by_graph[False] if told else tally.above_top) / total if total else 0.0
    if off > 0:
        top = f" (its largest graph is {tally.captured[-1]})" if tally.captured else ""
        notes.append(
            f"inflated: {off:.0%} of what it counts ran without a graph{top}, and slow steps let batches pile up; "
            "measure again once graphs cover them"
        )
    if len(tally.ranks) > 1:
        notes.append(f"{len(tally.ranks)} ranks print batches; each reading is one rank's. Ranks that gather: --dp")
    if tally.boots > 1:
        notes.append(f"{tally.boots} starts of the server in one log are read as one traffic")
    if tally.idle:
        notes.append(f"{tally.idle:,} readings of an idle server left out")
    if tally.sums:
        notes.append(f"{tally.sums:,} sums over engines left out: they are no batch sizes")
    if tally.steps and tally.weights:
        notes.append("step tables used; the periodic readings beside them are left out")
    return [f"{Path(tally.name).name}: {note}" for note in notes]
