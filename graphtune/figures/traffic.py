"""The traffic that an answer is for, with the sizes of capture lists beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphtune.figures.base import Column, Drawing, Key, Role, Table, color, drawing, quiet_grid, upright
from graphtune.figures.shown_lists import ShownList
from graphtune.results import Phase
from graphtune.tune.workload import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIST_ROLES: tuple[Role, ...] = ("c1", "c3", "c4", "c5", "c6", "c7")


@dataclass(frozen=True)
class Traffic:
    """Share of steps by size, and the lists that serve them. Shares add up to one."""

    phase: Phase
    shares: dict[int, float]
    lists: tuple[ShownList, ...]

    @property
    def unit(self) -> str:
        return "tokens" if self.phase == "prefill" else "requests"


def decode_traffic(workload: Workload, lists: Sequence[ShownList]) -> Traffic | None:
    """The decode histogram; None where nothing decodes."""
    shares = _shares((share.requests, share.weight) for share in workload.decode)
    return Traffic("decode", shares, tuple(lists)) if shares else None


def prefill_traffic(workload: Workload, lists: Sequence[ShownList]) -> Traffic | None:
    """The prefill histogram; None where the traffic has none."""
    shares = _shares((share.tokens, share.weight) for share in workload.prefill)
    return Traffic("prefill", shares, tuple(lists)) if shares else None


def _shares(weights: Iterable[tuple[int, float]]) -> dict[int, float]:
    found: dict[int, float] = {}
    for size, weight in weights:
        found[size] = found.get(size, 0.0) + weight
    total = sum(found.values())
    return {size: weight / total for size, weight in sorted(found.items())} if total > 0 else {}


def draw_traffic(data: Traffic, ours: str = "recommended") -> Drawing:
    """Above the histogram with the first list's sizes as lines, below every list as a row of marks.

    ``ours`` is what a recommended list is called.
    """
    top = max([*data.shares, *(size for of in data.lists if of.recommended for size in of.sizes)])

    def draw(figure: Figure, narrow: bool) -> None:
        rows = len(data.lists)
        if rows:
            histogram, marks = figure.subplots(2, 1, sharex=True, height_ratios=(4, max(1.0, 0.55 * rows)))
        else:
            histogram, marks = figure.subplots(), None
        quiet_grid(histogram)
        for of in data.lists[:1]:
            lines = upright(of.sizes, 0.0, 100.0)
            histogram.plot(*lines, color=color("c1"), linewidth=0.7, alpha=0.55)
        at, heights = _outline(data.shares)
        histogram.fill_between(at, heights, step="post", color=color("soft"), linewidth=0)
        histogram.step(at, heights, where="post", color=color("muted"), linewidth=1)
        histogram.set_ylim(0, max(heights) * 1.08)
        histogram.set_xlim(0, top + 1)
        histogram.set_ylabel("% of steps")
        if marks is not None:
            marks.grid(False)
            for row, (of, role) in enumerate(zip(data.lists, LIST_ROLES, strict=False)):
                shown = [size for size in of.sizes if size <= top]
                marks.plot(*upright(shown, row - 0.33, row + 0.33), color=color(role), linewidth=1.4)
            marks.set_yticks([])
            marks.set_ylim(rows - 0.4, -0.6)
        (marks if marks is not None else histogram).set_xlabel(data.unit)

    keys = [Key("share of steps", "soft", "box")]
    keys += [Key(_label(of, ours), role) for of, role in zip(data.lists, LIST_ROLES, strict=False)]
    mean = sum(size * share for size, share in data.shares.items())
    says = (
        f"How often a {data.phase} step serves how many {data.unit} (mean {mean:,.1f}), as the answer assumes it. The "
        "rows below are the sizes that lists capture, the first also as lines in the histogram: a step is padded to "
        "the next mark on its right, and runs eager where there is none or the engine does not pad."
    )
    beyond = [of for of in data.lists if of.sizes and of.sizes[-1] > top]
    if beyond:
        says += f" Sizes above {top:,} are not drawn."
    columns = (
        Column(data.unit),
        Column("share of steps"),
        *(Column(f"padded to, {_label(of, ours)}") for of in data.lists),
    )
    rows = tuple(
        (f"{size:,}", f"{share:.3%}", *(_served(of.bucket(size)) for of in data.lists))
        for size, share in data.shares.items()
    )
    height = (240 + 26 * len(data.lists), 230 + 26 * len(data.lists))
    title = f"Traffic and lists, {data.phase}"
    return drawing(f"traffic-{data.phase}", title, says, draw, Table(columns, rows), keys, height)


def _outline(shares: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """Corners of the histogram in percent, each size one unit wide around itself, gaps at zero."""
    at: list[float] = []
    heights: list[float] = []
    for size, share in shares.items():
        if at and at[-1] == size - 0.5:
            heights[-1] = share * 100
        else:
            at.append(size - 0.5)
            heights.append(share * 100)
        at.append(size + 0.5)
        heights.append(0.0)
    return at, heights


def _label(of: ShownList, ours: str) -> str:
    return f"{ours}: {of.label}" if of.recommended else of.label


def _served(bucket: int | None) -> str:
    return "eager" if bucket is None else f"{bucket:,}"
