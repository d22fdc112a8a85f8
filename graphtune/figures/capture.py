"""Seconds of capture, and the trade between graph memory and step time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphtune.figures.base import (
    Column,
    Drawing,
    Key,
    Role,
    Table,
    color,
    drawing,
    mib,
    quiet_grid,
    setting_words,
)
from graphtune.results import Capture, CapturedList, CellResult
from graphtune.tune.recommendation import Recommendation
from graphtune.tune.recommendation_text import NAMES, size_range
from graphtune.units import MIB, format_duration_s

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS: tuple[tuple[str, str, Role], ...] = (
    ("warmup_s", "warm-up", "c7"),
    ("record_s", "record", "c1"),
    ("instantiate_s", "instantiate", "c2"),
)


def timed_list(cells: Iterable[CellResult]) -> CapturedList | None:
    """The list captured first in the process that timed steps, else any list captured whole."""
    ordered = sorted(cells, key=lambda cell: -len(cell.points))
    whole = [of for cell in ordered for of in cell.captured_lists if of.status == "ok" and of.captures]
    return whole[0] if whole else None


def draw_capture_seconds(of: CapturedList) -> Drawing:
    phase = of.list.phase
    captures = [capture for capture in of.captures if capture.status == "ok"]

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        quiet_grid(axes)
        at = range(len(captures))
        bottom = [0.0] * len(captures)
        for name, _, role in PARTS:
            heights = [(getattr(capture, name) or 0.0) * 1000 for capture in captures]
            axes.bar(at, heights, 0.78, bottom=bottom, color=color(role))
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        every = max(1, -(-len(captures) // (8 if narrow else 20)))
        axes.set_xticks(list(at)[::every], [f"{capture.size}" for capture in captures][::every])
        axes.set_xlabel("size, in capture order")
        axes.set_ylabel("ms")

    sums = {label: sum(getattr(capture, name) or 0.0 for capture in captures) for name, label, _ in PARTS}
    total = sum(sums.values())
    split = ", ".join(f"{label} {format_duration_s(seconds)}" for label, seconds in sums.items())
    says = (
        f"Time to capture each size of the {phase} list “{of.list.name}” ({setting_words(of.list)}): "
        f"{format_duration_s(total)} in all, of it {split}. Every size was run eagerly before, so loading and tuning "
        "of kernels is not in it."
    )
    columns = (
        Column("size"),
        *(Column(f"{label}, ms") for _, label, _ in PARTS),
        Column("kept, MiB"),
        Column("of it pool, MiB"),
        Column("peak while capturing, MiB"),
        Column("graph nodes"),
    )
    table = Table(columns, tuple(_capture_row(capture) for capture in captures))
    keys = [Key(label, role, "box") for _, label, role in PARTS]
    title = f"Capture time of {phase} graphs"
    return drawing(f"capture-seconds-{phase}", title, says, draw, table, keys, (280, 260))


def _capture_row(capture: Capture) -> tuple[str, ...]:
    seconds = (getattr(capture, name) for name, _, _ in PARTS)
    sizes = (capture.retained_bytes, capture.pool_growth_bytes, capture.peak_bytes)
    return (
        f"{capture.size}",
        *("–" if value is None else f"{value * 1000:.1f}" for value in seconds),
        *map(mib, sizes),
        "–" if capture.nodes is None else f"{capture.nodes:,}",
    )


@dataclass(frozen=True)
class Trade:
    """A list by graph memory and expected step time."""

    label: str
    kind: str
    graph_bytes: int
    step_us: float


def trades(answer: Recommendation, engine: str) -> tuple[Trade, ...]:
    """The front of one engine, with its recommended and default lists."""
    one = answer.engine(engine)
    found = [
        Trade(size_range(p.decode_sizes), "front", p.graph_bytes, p.expected_step_us)
        for p in answer.pareto
        if p.engine == engine
    ]
    for kind, of in (("default", one.default), ("recommended", one.decode)):
        if of is not None and of.graph_bytes is not None and of.expected_step_us is not None:
            found.append(Trade(size_range(of.capture_sizes), kind, of.graph_bytes, of.expected_step_us))
    return tuple(found)


def draw_trades(data: Sequence[Trade], engine: str) -> Drawing:
    styles: dict[str, tuple[Role, str, float]] = {
        "front": ("muted", "o", 5),
        "default": ("c4", "s", 9),
        "recommended": ("c1", "D", 8),
    }

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        axes.grid(True)
        front = sorted((one.graph_bytes / MIB, one.step_us / 1000) for one in data if one.kind == "front")
        if front:
            axes.step(*zip(*front, strict=True), where="post", color=color("muted"), linewidth=1)
        for one in data:
            role, marker, size = styles[one.kind]
            hollow = one.kind == "default"
            axes.plot(
                one.graph_bytes / MIB,
                one.step_us / 1000,
                marker,
                color=color(role),
                markersize=size,
                markerfacecolor="none" if hollow else color(role),
                markeredgewidth=2 if hollow else 1,
            )
        axes.set_xlim(left=0 if min(one.graph_bytes for one in data) > 0 else None)
        axes.set_xlabel("graph memory, MiB")
        axes.set_ylabel("expected step, ms")

    says = (
        f"Lists for {NAMES[engine]} that no other list beats in both graph memory and expected step time on this "
        "traffic: the Pareto front, with the chosen list. The leftmost has no graphs. The chosen one lies above the "
        "front where a shorter step is within the tolerance. Bytes of a shorter list are bounded by those of a longer "
        "one that was measured."
    )
    columns = (Column("list", numeric=False), Column("which", numeric=False), Column("graph memory, MiB, at most"))
    rows = tuple((one.label, one.kind, f"{one.graph_bytes / MIB:,.1f}", f"{one.step_us:,.0f}") for one in data)
    keys = (
        Key("recommended", "c1", "dot"),
        Key("the engine's default", "c4", "dot"),
        Key("not beaten by another list", "muted", "dot"),
    )
    table = Table((*columns, Column("expected step, µs")), rows)
    return drawing("trade", "Graph memory against step time", says, draw, table, keys, (320, 290))
