"""The page of a comparison: one self-contained HTML file that looks like a sweep's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graphtune import __version__
from graphtune.compare.figures import headline, interval_text, omissions, ratio_text, side_text, title, value_text
from graphtune.compare.model import Comparison, Row
from graphtune.figures.base import Column, Drawing, Key, Role, Table, color, drawing, quiet_grid
from graphtune.figures.glossary import table_text, words_in
from graphtune.html_page import render_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATE = "compare.html.j2"
ROLES: dict[str, Role] = {"graph": "c1", "breakable": "c1", "full": "c3", "eager": "c2"}
QUANTITIES = {"step_us": "Step time", "gpu_us": "Device time", "host_us": "Host time", "overlap_us": "Overlapped step"}


def render(comparison: Comparison) -> str:
    """The page as text."""
    return render_page(TEMPLATE, page(comparison))


def page(comparison: Comparison) -> dict[str, Any]:
    """Everything that the template shows, as plain data."""
    worse = tuple(row for row in comparison.rows if row.worse or row.lost)
    drawings = tuple(_drawings(comparison))
    said = [comparison.method, table_text(row_table(comparison.rows)), table_text(_means(comparison))]
    return {
        "version": __version__,
        "title": title(comparison),
        "headline": headline(comparison),
        "good": not worse,
        "sides": (side_text(comparison, base=True), side_text(comparison, base=False)),
        "omissions": omissions(comparison),
        "method": comparison.method,
        "tested": comparison.tested,
        "worst": row_table(comparison.worst()),
        "means": _means(comparison),
        "drawings": drawings,
        "words_used": words_in("\n".join([*said, *(one.says for one in drawings)])),
        "growth": comparison.growth,
        "changes": _changes(comparison),
        "notes": comparison.notes,
        "tables": tuple(
            (verdict, row_table([row for row in comparison.rows if row.verdict == verdict]))
            for verdict in comparison.counts
        ),
    }


def row_table(rows: Sequence[Row]) -> Table:
    """Rows as text, the answer first, so that a phone shows it."""
    columns = (
        Column("what", numeric=False),
        Column("ratio"),
        Column("verdict", numeric=False),
        Column("interval"),
        Column("base"),
        Column("new"),
        Column("processes"),
        Column("reason", numeric=False),
    )
    shown = tuple(
        (
            row.name,
            ratio_text(row.ratio),
            row.verdict,
            interval_text(row),
            value_text(row.what.kind, row.base),
            value_text(row.what.kind, row.new),
            f"{row.base_processes} + {row.new_processes}",
            row.reason or "",
        )
        for row in rows
    )
    if not any(row.reason for row in rows):
        return Table(columns[:-1], tuple(row[:-1] for row in shown))
    return Table(columns, shown)


def _means(comparison: Comparison) -> Table:
    columns = (Column("group", numeric=False), Column("ratio"), Column("rows"))
    return Table(columns, tuple((m.group, ratio_text(m.ratio), f"{m.rows}") for m in comparison.means()))


def _changes(comparison: Comparison) -> Table:
    columns = tuple(Column(name, numeric=False) for name in ("what", "base", "new"))
    return Table(columns, tuple((one.what, one.base, one.new) for one in comparison.changes))


def _drawings(comparison: Comparison) -> list[Drawing]:
    """One figure for each phase, quantity, context and number of requests: ratio over size with its interval."""
    found: dict[tuple[str, str, int, int | None], list[Row]] = defaultdict(list)
    for row in comparison.rows:
        what = row.what
        if what.kind == "time" and row.ratio is not None and what.raw_size == what.padded_size:
            found[what.phase, what.quantity, what.context_tokens or 0, what.requests].append(row)
    drawable = {key: rows for key, rows in found.items() if len({row.what.raw_size for row in rows}) > 1}
    return [_draw_ratios(*key, rows) for key, rows in drawable.items()]


def _draw_ratios(phase: str, quantity: str, context: int, requests: int | None, rows: Sequence[Row]) -> Drawing:
    by_execution: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.what.raw_size or 0):
        several = phase == "prefill" and row.what.execution == "graph"
        by_execution[(row.what.backend if several else row.what.execution) or ""].append(row)
    noun = "tokens" if phase == "prefill" else "requests"

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        quiet_grid(axes)
        axes.axhline(1, color=color("muted"), linewidth=1)
        sizes = sorted({row.what.raw_size or 0 for row in rows})
        places = {size: place for place, size in enumerate(sizes)}
        for index, (execution, some) in enumerate(by_execution.items()):
            shift = 0.24 * (index - (len(by_execution) - 1) / 2)
            role = color(ROLES.get(execution, "c3"))
            at = [places[row.what.raw_size or 0] + shift for row in some]
            ratios = [row.ratio or 1.0 for row in some]
            lows = [
                ratio - max(row.low if row.low is not None else ratio, 0.5)
                for row, ratio in zip(some, ratios, strict=True)
            ]
            highs = [
                min(row.high if row.high is not None else ratio, 2.0) - ratio
                for row, ratio in zip(some, ratios, strict=True)
            ]
            bars = [[max(0.0, low) for low in lows], [max(0.0, high) for high in highs]]
            axes.errorbar(at, ratios, yerr=bars, fmt="o", color=role, markersize=4, elinewidth=1.2, capsize=0)
        every = max(1, -(-len(sizes) // (6 if narrow else 14)))
        axes.set_xticks(range(0, len(sizes), every), [f"{size}" for size in sizes[::every]])
        axes.set_xlabel(noun)
        axes.set_ylabel("new / base")

    keys = [Key(name, ROLES.get(name, "c3"), "dot") for name in by_execution]
    name = QUANTITIES.get(quantity, quantity)
    says = (
        f"Ratio of {quantity} by {noun}, new over base; bars are the corrected intervals, cut at half and double. A "
        "row is called when its whole bar lies beyond the tolerance."
    )
    at = f"{context:,} KV tokens"
    if phase == "prefill":
        at = f"{requests or 1} request{'s' if (requests or 1) > 1 else ''}, {context:,} cached tokens each"
    slug = f"ratio-{phase}-{quantity.replace('_', '-')}-{context}-{requests or 0}"
    heading = f"{name}, {phase} at {at}"
    return drawing(slug, heading, says, draw, row_table(rows), keys, (300, 280))
