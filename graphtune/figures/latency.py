"""Step time against requests, speed-up over eager, and what the host does in a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphtune.engines import ENGINES
from graphtune.engines.base import Padding
from graphtune.figures.base import Column, Drawing, Key, Role, Table, color, drawing, quiet_grid, request_axis
from graphtune.results import CellResult
from graphtune.stats import COMBINED, PointKey, Time, combined_us, process_medians
from graphtune.tune.candidates import bucket_for
from graphtune.tune.latency_model import LatencyModel
from graphtune.tune.recommendation import Recommendation
from graphtune.tune.recommendation_text import NAMES, size_range

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
    named: dict[tuple[tuple[int, ...], Padding], list[str]] = {}
    chosen: set[tuple[tuple[int, ...], Padding]] = set()
    for one in answer.engines:
        dispatch = ENGINES[one.engine].dispatch
        if one.decode is not None and one.decode.capture_sizes:
            chosen.add(key := (one.decode.capture_sizes, dispatch.decode))
            named.setdefault(key, []).append(NAMES[one.engine])
    for one in answer.engines:
        dispatch = ENGINES[one.engine].dispatch
        if one.default is not None and one.default.capture_sizes:
            key = (one.default.capture_sizes, dispatch.decode_by_default or dispatch.decode)
            named.setdefault(key, []).append(f"{NAMES[one.engine]}'s default")
    roles = iter(LIST_ROLES)
    curves: list[ListCurve] = []
    top = max(graph)
    for (sizes, padding), names in named.items():
        recommended = (sizes, padding) in chosen
        role: Role = "c1" if recommended and not curves else next(roles, "muted")
        label = f"{', '.join(names)} ({size_range(sizes)})"
        values = {raw: _served(model, raw, sizes, padding, context) for raw in range(1, top + 1)}
        known = {raw: us for raw, us in values.items() if us is not None}
        curves.append(ListCurve(label, role, recommended, tuple(known), tuple(known.values())))
    return StepTimes(context, graph, eager, tuple(curves))


def _served(model: LatencyModel, raw: int, sizes: Sequence[int], padding: Padding, context: int) -> float | None:
    bucket = bucket_for(raw, sizes, padding)
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
        f"Step time at {data.context_tokens:,} KV tokens per request. A list makes steps, because a batch is padded to "
        "the next captured size; above its top, and between sizes where an engine does not pad, it follows eager."
    )
    if on_cpu:
        says += " On a CPU, replay and eager do the same work: their difference here is noise."
    rows = tuple(
        (f"{size}", _us(data.graph.get(size)), _us(data.eager.get(size))) for size in sorted({*data.graph, *data.eager})
    )
    table = Table((Column("requests"), Column("replay step, median µs"), Column("eager step, median µs")), rows)
    return drawing("step-time", "Step time against requests", says, draw, table, keys, (360, 560 if zoomed else 320))


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
    return drawing("speed-up", "Speed-up over eager", says, draw, Table(columns, rows), keys, (320, 290))


@dataclass(frozen=True)
class HostRow:
    """One size: the host's part of a replayed step, the GPU's, the whole, and what of it overlaps."""

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
    """Replayed steps at the main context with all three times."""
    cells = tuple(cells)
    times: tuple[Time, ...] = ("plan_us", "fill_us", "launch_us", "host_us", "gpu_us", "step_us", "overlap_us")
    found = {time: process_medians(cells, time) for time in times}

    def value(time: Time, key: PointKey) -> float | None:
        by = found[time].get(key)
        return combined_us(by) if by else None

    rows = []
    for key in found["step_us"]:
        here = key.execution == "graph" and key.context_tokens == model.main_context
        if not here or key.attention != model.attention or key.raw_size != key.padded_size:
            continue
        host, gpu, step = value("host_us", key), value("gpu_us", key), value("step_us", key)
        if host is None or gpu is None or step is None:
            continue
        plan, fill, launch = value("plan_us", key), value("fill_us", key), value("launch_us", key)
        rows.append(HostRow(key.raw_size, plan, fill, launch, host, gpu, step, value("overlap_us", key)))
    return tuple(sorted(rows, key=lambda row: row.size))


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
        axes.set_xticks(at, [f"{row.size}" for row in chosen], fontsize=11 if narrow else 12)
        axes.set_xlabel("requests")
        axes.set_ylabel("host, µs")

    keys = (
        Key("plan and metadata", "c1", "box"),
        Key("fill static buffers", "c3", "box"),
        Key("launch", "c4", "box"),
        Key("hidden: host + gpu − step", "ink", "dot"),
    )
    columns = ("plan", "fill", "launch", "host", "gpu", "step", "hidden", "overlapped step")
    table = Table(
        (Column("requests"), *(Column(f"{name}, median µs") for name in columns)),
        tuple(
            (
                f"{row.size}",
                *map(
                    _us, (row.plan_us, row.fill_us, row.launch_us, row.host_us, row.gpu_us, row.step_us, row.hidden_us)
                ),
                _us(row.overlap_us),
            )
            for row in rows
        ),
    )
    says = (
        "What the host does before the GPU can start a replayed step, split into planning attention, filling the "
        "static buffers and the launch. The diamond is what of it is hidden behind the GPU; near zero, the whole bar "
        f"is paid in every step. All: {COMBINED}."
    )
    return drawing("host-split", "The host's part of a replayed step", says, draw, table, keys, (300, 280))


def _few(rows: Sequence[HostRow]) -> list[HostRow]:
    """At most ten sizes, powers of two first: bars stay readable."""
    powers = [row for row in rows if row.size & (row.size - 1) == 0]
    chosen = powers if len(powers) >= 3 else list(rows)
    return chosen[:: max(1, -(-len(chosen) // 10))]


def _us(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
