"""What the host does in a replayed step, and how much of it a server sees."""

from __future__ import annotations

import statistics
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
    quiet_grid,
    request_axis,
    us_cell,
)
from graphtune.results import CellResult
from graphtune.stats import COMBINED, Median, PointKey, Time, all_medians, combined_us, undisturbed
from graphtune.tune.latency_model import LatencyModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIMES: tuple[Time, ...] = ("host_us", "gpu_us", "step_us", "plan_us", "fill_us", "launch_us", "overlap_us")


@dataclass(frozen=True)
class HostRow:
    """One size: the host's part of a replayed step, the GPU's, the whole, and the step with the next one prepared.

    All of them are of the same processes.
    """

    size: int
    plan_us: float | None
    fill_us: float | None
    launch_us: float | None
    host_us: float
    gpu_us: float
    step_us: float
    overlap_us: float | None

    @property
    def hidden_us(self) -> float:
        """What the host does while the GPU works: host + gpu - step."""
        return self.host_us + self.gpu_us - self.step_us


def host_rows(cells: Iterable[CellResult], model: LatencyModel) -> tuple[HostRow, ...]:
    """Replayed steps at the main context with all three times.

    Sums and differences of times make sense within a process only, so a size is shown from the processes in which none
    of its times was disturbed, else from all.
    """
    cells = tuple(cells)
    found = {time: all_medians(cells, time) for time in TIMES}
    rows = []
    for key in found["step_us"]:
        here = key.execution == "graph" and key.context_tokens == model.main_context
        if here and key.attention == model.attention and key.raw_size == key.padded_size:
            times = {time: found[time].get(key, {}) for time in TIMES}
            if times["host_us"] and times["gpu_us"]:
                rows.append(_row(key, times))
    return tuple(sorted(rows, key=lambda row: row.size))


def _row(key: PointKey, times: dict[Time, dict[int, Median]]) -> HostRow:
    needed = [times[time] for time in ("host_us", "gpu_us", "step_us")]
    processes = [p for p in needed[0] if all(p in by for by in needed)]
    calm = undisturbed({p: Median(0.0, any(by[p].disturbed for by in needed)) for p in processes})

    def value(time: Time) -> float | None:
        by = {process: one.us for process, one in times[time].items() if process in calm}
        return combined_us(by) if by else None

    host, gpu, step = value("host_us"), value("gpu_us"), value("step_us")
    assert host is not None and gpu is not None and step is not None
    parts = (value("plan_us"), value("fill_us"), value("launch_us"))
    return HostRow(key.raw_size, *parts, host, gpu, step, value("overlap_us"))


def draw_host_split(rows: Sequence[HostRow]) -> Drawing:
    chosen = _few(rows)
    parts: tuple[tuple[str, Role], ...] = (("plan_us", "c1"), ("fill_us", "c3"), ("launch_us", "c4"))

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        quiet_grid(axes)
        at = list(range(len(chosen)))
        bottom = [0.0] * len(chosen)
        for name, role in parts:
            heights = [getattr(row, name) or 0.0 for row in chosen]
            axes.bar(at, heights, 0.62, bottom=bottom, color=color(role))
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        hidden = [row.hidden_us for row in chosen]
        axes.plot(at, hidden, "D", color=color("ink"), markersize=5, markerfacecolor=color("page"))
        axes.axhline(0, color=color("muted"), linewidth=1)
        axes.set_xticks(at, [f"{row.size}" for row in chosen], fontsize=11 if narrow else 12)
        axes.set_xlabel("requests")
        axes.set_ylabel("host, µs")

    keys = (
        Key("plan and metadata", "c1", "box"),
        Key("fill static buffers", "c3", "box"),
        Key("launch", "c4", "box"),
        Key("hidden_us = host + gpu − step", "ink", "dot"),
    )
    columns = ("plan", "fill", "launch", "host", "gpu", "step", "hidden", "overlapped step")
    table = Table(
        (Column("requests"), *(Column(f"{name}, median µs") for name in columns)),
        tuple(
            (
                f"{row.size}",
                *map(
                    us_cell,
                    (
                        row.plan_us,
                        row.fill_us,
                        row.launch_us,
                        row.host_us,
                        row.gpu_us,
                        row.step_us,
                        row.hidden_us,
                        row.overlap_us,
                    ),
                ),
            )
            for row in rows
        ),
    )
    says = (
        "What the host does before the GPU can start a replayed step, split into planning attention, filling the "
        "static buffers and the launch. The diamond, host + gpu − step, is what of it runs while the GPU works; the "
        "rest of the bar is paid in every step. Below zero, the step took longer than its parts measured alone. All: "
        f"{COMBINED}."
    )
    return drawing("host-split", "The host's part of a replayed step", says, draw, table, keys, (300, 280))


def draw_overlap(rows: Sequence[HostRow]) -> Drawing | None:
    """What a step takes beyond the device's time, waited for and overlapped; None where overlap was not measured."""
    known = [(row, row.overlap_us) for row in rows if row.overlap_us is not None]
    if not known:
        return None
    sizes = [row.size for row, _ in known]
    waited = [row.step_us - row.gpu_us for row, _ in known]
    overlapped = [us - row.gpu_us for row, us in known]
    curves: tuple[tuple[Role, list[float]], ...] = (("c2", waited), ("c1", overlapped))

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        quiet_grid(axes)
        for role, beyond in curves:
            axes.plot(sizes, beyond, color=color(role), marker="o", markersize=3.4)
        axes.axhline(0, color=color("muted"), linewidth=1)
        request_axis(axes, sizes, narrow=narrow)
        axes.set_ylabel("beyond gpu_us, µs")

    keys = (Key("each step waited for", "c2"), Key("next step prepared meanwhile (overlapped)", "c1"))
    table = Table(
        tuple(
            Column(title) for title in ("requests", "gpu, median µs", "step, median µs", "overlapped step, median µs")
        ),
        tuple((f"{row.size}", us_cell(row.gpu_us), us_cell(row.step_us), us_cell(us)) for row, us in known),
    )
    says = (
        "What a replayed step takes beyond the GPU's own time. A server that waits for every output before it prepares "
        f"the next step pays {statistics.median(waited):,.0f} µs (median of these sizes); one that prepares the next "
        "step as soon as the shared tensors have been read, as overlap schedulers do, pays "
        f"{statistics.median(overlapped):,.0f} µs."
    )
    return drawing("overlap", "Steps waited for and overlapped", says, draw, table, keys, (280, 270))


def _few(rows: Sequence[HostRow]) -> list[HostRow]:
    """At most ten sizes, powers of two first: bars stay readable."""
    powers = [row for row in rows if row.size & (row.size - 1) == 0]
    chosen = powers if len(powers) >= 3 else list(rows)
    return chosen[:: max(1, -(-len(chosen) // 10))]
