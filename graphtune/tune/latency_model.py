"""Step time of one decode step from measured points: looked up where measured, interpolated between, never beyond.

Graph figures are measured on full buckets. Padded rows hold one KV token each, so a bucket that serves fewer requests
reads only their KV: it is looked up at the context that gives a full bucket as many KV tokens in all. With one measured
context there is nothing to look between, and padded rows are charged as full ones.

Eager figures are graphtune's own eager path at the raw size, a lower bound of a server's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from graphtune.errors import Finding
from graphtune.results import CellResult, Execution
from graphtune.stats import COMBINED, Time, combined_us, process_medians

Provenance = Literal["measured", "interpolated"]


@dataclass(frozen=True)
class StepFigure:
    """One step time in microseconds and how it came about."""

    us: float
    provenance: Provenance


@dataclass(frozen=True)
class LatencyModel:
    """Measured medians by (execution, context, size) of one attention backend.

    ``statistic`` names what every figure is. ``cell_ids`` are the cells whose points are in it.
    """

    attention: str
    time: Time
    table: Mapping[tuple[Execution, int], Mapping[int, float]]
    cell_ids: tuple[str, ...]
    eager_overhead_us: float = 0.0
    statistic: str = COMBINED

    def contexts(self, execution: Execution = "graph") -> tuple[int, ...]:
        """Measured contexts in mean KV tokens per request, ascending."""
        return tuple(sorted(context for run, context in self.table if run == execution))

    def sizes(self, execution: Execution, context_tokens: int) -> tuple[int, ...]:
        """Sizes measured at exactly this context, ascending."""
        return tuple(sorted(self.table.get((execution, context_tokens), {})))

    def largest(self, execution: Execution, context_tokens: float) -> int:
        """The largest size with a figure at this context, measured or between contexts; 0 when there is none."""
        sizes = sorted({size for (run, _), column in self.table.items() if run == execution for size in column})
        return next((size for size in reversed(sizes) if self._at(execution, size, context_tokens) is not None), 0)

    @property
    def main_context(self) -> int:
        """The context with the most measured sizes, the smaller of two equals."""
        return max(self.contexts(), key=lambda context: (len(self.sizes("graph", context)), -context))

    def nearest_context(self, context_tokens: float) -> float:
        """The context itself inside the measured range, else the end of the range that is next to it."""
        measured = self.contexts()
        return min(max(context_tokens, measured[0]), measured[-1])

    def graph(self, padded_size: int, context_tokens: float) -> StepFigure | None:
        """Replay of a full bucket; None beyond the measured sizes and contexts."""
        return self._at("graph", padded_size, context_tokens)

    def replay(self, raw_size: int, padded_size: int, context_tokens: float) -> StepFigure | None:
        """Replay of the bucket ``padded_size`` for ``raw_size`` requests of ``context_tokens`` each.

        Contexts outside the measured ones are answered by the nearest; a spread context below those that the bucket
        was measured at, by the lowest of them. None beyond the measured sizes.
        """
        full = self.nearest_context(context_tokens)
        if raw_size == padded_size:
            return self.graph(padded_size, full)
        lowest = min((c for c in self.contexts() if self.graph(padded_size, c) is not None), default=full)
        figure = self.graph(padded_size, min(full, max(lowest, full * raw_size / padded_size)))
        return figure and StepFigure(figure.us, "interpolated")

    def eager(self, raw_size: int, context_tokens: float) -> StepFigure | None:
        """The eager step at ``raw_size``, with the eager overhead added; None beyond what was measured."""
        figure = self._at("eager", raw_size, context_tokens)
        return figure and StepFigure(figure.us + self.eager_overhead_us, figure.provenance)

    def _at(self, execution: Execution, size: int, context_tokens: float) -> StepFigure | None:
        """Linear between neighbours, first in size at each neighbouring context, then in context.

        A context that lacks the size (large batches at long contexts may not fit) counts as not measured there.
        """
        columns = {
            context: figure
            for context in self.contexts(execution)
            if (figure := self._in_size(execution, context, size)) is not None
        }
        return _between({context: figure.us for context, figure in columns.items()}, context_tokens, columns)

    def _in_size(self, execution: Execution, context: int, size: int) -> StepFigure | None:
        return _between(self.table[execution, context], size)


def _between(
    known: Mapping[int, float], at: float, figures: Mapping[int, StepFigure] | None = None
) -> StepFigure | None:
    """The value at ``at``: known, or on the line between the known neighbours; None outside them.

    A figure that rests on an interpolated one is interpolated too.
    """
    keys = sorted(known)
    right = bisect_left(keys, at)
    if right == len(keys) or at < keys[0]:
        return None
    inherited: Provenance = "measured"
    if figures is not None:
        used = keys[right : right + 1] if keys[right] == at else keys[right - 1 : right + 1]
        if any(figures[key].provenance == "interpolated" for key in used):
            inherited = "interpolated"
    if keys[right] == at:
        return StepFigure(known[keys[right]], inherited)
    low, high = keys[right - 1], keys[right]
    share = (at - low) / (high - low)
    return StepFigure(known[low] * (1 - share) + known[high] * share, "interpolated")


def latency_model(
    cells: Iterable[CellResult], *, time: Time = "step_us", eager_overhead_us: float = 0.0
) -> LatencyModel:
    """The model of a sweep's decode points, processes combined.

    When points of several attention backends are stored, the one with the most is taken. Raises Finding when no
    graph point was measured.
    """
    cells = tuple(cells)
    medians = {
        key: by
        for key, by in process_medians(cells, time).items()
        if key.phase == "decode" and key.raw_size == key.padded_size
    }
    graph_points = Counter(key.attention for key in medians if key.execution == "graph")
    if not graph_points:
        raise Finding(
            "no decode step on a graph was measured in this sweep",
            action="Run the sweep again with --retry-failed; the report names the cells that failed.",
        )
    attention = graph_points.most_common(1)[0][0]
    table: dict[tuple[Execution, int], dict[int, float]] = defaultdict(dict)
    for key, by in medians.items():
        if key.attention == attention:
            table[key.execution, key.context_tokens][key.padded_size] = combined_us(by)
    ids = tuple(cell.cell_id for cell in cells if any(point.attention == attention for point in cell.points))
    return LatencyModel(attention, time, dict(table), ids, eager_overhead_us)
