"""What a breakable prefill still launches one by one: kernels inside segments and in the breaks between them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphtune.figures.base import MISSING, Column, Drawing, Key, Table, color, drawing, quiet_grid, us_cell
from graphtune.kv_pool import DTYPE_BYTES
from graphtune.results import CellResult
from graphtune.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class PrefillLaunches:
    """One prefill step, means over processes. ``in_breaks`` is every kernel of an eager step; ``segments`` null there.

    ``launches`` are all kernels; what is not in breaks runs inside segments, each of which one call launches.
    """

    tokens: int
    backend: str
    launches: float
    in_breaks: float
    segments: float | None
    kernel_us: float

    @property
    def calls(self) -> float:
        """Calls with which the host launches the step."""
        return self.in_breaks + (self.segments or 0)


def prefill_launches(cells: Iterable[CellResult]) -> tuple[PrefillLaunches, ...]:
    """Profiles of prefill steps by tokens and backend, eager first."""
    found = defaultdict(list)
    for cell in cells:
        for profile in cell.launch_profiles:
            if profile.phase == "prefill":
                eager = profile.execution == "eager"
                backend = "eager" if eager else profile.backend or "graph"
                found[profile.size, not eager, backend].append(profile)
    rows = []
    for (tokens, replayed, backend), same in sorted(found.items()):
        segments = [one.segments for one in same if one.segments is not None]
        breaks = [one.launches if not replayed else one.launches_in_breaks or 0 for one in same]
        rows.append(
            PrefillLaunches(
                tokens,
                backend,
                statistics.fmean(one.launches for one in same),
                statistics.fmean(breaks),
                statistics.fmean(segments) if segments else 1.0 if replayed else None,
                statistics.fmean(one.kernel_us for one in same),
            )
        )
    return tuple(rows)


@dataclass(frozen=True)
class HeadBytes:
    """Device bytes of the logits that a recording of ``tokens`` tokens with the LM head inside would have bound."""

    tokens: int
    nbytes: int


def head_bytes(cells: Iterable[CellResult]) -> HeadBytes | None:
    """Of the largest prefill size captured: a row of the vocabulary for every token; None without prefill lists."""
    largest = None
    for cell in cells:
        asked = cell.cell
        tops = [size for of in cell.captured_lists if of.list.phase == "prefill" for size in of.list.sizes]
        vocabulary = asked["model_config"].get("vocab_size")
        if tops and vocabulary and (largest is None or max(tops) > largest.tokens):
            width = DTYPE_BYTES[asked["dtype"]]
            largest = HeadBytes(max(tops), max(tops) * -(-vocabulary // asked.get("shard", 1)) * width)
    return largest


def draw_prefill_launches(rows: Sequence[PrefillLaunches], head: HeadBytes | None = None) -> Drawing:
    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        quiet_grid(axes, "x")
        for row, one in enumerate(rows):
            inside = one.launches - one.in_breaks
            axes.barh(row, inside, 0.62, color=color("c1"))
            axes.barh(row, one.in_breaks, 0.62, left=inside, color=color("c2"))
        axes.set_yticks(range(len(rows)), [f"{one.tokens} {one.backend}" for one in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel("kernels of a step")

    columns = (
        "kernels",
        "inside segments",
        "in breaks or eager",
        "segments",
        "calls of the host",
        "in kernels, mean µs",
    )
    table = Table(
        (Column("tokens"), Column("backend", numeric=False), *map(Column, columns)),
        tuple(
            (
                f"{one.tokens:,}",
                one.backend,
                f"{one.launches:,.0f}",
                f"{one.launches - one.in_breaks:,.0f}",
                f"{one.in_breaks:,.0f}",
                MISSING if one.segments is None else f"{one.segments:,.0f}",
                f"{one.calls:,.0f}",
                us_cell(one.kernel_us),
            )
            for one in rows
        ),
    )
    keys = (Key("launched with a segment", "c1", "box"), Key("launched one by one", "c2", "box"))
    height = 76 + 30 * len(rows)
    says = f"Kernels of a prefill step by new tokens, and how they are launched. {_sentence(rows)}".strip()
    if head is not None:
        says += (
            f" The LM head runs eagerly on each request's last token: inside a recording its logits of {head.tokens:,} "
            f"tokens would have bound {format_bytes(head.nbytes)}."
        )
    title = "Launches inside segments and in breaks"
    return drawing("prefill-launches", title, says, draw, table, keys, (height, height))


def _sentence(rows: Sequence[PrefillLaunches]) -> str:
    """The first size that was profiled both ways, in calls of the host."""
    for cut in rows:
        eager = next((one for one in rows if one.tokens == cut.tokens and one.backend == "eager"), None)
        if cut.backend == "breakable" and eager is not None and cut.segments is not None:
            return (
                f"At {cut.tokens:,} tokens an eager step takes {eager.calls:,.0f} calls of the host, a breakable "
                f"replay {cut.calls:,.0f}: one for each of its {cut.segments:,.0f} segments and {cut.in_breaks:,.0f} "
                "in the breaks, where attention runs eagerly."
            )
    return ""
