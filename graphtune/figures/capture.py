"""Seconds of capture, launches of a step, and the trade between graph memory and step time."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphtune.figures.base import Column, Drawing, Key, Role, Table, color, drawing, quiet_grid
from graphtune.figures.memory import mib, setting_words
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
        f"Time to capture each size of the list “{of.list.name}” ({setting_words(of.list)}): "
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
    return drawing("capture-seconds", "Capture time", says, draw, table, keys, (280, 260))


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
class StepProfile:
    """Launches of one step and how its time on the device divides; mean over processes."""

    size: int
    context_tokens: int
    execution: str
    launches: float
    kernel_us: float
    span_us: float

    @property
    def idle_share(self) -> float:
        return max(0.0, 1 - self.kernel_us / self.span_us) if self.span_us else 0.0


def step_profiles(cells: Iterable[CellResult]) -> tuple[StepProfile, ...]:
    """Profiles of all processes, averaged by size and execution."""
    found = defaultdict(list)
    for cell in cells:
        for profile in cell.launch_profiles:
            found[profile.size, profile.context_tokens, profile.execution].append(profile)
    return tuple(
        StepProfile(
            *key,
            launches=statistics.fmean(one.launches for one in same),
            kernel_us=statistics.fmean(one.kernel_us for one in same),
            span_us=statistics.fmean(one.span_us for one in same),
        )
        for key, same in sorted(found.items())
    )


def draw_step_profiles(profiles: Sequence[StepProfile], launch_cost_us: float | None) -> Drawing:
    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        quiet_grid(axes, "x")
        for row, one in enumerate(profiles):
            busy, idle = one.kernel_us / 1000, max(0.0, one.span_us - one.kernel_us) / 1000
            axes.barh(row, busy, 0.62, color=color("c1"))
            axes.barh(row, idle, 0.62, left=busy, color=color("c2"))
        labels = [f"{one.size} {'replay' if one.execution == 'graph' else 'eager'}" for one in profiles]
        axes.set_yticks(range(len(profiles)), labels)
        axes.set_ylim(len(profiles) - 0.5, -0.5)
        axes.set_xlabel("ms on the GPU from first to last kernel")

    eager = [one for one in profiles if one.execution == "eager"]
    says = "How long kernels run, and how long the GPU waits between them, at each number of requests."
    if eager:
        first = min(eager, key=lambda one: one.size)
        says += (
            f" An eager step of {first.size} {'request' if first.size == 1 else 'requests'} launches "
            f"{first.launches:,.0f} kernels and leaves the GPU idle for {first.idle_share:.0%} of its time"
        )
        says += f"; a launch costs the host {launch_cost_us:.1f} µs here." if launch_cost_us is not None else "."
        says += " A replay is one launch: that idle time is what graphs save."
    columns = ("launches", "in kernels, µs", "first to last kernel, µs", "idle share")
    rows = tuple(
        (
            f"{one.size}",
            "replay" if one.execution == "graph" else one.execution,
            f"{one.context_tokens:,}",
            f"{one.launches:,.0f}",
            f"{one.kernel_us:,.0f}",
            f"{one.span_us:,.0f}",
            f"{one.idle_share:.1%}",
        )
        for one in profiles
    )
    head = (Column("requests"), Column("execution", numeric=False), Column("KV tokens each"))
    table = Table((*head, *(Column(f"{name}, mean of processes") for name in columns)), rows)
    keys = (Key("in kernels", "c1", "box"), Key("idle between kernels", "c2", "box"))
    height = 76 + 30 * len(profiles)
    return drawing("launches", "Launches and idle time", says, draw, table, keys, (height, height))


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
        "traffic. The leftmost has no graphs. Bytes of a shorter list are bounded by those of a longer one that was "
        "measured."
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
