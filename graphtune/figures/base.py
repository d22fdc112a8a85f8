"""How figures are made: a plain data object is drawn twice, for wide and for narrow pages, as inline SVG.

Colours are roles. They are drawn as placeholder colours and replaced by CSS variables, so that one drawing serves
light, dark and printed pages. Text stays text and takes the page's font.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from markupsafe import Markup, escape

from graphtune.results import CaptureList
from graphtune.units import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Role = Literal["ink", "muted", "grid", "page", "soft", "c1", "c2", "c3", "c4", "c5", "c6", "c7"]
Mark = Literal["line", "dash", "dot", "box", "cross"]

PLACEHOLDERS: dict[Role, str] = {
    "ink": "#0a0a01",
    "muted": "#0a0a02",
    "grid": "#0a0a03",
    "page": "#0a0a04",
    "soft": "#0a0a05",
    "c1": "#0a0a11",
    "c2": "#0a0a12",
    "c3": "#0a0a13",
    "c4": "#0a0a14",
    "c5": "#0a0a15",
    "c6": "#0a0a16",
    "c7": "#0a0a17",
}

WIDE_PX, NARROW_PX = 920, 360
MISSING = "–"
"""A table cell for a figure that is not known."""

SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 13,
    "axes.titlesize": 13,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelsize": 13,
    "axes.labelcolor": PLACEHOLDERS["muted"],
    "axes.edgecolor": PLACEHOLDERS["grid"],
    "axes.titlecolor": PLACEHOLDERS["ink"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PLACEHOLDERS["grid"],
    "grid.linewidth": 0.8,
    "text.color": PLACEHOLDERS["ink"],
    "xtick.color": PLACEHOLDERS["grid"],
    "ytick.color": PLACEHOLDERS["grid"],
    "xtick.labelcolor": PLACEHOLDERS["muted"],
    "ytick.labelcolor": PLACEHOLDERS["muted"],
    "xtick.labelsize": 12,
    "ytick.labelsize": 12,
    "ytick.major.size": 0,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Column:
    """A column of a table; its title names unit and statistic."""

    title: str
    numeric: bool = True


@dataclass(frozen=True)
class Table:
    """Rows of text, ready to show."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class NamedTable:
    """A table with its own heading and a sentence that says what it shows. ``folded``: shown on demand."""

    title: str
    says: str
    table: Table
    folded: bool = False


@dataclass(frozen=True)
class Key:
    """One entry of a legend."""

    label: str
    role: Role
    mark: Mark = "line"


@dataclass(frozen=True)
class Drawing:
    """A figure on the page: ``says`` is the sentence under it, ``table`` holds the same data as figures.

    ``data`` is what the CSV holds; it has more rows than ``table`` where that would be too long to read.
    """

    slug: str
    title: str
    says: str
    keys: tuple[Key, ...]
    wide: Markup
    narrow: Markup
    table: Table
    data: Table


Draw = Callable[["Figure", bool], None]


def color(role: Role) -> str:
    """The placeholder to draw ``role`` with."""
    return PLACEHOLDERS[role]


def drawing(
    slug: str,
    title: str,
    says: str,
    draw: Draw,
    table: Table,
    keys: Sequence[Key] = (),
    height_px: tuple[int, int] = (340, 300),
    data: Table | None = None,
) -> Drawing:
    """Draw wide and narrow. ``draw(figure, narrow)`` gets an empty figure; heights are for wide and narrow.

    ``data`` is for the CSV, the table where it is left out.
    """
    wide = _svg(draw, f"{slug}-wide", title, WIDE_PX, height_px[0], narrow=False)
    narrow = _svg(draw, f"{slug}-narrow", title, NARROW_PX, height_px[1], narrow=True)
    return Drawing(slug, title, says, tuple(keys), wide, narrow, table, data or table)


def _svg(draw: Draw, salt: str, title: str, width_px: int, height_px: int, *, narrow: bool) -> Markup:
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {**SETTINGS, "svg.hashsalt": salt}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width_px / 72, height_px / 72), layout="constrained")
        draw(figure, narrow)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return Markup(_inline(out.getvalue(), title))


def _inline(svg: str, title: str) -> str:
    """The drawing without what a page does not need, in CSS colours, with a name for screen readers."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r"(\d\.\d\d)\d+", r"\1", body)
    body = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+|\n", r"\1", path[0]), body)
    body = re.sub(r" font-family: [^;\"]+;| transform=\"rotate\(-0 [^\"]*\"", "", body)
    body = re.sub(r">\s+<", "><", body)
    for role, placeholder in PLACEHOLDERS.items():
        body = body.replace(placeholder, f"var(--{role})")
    body = re.sub(r' (?:width|height)="[\d.]+pt"', "", body, count=2)
    return body.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)


def request_axis(axes: Axes, sizes: Sequence[int], *, narrow: bool) -> None:
    """A log2 axis of requests with plain numbers, ending where the sizes end."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    low, high = min(sizes), max(sizes)
    powers = [1 << bit for bit in range(high.bit_length() + 1) if low <= 1 << bit <= high]
    if narrow and len(powers) > 6:
        powers = powers[::2]
    axes.xaxis.set_major_locator(FixedLocator(powers or [low]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("requests")


def upright(places: Sequence[float], low: float, high: float) -> tuple[list[float], list[float]]:
    """Upright lines from ``low`` to ``high`` at some places, as one broken line: a single shape on the page."""
    gap = float("nan")
    return [x for place in places for x in (place, place, gap)], [low, high, gap] * len(places)


def quiet_grid(axes: Axes, axis: Literal["x", "y"] = "y") -> None:
    """Grid lines along one axis only."""
    axes.grid(False)
    axes.grid(True, axis=axis)


def us_cell(value: float | None) -> str:
    """A table cell in microseconds."""
    return MISSING if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def with_curves(table: Table, curves: Mapping[str, Mapping[int, float]]) -> Table:
    """A table whose first column is a size, with a column in µs for each curve and a row for every size of one."""
    measured = {int(row[0].replace(",", "")): row[1:] for row in table.rows}
    blank = (MISSING,) * (len(table.columns) - 1)
    sizes = sorted({*measured, *(size for curve in curves.values() for size in curve)})
    columns = (*table.columns, *(Column(f"{label}, µs") for label in curves))
    return Table(
        columns,
        tuple(
            (f"{size:,}", *measured.get(size, blank), *(us_cell(curve.get(size)) for curve in curves.values()))
            for size in sizes
        ),
    )


def mib(size_bytes: float | None) -> str:
    """A table cell in MiB: one decimal, more where that would say too little."""
    if size_bytes is None:
        return MISSING
    size = size_bytes / MIB
    if abs(size) >= 10 or size == 0:
        return f"{size:,.1f}"
    return f"{size:.2f}" if abs(size) >= 0.1 else f"{size:.2g}"


def setting_words(of: CaptureList) -> str:
    """``output shared, workspace shared, descending``, shortened where both are the same.

    The backend is named where it is not the phase's own.
    """
    usual = "full" if of.phase == "decode" else "breakable"
    words = _sharing_words(of)
    return words if of.backend == usual else f"{of.backend}, {words}"


def _sharing_words(of: CaptureList) -> str:
    shared = of.output.replace("_", " ")
    if of.output == of.workspace:
        return f"both {shared}, {of.order}"
    return f"output {shared}, workspace {of.workspace.replace('_', ' ')}, {of.order}"
