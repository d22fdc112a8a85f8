"""Why replay is faster: kernels of a step, what launching them costs the host, and what the GPU waits for."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphtune.figures.base import Column, Drawing, Key, Table, color, drawing, quiet_grid, us_cell
from graphtune.results import CellResult, Execution
from graphtune.tune.latency_model import LatencyModel
from graphtune.units import format_us

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class StepProfile:
    """One step: its launches and kernels as the profiler saw them (mean over processes), and the step without it.

    ``span_us`` is from the first kernel to the last under the profiler, which slows launching down. ``step_us`` is null
    where the step was not timed at this size and context.
    """

    size: int
    context_tokens: int
    execution: Execution
    launches: float
    kernel_us: float
    span_us: float
    step_us: float | None

    @property
    def whole_us(self) -> float:
        return self.span_us if self.step_us is None else self.step_us

    @property
    def idle_share(self) -> float:
        """Share of the step in which no kernel runs."""
        return max(0.0, 1 - self.kernel_us / self.whole_us) if self.whole_us else 0.0

    @property
    def profiled_idle_share(self) -> float:
        return max(0.0, 1 - self.kernel_us / self.span_us) if self.span_us else 0.0


def step_profiles(cells: Iterable[CellResult], model: LatencyModel | None) -> tuple[StepProfile, ...]:
    """Profiles of all processes, averaged by size and execution."""
    found = defaultdict(list)
    for cell in cells:
        for profile in cell.launch_profiles:
            found[profile.size, profile.context_tokens, profile.execution].append(profile)
    table = model.table if model is not None else {}
    return tuple(
        StepProfile(
            size,
            context,
            execution,
            launches=statistics.fmean(one.launches for one in same),
            kernel_us=statistics.fmean(one.kernel_us for one in same),
            span_us=statistics.fmean(one.span_us for one in same),
            step_us=table.get((execution, context), {}).get(size),
        )
        for (size, context, execution), same in sorted(found.items())
    )


def launch_cost_us(cells: Iterable[CellResult]) -> float | None:
    """Host time of one launch on this machine, median over processes: a process on a slowed host measures more."""
    costs = [c.environment.launch_cost_us for c in cells if c.environment and c.environment.launch_cost_us]
    return statistics.median(costs) if costs else None


def explanation(profiles: Sequence[StepProfile], launch_us: float | None) -> str:
    """Why replay is faster at the smallest profiled size, and why not at the largest, in figures."""
    eager = sorted((one for one in profiles if one.execution == "eager"), key=lambda one: one.size)
    if not eager:
        return ""
    first, last = eager[0], eager[-1]
    replay = next((one for one in profiles if one.execution == "graph" and one.size == first.size), None)
    requests = f"{first.size} request{'s' if first.size > 1 else ''}"
    ran = format_us(first.kernel_us)
    text = f"An eager step of {requests} launches {first.launches:,.0f} kernels, which run for {ran}"
    if launch_us is not None:
        text += (
            f". A launch costs the host {launch_us:.1f} µs on this machine, all of them "
            f"{format_us(first.launches * launch_us)}, and the model's Python code between them comes on top"
        )
    text += f": the step takes {format_us(first.whole_us)}, and the GPU waits {first.idle_share:.0%} of it"
    if replay is not None:
        text += (
            f". A replay launches them all at once and takes {format_us(replay.whole_us)}, "
            f"{first.whole_us / replay.whole_us:.1f} times as fast"
        )
    if last.size > first.size:
        text += f". At {last.size} requests the kernels run for {format_us(last.kernel_us)}"
        text += (
            ", which hides most of the launching"
            if last.idle_share < first.idle_share / 2
            else f", and the GPU waits {last.idle_share:.0%} of the step"
        )
    return text + "."


def draw_step_profiles(profiles: Sequence[StepProfile], launch_us: float | None) -> Drawing:
    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        quiet_grid(axes, "x")
        for row, one in enumerate(profiles):
            busy, idle = one.kernel_us / 1000, max(0.0, one.whole_us - one.kernel_us) / 1000
            axes.barh(row, busy, 0.62, color=color("c1"))
            axes.barh(row, idle, 0.62, left=busy, color=color("c2"))
        labels = [f"{one.size} {'replay' if one.execution == 'graph' else 'eager'}" for one in profiles]
        axes.set_yticks(range(len(profiles)), labels)
        axes.set_ylim(len(profiles) - 0.5, -0.5)
        axes.set_xlabel("ms of a step")

    says = (
        "How long kernels run in a step, and how long the GPU waits, by number of requests. "
        + explanation(profiles, launch_us)
    ).strip()
    head = (Column("requests"), Column("execution", numeric=False), Column("KV tokens each"))
    columns = (
        "kernels, mean of processes",
        "in kernels, mean µs",
        "step, median µs",
        "GPU idle, share of the step",
        "first to last kernel under the profiler, mean µs",
        "idle share there",
    )
    rows = tuple(
        (
            f"{one.size}",
            "replay" if one.execution == "graph" else one.execution,
            f"{one.context_tokens:,}",
            f"{one.launches:,.0f}",
            us_cell(one.kernel_us),
            us_cell(one.step_us),
            f"{one.idle_share:.1%}",
            us_cell(one.span_us),
            f"{one.profiled_idle_share:.1%}",
        )
        for one in profiles
    )
    keys = (Key("in kernels", "c1", "box"), Key("no kernel runs", "c2", "box"))
    height = 76 + 30 * len(profiles)
    table = Table((*head, *map(Column, columns)), rows)
    return drawing("launches", "Launches and idle time", says, draw, table, keys, (height, height))
