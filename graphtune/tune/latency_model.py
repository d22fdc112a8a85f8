"""Step time of one decode step from measured points: looked up where measured, interpolated between, never beyond.

A step is its device time and the host's part, which is made steady over sizes (``host_part``).

A size is measured at the main context, most are at no other. Which kernels it runs shows at any context, what its KV
tokens cost changes smoothly with size: at another context it is its figure at the main one and the difference that
context makes to the measured sizes around it.

A batch that does not fill its bucket takes what as many requests in a bucket of their own take, and what padding adds
to their device time (``padded_times``); at most what the full bucket takes. Where a sweep holds no padded steps, padded
rows are charged as full ones.

Eager figures are graphtune's own eager path at the raw size, a lower bound of a server's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from graphtune.errors import Finding
from graphtune.results import CellResult, Execution
from graphtune.stats import COMBINED, STEADIED, Median, PointKey, Time, all_medians, combined_us, undisturbed
from graphtune.tune.host_part import only_disturbed, steadied
from graphtune.tune.padded_times import PaddedTimes
from graphtune.tune.stand_ins import with_stand_ins

Provenance = Literal["measured", "interpolated"]

LEAST_SHARE = 0.5
"""Kernels make no size take less than this share of what a line between its neighbours says, and no bucket take a batch
in less than this share of what one of its own size does."""


class StepFigure(NamedTuple):
    """One step time in microseconds and how it came about. ``own`` is the share of it that no other process stood in
    for."""

    us: float
    provenance: Provenance
    own: float = 1.0


class At(NamedTuple):
    """One entry of a model's table."""

    execution: Execution
    context_tokens: int
    size: int


