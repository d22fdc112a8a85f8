"""One eager step and one replay, kernel by kernel: the gaps of many launches against a single one."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphtune.figures.base import Column, Drawing, Key, Role, Table, color, drawing, quiet_grid, us_cell
from graphtune.results import CellResult, Phase, Timeline
from graphtune.units import format_us

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ZOOM_KERNELS = 24
"""Kernels of the eager step that the lower panel shows."""
PIXEL = 1 / 1000
"""Share of a panel: gaps below half of it are not drawn, and no span is drawn shorter, so that one launch is seen."""
NAME_LETTERS = 72

Spans = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Pair:
    """An eager step and a replay of the same batch in the same process."""

    eager: Timeline
    replay: Timeline

    @property
    def lines(self) -> tuple[tuple[str, Timeline], ...]:
        return (("eager", self.eager), ("replay", self.replay))


def timeline_pair(cells: Iterable[CellResult], phase: Phase = "decode") -> Pair | None:
    """The smallest batch whose timeline was stored both ways, from the first process that did."""
    for cell in cells:
        stored = sorted((one for one in cell.timelines if one.phase == phase), key=lambda one: one.size)
        for eager in stored:
            for replay in stored:
                at = (eager.size, eager.context_tokens)
                executions = (eager.execution, replay.execution)
                if executions == ("eager", "graph") and at == (replay.size, replay.context_tokens):
                    return Pair(eager, replay)
    return None


def kernel_spans(of: Timeline) -> list[tuple[float, float]]:
    """Start and length of every kernel, in µs."""
    return list(zip(of.starts_us, of.lengths_us, strict=True))


def call_spans(of: Timeline) -> list[tuple[float, float]]:
    """Start and length of every host call, in µs."""
    return list(zip(of.call_starts_us, of.call_lengths_us, strict=True))


def gaps(spans: Spans) -> list[float]:
    """Time in which none of the spans ran, one for each time that happens before a span starts."""
    found, reached = [], spans[0][0] if spans else 0.0
    for start, length in spans:
        if start > reached:
            found.append(start - reached)
        reached = max(reached, start + length)
    return found


def merged(spans: Spans, least_gap: float) -> list[tuple[float, float]]:
    """Spans with those joined that lie closer together than ``least_gap``; they ascend."""
    joined: list[list[float]] = []
    for start, length in spans:
        if joined and start - joined[-1][1] < least_gap:
            joined[-1][1] = max(joined[-1][1], start + length)
        else:
            joined.append([start, start + length])
    return [(start, end - start) for start, end in joined]


def draw_timeline(pair: Pair) -> Drawing:
    end = max(start + length for _, line in pair.lines for start, length in (kernel_spans(line) + call_spans(line)))
    zoom = _zoom(pair)

    def draw(figure: Figure, narrow: bool) -> None:
        whole, part = figure.subplots(2, 1)
        _panel(whole, pair, (0.0, end))
        whole.set_title("the whole step" if not (pair.eager.left_out or pair.replay.left_out) else "its first kernels")
        _panel(part, pair, zoom)
        part.set_title(f"{zoom[1] - zoom[0]:,.0f} µs of it")
        part.set_xlabel("µs")

    eager = pair.eager
    unit, context = ("new token", "cached before") if eager.phase == "prefill" else ("request", "KV tokens")
    batch = f"{eager.size:,} {unit}{'s' if eager.size > 1 else ''} with {eager.context_tokens:,} {context}"
    says = (
        f"A {eager.phase} step of {batch}, as the profiler saw it; under the profiler launching takes longer than "
        f"without. {_sentence('Eager', pair.eager)} {_sentence('Replay', pair.replay)} Where the row of the device is "
        "empty, it waits for the next launch."
    )
    if not pair.eager.call_starts_us:
        says += " The profiler of this machine saw no host calls, so their rows are empty."
    columns = ("kernels", "host calls", "in kernels, µs", "first to last kernel, µs", "gaps", "median gap, µs")
    table = Table(
        (
            Column("execution", numeric=False),
            *map(Column, columns),
            Column("longest gap, µs"),
            Column("kernels left out"),
        ),
        tuple(_row(name, line) for name, line in pair.lines),
    )
    keys = (Key("host call that launches", "c2", "box"), Key("kernel on the device", "c1", "box"))
    slug, title = f"timeline-{eager.phase}", f"A {eager.phase} step kernel by kernel"
    return drawing(slug, title, says, draw, table, keys, (420, 460), data=_every_span(pair))


def _zoom(pair: Pair) -> tuple[float, float]:
    """A stretch of some eager kernels from the middle of the shorter step, where both steps have work."""
    eager = pair.eager
    middle = min(line.starts_us[-1] for _, line in pair.lines) / 2
    count = len(eager.starts_us)
    first = min(sum(start < middle for start in eager.starts_us), count - 1)
    last = min(count - 1, first + ZOOM_KERNELS)
    return eager.starts_us[first], eager.starts_us[last] + eager.lengths_us[last]


def _panel(axes: Axes, pair: Pair, window: tuple[float, float]) -> None:
    quiet_grid(axes, "x")
    low, high = window
    labels: list[str] = []
    for name, line in pair.lines:
        rows: tuple[tuple[str, Role, Spans], ...] = (
            ("host", "c2", call_spans(line)),
            ("device", "c1", kernel_spans(line)),
        )
        for what, role, spans in rows:
            shown = [(start, length) for start, length in spans if start + length >= low and start <= high]
            pixel = (high - low) * PIXEL
            _bars(axes, len(labels), [(at, max(length, pixel)) for at, length in merged(shown, pixel / 2)], color(role))
            labels.append(f"{name}, {what}")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(low, high)


def _bars(axes: Axes, row: int, spans: Spans, fill: str) -> None:
    """All spans of a row as one path: hundreds of shapes of their own would be most of the page."""
    import numpy as np
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    low, high = row - 0.36, row + 0.36
    boxes = [((at, low), (at, high), (at + length, high), (at + length, low)) for at, length in spans]
    if boxes:
        axes.add_patch(PathPatch(Path.make_compound_path_from_polys(np.array(boxes)), color=fill, linewidth=0))


def _sentence(name: str, line: Timeline) -> str:
    between = gaps(kernel_spans(line))
    calls = len(line.call_starts_us)
    text = f"{name}: {len(line.kernels):,} kernels"
    if calls:
        text += f" from {calls:,} call{'s' if calls > 1 else ''} of the host"
    return f"{text}, with the device waiting {format_us(sum(between))} between them."


def _row(name: str, line: Timeline) -> tuple[str, ...]:
    spans = kernel_spans(line)
    between = gaps(spans)
    end = max(start + length for start, length in spans)
    whole = end - spans[0][0]
    return (
        name,
        f"{len(spans):,}",
        f"{len(line.call_starts_us):,}" if line.call_starts_us else us_cell(None),
        us_cell(whole - sum(between)),
        us_cell(whole),
        f"{len(between):,}",
        us_cell(statistics.median(between) if between else None),
        us_cell(max(between, default=None)),
        f"{line.left_out:,}",
    )


def _every_span(pair: Pair) -> Table:
    rows = []
    for name, line in pair.lines:
        rows += [(name, "host call", "", f"{start:.2f}", f"{length:.2f}") for start, length in call_spans(line)]
        rows += [
            (name, "kernel", short_name(line.names[at]), f"{start:.2f}", f"{length:.2f}")
            for at, (start, length) in zip(line.kernels, kernel_spans(line), strict=True)
        ]
    head = tuple(Column(title, numeric=False) for title in ("execution", "what", "name"))
    return Table((*head, Column("start, µs"), Column("length, µs")), tuple(rows))


def short_name(kernel: str) -> str:
    """A kernel's name without return type and template arguments, cut where it is still long."""
    bare = kernel.removeprefix("void ")
    while (shorter := re.sub(r"<[^<>]*>", "", bare)) != bare:
        bare = shorter
    bare = bare.split("(")[0].strip() or kernel
    return bare if len(bare) <= NAME_LETTERS else bare[: NAME_LETTERS - 1] + "…"
