"""Step time against requests, speed-up over eager, and what the host does in a step."""

from __future__ import annotations

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
    with_curves,
)
from graphtune.figures.shown_lists import ShownList, decode_lists
from graphtune.tune.latency_model import LatencyModel
from graphtune.tune.recommendation import Recommendation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ZOOM_REQUESTS = 32
LIST_ROLES: tuple[Role, ...] = ("c3", "c4", "c5", "c6")
CONTEXT_ROLES: tuple[Role, ...] = ("c1", "c3", "c4", "c5", "c6", "c7")


@dataclass(frozen=True)
class ListCurve:
    """Step time of a list at every number of requests: padded to a bucket, or eager where no bucket serves."""

    label: str
    role: Role
    recommended: bool
    requests: tuple[int, ...]
    step_us: tuple[float, ...]


@dataclass(frozen=True)
class StepTimes:
    """Measured step times at one context, and the curves of lists over them."""

    context_tokens: int
    graph: dict[int, float]
    eager: dict[int, float]
    curves: tuple[ListCurve, ...]


def step_times(model: LatencyModel, answer: Recommendation) -> StepTimes:
    """Curves of every recommended list and every engine's default, lists that are equal drawn once."""
    context = model.main_context
    graph = dict(model.table.get(("graph", context), {}))
    eager = dict(model.table.get(("eager", context), {}))
    roles = iter(LIST_ROLES)
    curves: list[ListCurve] = []
    for of in decode_lists(answer):
        role: Role = "c1" if of.recommended and not curves else next(roles, "muted")
        values = {raw: _served(model, raw, of, context) for raw in range(1, max(graph) + 1)}
        known = {raw: us for raw, us in values.items() if us is not None}
        curves.append(ListCurve(of.label, role, of.recommended, tuple(known), tuple(known.values())))
    return StepTimes(context, graph, eager, tuple(curves))


def _served(model: LatencyModel, raw: int, of: ShownList, context: int) -> float | None:
    bucket = of.bucket(raw)
    figure = model.eager(raw, context) if bucket is None else model.replay(raw, bucket, context)
    return figure.us if figure else None


def draw_step_times(data: StepTimes, *, on_cpu: bool) -> Drawing:
    """Wide: a zoom on small batches beside the whole range; narrow: one above the other."""
    top = max(data.graph)
    zoomed = top > 2 * ZOOM_REQUESTS

    def draw(figure: Figure, narrow: bool) -> None:
        if zoomed:
            panels = figure.subplots(2, 1) if narrow else figure.subplots(1, 2, width_ratios=(2, 3))
            _steps_panel(panels[0], data, ZOOM_REQUESTS, f"up to {ZOOM_REQUESTS} requests")
            _steps_panel(panels[1], data, top, f"up to {top} requests")
        else:
            _steps_panel(figure.subplots(), data, top, "")

    ours = "captured here" if on_cpu else "recommended"
    keys = [
        Key(f"{ours}: {curve.label}", curve.role) if curve.recommended else Key(curve.label, curve.role, "dash")
        for curve in data.curves
    ]
    if data.eager:
        keys.append(Key("eager, graphtune's own path", "c2", "dot"))
    says = (
        f"Step time at {data.context_tokens:,} KV tokens per request. A batch is padded to the next captured size, "
        "which makes steps; padded rows cost their share of the matrix products but read no KV, so the steps slope. "
        "Above its top, and between sizes where an engine does not pad, a list follows eager."
    )
    if on_cpu:
        says += " On a CPU, replay and eager do the same work: their difference here is noise."
    rows = tuple(
        (f"{size}", us_cell(data.graph.get(size)), us_cell(data.eager.get(size)))
        for size in sorted({*data.graph, *data.eager})
    )
    table = Table((Column("requests"), Column("replay step, median µs"), Column("eager step, median µs")), rows)
    height = (360, 560 if zoomed else 320)
    title = "Step time against requests"
    curves = {curve.label: dict(zip(curve.requests, curve.step_us, strict=True)) for curve in data.curves}
    return drawing("step-time", title, says, draw, table, keys, height, data=with_curves(table, curves))


def _steps_panel(axes: Axes, data: StepTimes, top: int, title: str) -> None:
    quiet_grid(axes)
    for curve in reversed(data.curves):
        shown = [(raw, us / 1000) for raw, us in zip(curve.requests, curve.step_us, strict=True) if raw <= top]
        if not shown:
            continue
        style = {"linewidth": 2.4} if curve.recommended else {"linewidth": 1.4, "linestyle": (0, (4, 2))}
        edges = [(raw - 1, us) for raw, us in shown] + [shown[-1]]
        axes.step(*zip(*edges, strict=True), where="post", color=color(curve.role), **style)
    eager = [(size, us / 1000) for size, us in sorted(data.eager.items()) if size <= top]
    if eager:
        axes.plot(*zip(*eager, strict=True), color=color("c2"), linewidth=1, marker="o", markersize=3.4)
    axes.set_xlim(0, top)
    axes.set_title(title)
    axes.set_xlabel("requests")
    axes.set_ylabel("step, ms")


@dataclass(frozen=True)
class SpeedUps:
    """Eager over replay by size, for each measured context."""

    by_context: dict[int, dict[int, float]]


def speed_ups(model: LatencyModel) -> SpeedUps | None:
    """Only sizes that were measured both ways; None when there are none."""
    found = {}
    for context in model.contexts():
        graph, eager = model.table[("graph", context)], model.table.get(("eager", context), {})
        ratios = {size: eager[size] / graph[size] for size in sorted(graph) if size in eager}
        if ratios:
            found[context] = ratios
    return SpeedUps(found) if found else None


def draw_speed_ups(data: SpeedUps) -> Drawing:
    roles = dict(zip(data.by_context, CONTEXT_ROLES, strict=False))
    sizes = sorted({size for ratios in data.by_context.values() for size in ratios})

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        quiet_grid(axes)
        for context, ratios in data.by_context.items():
            role = roles.get(context, "muted")
            axes.plot(list(ratios), list(ratios.values()), color=color(role), marker="o", markersize=3.4)
        axes.axhline(1, color=color("muted"), linewidth=1)
        request_axis(axes, sizes, narrow=narrow)
        axes.set_ylabel("eager / replay")

    keys = [Key(f"{context:,} KV tokens each", roles.get(context, "muted")) for context in data.by_context]
    rows = tuple((f"{size}", *(_ratio(ratios.get(size)) for ratios in data.by_context.values())) for size in sizes)
    columns = (Column("requests"), *(Column(f"at {context:,}, ratio of medians") for context in data.by_context))
    says = (
        "How many times longer an eager step takes than a replay. It is highest where the host cannot launch kernels "
        "as fast as the GPU runs them, and falls to one where the GPU has enough work. Eager is graphtune's own path, "
        "a lower bound of a server's eager step, so a server gains more."
    )
    worst = min(ratio for ratios in data.by_context.values() for ratio in ratios.values())
    if worst < 0.99:
        says += f" Below one, replay is slower than eager: {worst:.2f} at the least."
    says += " How far to trust a single point is in the table at the end of this section."
    return drawing("speed-up", "Speed-up over eager", says, draw, Table(columns, rows), keys, (320, 290))


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