@dataclass(frozen=True)
class LatencyModel:
    """Medians by (execution, context, size) of one attention backend and one graph backend.

    ``statistic`` names what every figure is. ``cell_ids`` are the cells whose points are in it. ``processes`` holds the
    same points as each process measured them; ``stood_in`` are those of a process that others stood in for,
    ``disturbed`` those that count as measured while something disturbed them.
    """

    attention: str
    backend: str
    time: Time
    table: Mapping[tuple[Execution, int], Mapping[int, float]]
    cell_ids: tuple[str, ...]
    eager_overhead_us: float = 0.0
    statistic: str = COMBINED
    padded: PaddedTimes | None = None
    processes: Mapping[int, LatencyModel] = field(default_factory=dict)
    stood_in: frozenset[At] = frozenset()
    disturbed: frozenset[At] = frozenset()

    def contexts(self, execution: Execution = "graph") -> tuple[int, ...]:
        """Measured contexts in mean KV tokens per request, ascending."""
        return self._contexts[execution]

    def sizes(self, execution: Execution, context_tokens: int) -> tuple[int, ...]:
        """Sizes measured at exactly this context, ascending."""
        return tuple(sorted(self.table.get((execution, context_tokens), {})))

    def largest(self, execution: Execution, context_tokens: float) -> int:
        """The largest size with a figure at this context, measured or between contexts; 0 when there is none."""
        sizes = sorted({size for (run, _), column in self.table.items() if run == execution for size in column})
        return next((size for size in reversed(sizes) if self._at(execution, size, context_tokens) is not None), 0)

    @property
    def largest_size(self) -> int:
        """The largest batch that was measured at any context, on a graph or eager."""
        return max(size for column in self.table.values() for size in column)

    @property
    def main_context(self) -> int:
        """The context with the most measured sizes, the smaller of two equals."""
        return self._main_contexts["graph"]

    def nearest_context(self, context_tokens: float) -> float:
        """The context itself inside the measured range, else the end of the range that is next to it."""
        measured = self.contexts()
        return min(max(context_tokens, measured[0]), measured[-1])

    def graph(self, padded_size: int, context_tokens: float) -> StepFigure | None:
        """Replay of a full bucket; None beyond the measured sizes and contexts."""
        return self._at("graph", padded_size, context_tokens)

    def replay(
        self, raw_size: int, padded_size: int, context_tokens: float, padded: PaddedTimes | None = None
    ) -> StepFigure | None:
        """Replay of the bucket ``padded_size`` for ``raw_size`` requests of ``context_tokens`` each.

        Contexts outside the measured ones are answered by the nearest. None beyond the measured sizes. ``padded`` are
        other times of padded replays than the model's.
        """
        context = self.nearest_context(context_tokens)
        full = self.graph(padded_size, context)
        if raw_size == padded_size:
            return full
        own = self.graph(raw_size, context)
        padded = padded or self.padded
        extra_us = padded.extra_us(raw_size, padded_size) if padded else None
        if own is None or extra_us is None:
            return full and full._replace(provenance="interpolated")
        us = max(own.us + extra_us, LEAST_SHARE * own.us)
        if full is not None and full.us < us:
            return full._replace(provenance="interpolated")
        return own._replace(us=us, provenance="interpolated")

    def knows_padding(self, raw_size: int, padded_size: int) -> bool:
        """False where padded rows are charged as full ones."""
        return self.padded is not None and self.padded.extra_us(raw_size, padded_size) is not None

    def step(self, raw_size: int, bucket: int | None, context_tokens: float) -> StepFigure | None:
        """The step of ``raw_size`` requests of ``context_tokens`` each in ``bucket``, or eager where it is None.

        Contexts outside the measured ones are answered by the nearest. Each is worked out once.
        """
        key = (raw_size, bucket, context_tokens)
        if key not in self._steps:
            self._steps[key] = (
                self.eager(raw_size, self.nearest_context(context_tokens))
                if bucket is None
                else self.replay(raw_size, bucket, context_tokens)
            )
        return self._steps[key]

    def without(self, size: int, context_tokens: int) -> LatencyModel:
        """The model without the graph figure of a size at a measured context, to see how well the others tell it."""
        at: tuple[Execution, int] = ("graph", context_tokens)
        left = {other: us for other, us in self.table[at].items() if other != size}
        table = {**self.table, at: left}
        return replace(self, table={key: column for key, column in table.items() if column}, processes={})

    def eager(self, raw_size: int, context_tokens: float) -> StepFigure | None:
        """The eager step at ``raw_size``, with the eager overhead added; None beyond what was measured."""
        figure = self._at("eager", raw_size, context_tokens)
        return figure and figure._replace(us=figure.us + self.eager_overhead_us)

    def _at(self, execution: Execution, size: int, context_tokens: float) -> StepFigure | None:
        """Between neighbours, first in size at each neighbouring context, then in context.

        A context that lacks the size (large batches at long contexts may not fit) counts as not measured there.
        """
        key = (execution, size)
        if key not in self._by_size:
            self._by_size[key] = {
                context: figure
                for context in self.contexts(execution)
                if (figure := self._at_measured(execution, size, context)) is not None
            }
        return between(self._by_size[key], context_tokens)

    def _at_measured(self, execution: Execution, size: int, context: int) -> StepFigure | None:
        """A size at a measured context: as measured, else by what that context makes different, else linear in size."""
        column = self._columns[execution, context]
        if size in column:
            return column[size]
        linear = between(column, size)
        base = between(self._columns[execution, self._main_contexts[execution]], size)
        difference = between(self._differences[execution, context], size)
        if linear is None or base is None or difference is None:
            return linear
        us = max(base.us + difference.us, LEAST_SHARE * linear.us)
        return StepFigure(us, "interpolated", min(base.own, difference.own))

    @cached_property
    def _main_contexts(self) -> dict[Execution, int]:
        """The context with the most measured sizes, the smaller of two equals."""
        return {
            run: max(contexts, key=lambda context: (len(self.table[run, context]), -context))
            for run, contexts in self._contexts.items()
            if contexts
        }

    @cached_property
    def _contexts(self) -> dict[Execution, tuple[int, ...]]:
        runs: tuple[Execution, ...] = ("graph", "eager")
        return {run: tuple(sorted(context for other, context in self.table if other == run)) for run in runs}

    @cached_property
    def _steps(self) -> dict[tuple[int, int | None, float], StepFigure | None]:
        return {}

    @cached_property
    def _columns(self) -> dict[tuple[Execution, int], dict[int, StepFigure]]:
        return {
            (run, context): {
                size: StepFigure(us, "measured", float(At(run, context, size) not in self.stood_in))
                for size, us in sorted(column.items())
            }
            for (run, context), column in self.table.items()
        }

    @cached_property
    def _differences(self) -> dict[tuple[Execution, int], dict[int, StepFigure]]:
        """What each context adds to the main one, at the sizes measured at it that the main one tells of."""
        mains = {run: self._columns[run, context] for run, context in self._main_contexts.items()}
        return {
            (run, context): {
                size: StepFigure(one.us - main.us, one.provenance, min(one.own, main.own))
                for size, one in column.items()
                if (main := between(mains[run], size)) is not None
            }
            for (run, context), column in self._columns.items()
        }

    @cached_property
    def _by_size(self) -> dict[tuple[Execution, int], dict[int, StepFigure]]:
        """Figures by context for each size asked so far, contexts ascending."""
        return {}


def between(figures: Mapping[int, StepFigure], at: float) -> StepFigure | None:
    """The figure at ``at``, or on the line between its neighbours; None outside. Keys ascend."""
    keys = list(figures)
    right = bisect_left(keys, at)
    if right == len(keys) or at < keys[0]:
        return None
    if keys[right] == at:
        return figures[keys[right]]
    low, high = figures[keys[right - 1]], figures[keys[right]]
    share = (at - keys[right - 1]) / (keys[right] - keys[right - 1])
    own = low.own * (1 - share) + high.own * share
    return StepFigure(low.us * (1 - share) + high.us * share, "interpolated", own)


def latency_model(
    cells: Iterable[CellResult], *, time: Time = "step_us", eager_overhead_us: float = 0.0
) -> LatencyModel:
    """The model of a sweep's decode points, processes combined.

    When points of several attention backends are stored, the one with the most is taken; of several graph backends the
    one whose replays take least. Raises Finding when no graph point was measured.
    """
    cells = tuple(cells)
    medians = {key: by for key, by in _decode_medians(cells, time).items() if key.raw_size == key.padded_size}
    graph_points = Counter(key.attention for key in medians if key.execution == "graph")
    if not graph_points:
        raise Finding(
            "no decode step on a graph was measured in this sweep",
            action="Run the sweep again with --retry-failed; the report names the cells that failed.",
        )
    attention = graph_points.most_common(1)[0][0]
    backend = _fastest_backend({key: by for key, by in medians.items() if key.attention == attention})

    def counts(key: PointKey) -> bool:
        return key.attention == attention and (key.execution == "eager" or key.backend == backend)

    measured = {_at_of(key): by for key, by in medians.items() if counts(key)}
    device = {key: by for key, by in _decode_medians(cells, "gpu_us").items() if counts(key)}
    padded = _padded_times(device)
    if time == "step_us":
        known = steadied(measured, {_at_of(key): by for key, by in device.items() if key.raw_size == key.padded_size})
    else:
        known = {at: undisturbed(by) for at, by in measured.items()}
    complete = with_stand_ins(known, kind=lambda at: at.execution)
    disturbed = frozenset(at for at, by in measured.items() if only_disturbed(by, known[at]))
    ids = tuple(cell.cell_id for cell in cells if any(point.attention == attention for point in cell.points))

    processes = {
        process: LatencyModel(
            attention,
            backend,
            time,
            _table({at: by[process] for at, by in complete.items()}),
            ids,
            eager_overhead_us,
            padded=padded,
            stood_in=frozenset(at for at, by in known.items() if process not in by),
        )
        for process in sorted({process for by in known.values() for process in by})
    }
    combined = _table({at: combined_us(by) for at, by in complete.items()})
    statistic = STEADIED if time == "step_us" else COMBINED
    return LatencyModel(
        attention, backend, time, combined, ids, eager_overhead_us, statistic, padded, processes, disturbed=disturbed
    )


def _fastest_backend(medians: Mapping[PointKey, Mapping[int, Median]]) -> str:
    """Of the graph backends the one whose replays take least where all were timed; the one timed most where no step is
    common to all."""
    found: dict[str, dict[At, float]] = defaultdict(dict)
    for key, by in medians.items():
        if key.execution == "graph":
            found[key.backend][_at_of(key)] = combined_us(undisturbed(by))
    common = set.intersection(*(set(times) for times in found.values()))
    if not common:
        return max(found, key=lambda backend: len(found[backend]))
    return min(found, key=lambda backend: sum(math.log(found[backend][at]) for at in common))


def _decode_medians(cells: Iterable[CellResult], time: Time) -> dict[PointKey, dict[int, Median]]:
    return {key: by for key, by in all_medians(cells, time).items() if key.phase == "decode"}


def _padded_times(device: Mapping[PointKey, Mapping[int, Median]]) -> PaddedTimes | None:
    """What padding takes at the context with the most padded replays, of the processes that timed any there: against
    the same processes' full buckets."""
    graphs = {key: by for key, by in device.items() if key.execution == "graph"}
    contexts = Counter(key.context_tokens for key in graphs if key.raw_size < key.padded_size)
    if not contexts:
        return None
    context = contexts.most_common(1)[0][0]
    here = {(key.padded_size, key.raw_size): by for key, by in graphs.items() if key.context_tokens == context}
    processes = {process for (bucket, raw), by in here.items() if raw < bucket for process in by}
    times: dict[int, dict[int, float]] = defaultdict(dict)
    for (bucket, raw), by in here.items():
        if same := {process: median for process, median in by.items() if process in processes}:
            times[bucket][raw] = combined_us(undisturbed(same))
    full = {bucket: column[bucket] for bucket, column in times.items() if bucket in column}
    padded = {bucket: {raw: us for raw, us in column.items() if raw < bucket} for bucket, column in times.items()}
    found = PaddedTimes(context, full, padded)
    return found if found.buckets else None


def _table(figures: Mapping[At, float]) -> dict[tuple[Execution, int], dict[int, float]]:
    table: dict[tuple[Execution, int], dict[int, float]] = defaultdict(dict)
    for at, us in figures.items():
        table[at.execution, at.context_tokens][at.size] = us
    return dict(table)


def _at_of(key: PointKey) -> At:
    return At(key.execution, key.context_tokens, key.padded_size)
