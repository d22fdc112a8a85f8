"""Prefill: padded replays against eager at the exact number of tokens, and the step time of whole lists."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphtune.figures.base import (
    MISSING,
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
from graphtune.figures.shown_lists import ShownList
from graphtune.results import CellResult
from graphtune.stats import COMBINED
from graphtune.tune.prefill_model import PrefillModel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ZOOM_TOKENS = 512
LIST_ROLES: tuple[Role, ...] = ("c1", "c3", "c4", "c5", "c6")
BACKEND_ROLES: dict[str, Role] = {"breakable": "c1", "full": "c3"}
WASTE_CAP = 2.0
"""Padded over real tokens up to which engines replay a prefill where nobody measured: SGLang's rule."""


Models = Mapping[str, PrefillModel]
"""Times of one request without a prefix, by backend; every model holds the same eager runs."""


def main_backend(models: Models) -> str:
    """The backend with the most buckets, ``breakable`` of two equals."""
    return max(models, key=lambda name: (len(models[name].buckets), name == "breakable"))


def replays(model: PrefillModel) -> dict[int, dict[int, float]]:
    """Measured replays in µs by bucket and new tokens."""
    found: dict[int, dict[int, float]] = {}
    for key, us in model.table.items():
        if key.bucket is not None:
            found.setdefault(key.bucket, {})[key.tokens] = us
    return found


def eager_runs(model: PrefillModel) -> dict[int, float]:
    """Measured eager runs in µs by new tokens, ascending."""
    return dict(sorted((key.tokens, us) for key, us in model.table.items() if key.bucket is None))


def _us(model: PrefillModel, tokens: int, bucket: int | None) -> float | None:
    figure = model.step(tokens, bucket)
    return figure.us if figure is not None else None


@dataclass(frozen=True)
class Crossover:
    """One bucket. A padded replay beats exact eager from ``from_tokens`` up to the bucket.

    ``from_tokens`` is null where it does not even with a full bucket; ``to_the_end`` where it still does at the
    smallest size that eager was measured at. ``next_below`` is the bucket before, 0 for the first.
    """

    backend: str
    bucket: int
    next_below: int
    from_tokens: float | None
    to_the_end: bool
    replay_us: float
    eager_us: float | None

    @property
    def factor(self) -> float | None:
        """Padded over real tokens where replay stops paying."""
        return None if self.from_tokens is None else self.bucket / self.from_tokens


def crossovers(models: Models) -> tuple[Crossover, ...]:
    """For every backend and bucket at which eager can be told."""
    found = []
    for backend, model in models.items():
        by_bucket, eager = replays(model), eager_runs(model)
        for below, bucket in zip((0, *model.buckets), model.buckets, strict=False):
            full, exact = _us(model, bucket, bucket), _us(model, bucket, None)
            if not eager or full is None or exact is None:
                continue
            corners = {bucket, *by_bucket[bucket], *eager}
            ordered = sorted((raw for raw in corners if min(eager) <= raw <= bucket), reverse=True)
            start, to_the_end = _paying_from(model, bucket, ordered)
            found.append(Crossover(backend, bucket, below, start, to_the_end, full, exact))
    return tuple(found)


def _paying_from(model: PrefillModel, bucket: int, corners: Sequence[int]) -> tuple[float | None, bool]:
    """Go down from a full bucket to where the two lines cross. Both are straight between the corners."""

    def loss(raw: int) -> float:
        padded, exact = _us(model, raw, bucket), _us(model, raw, None)
        assert padded is not None and exact is not None
        return padded - exact

    if loss(corners[0]) > 0:
        return None, False
    for above, raw in itertools.pairwise(corners):
        if (lost := loss(raw)) > 0:
            won = -loss(above)
            return above - (above - raw) * won / (won + lost), False
    return float(corners[-1]), True


def waste_cap(cells: Iterable[CellResult]) -> float:
    """The factor that the sweep's prefill lists were captured with."""
    caps = [of.list.waste_cap for cell in cells for of in cell.captured_lists if of.list.waste_cap is not None]
    return caps[0] if caps else WASTE_CAP


def draw_crossovers(data: Sequence[Crossover], cap: float = WASTE_CAP) -> Drawing:
    backends = list(dict.fromkeys(one.backend for one in data))
    sizes = [one.bucket for one in data]

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        axes.grid(True)
        for one in data:
            at = one.bucket * (1.06 ** backends.index(one.backend))
            if one.from_tokens is None:
                axes.plot(at, one.bucket, "x", color=color("c2"), markersize=6, markeredgewidth=1.8)
                continue
            role = BACKEND_ROLES.get(one.backend, "c4")
            axes.plot([at, at], [one.from_tokens, one.bucket], color=color(role), linewidth=2.4)
            if not one.to_the_end:
                axes.plot(at, one.from_tokens, "o", color=color(role), markersize=4)
        ends = (min(sizes), max(sizes))
        axes.plot(ends, [size / cap for size in ends], color=color("muted"), linewidth=1.4, linestyle=(0, (4, 2)))
        axes.set_yscale("log", base=2)
        request_axis(axes, sizes, narrow=narrow)
        axes.yaxis.set_major_formatter(axes.xaxis.get_major_formatter())
        axes.set_xlabel("bucket, tokens")
        axes.set_ylabel("real tokens")

    never = [one for one in data if one.from_tokens is None]
    crossed = [one for one in data if one.from_tokens is not None and not one.to_the_end]
    says = (
        "For every bucket, the real tokens for which its padded replay takes less time than eager at exactly that many "
        "tokens: from the dot up to the bucket. Without a dot it does so down to the smallest size that eager was "
        "measured at. "
    )
    if crossed:
        factors = sorted(one.bucket / (one.from_tokens or 1) for one in crossed)
        span = " to ".join(dict.fromkeys((f"{factors[0]:.2f}", f"{factors[-1]:.2f}")))
        says += f"Where the two cross, padding pays up to a factor of {span}. "
    if never:
        says += f"{len(never)} of {len(data)} buckets do not pay even when full (crosses). "
    says += (
        f"The dashed line is the fixed waste cap of {cap:g}. Below the sizes measured in a bucket, its replay "
        "counts as at the smallest of them."
    )
    columns = (
        Column("backend", numeric=False),
        Column("bucket, tokens"),
        Column("bucket below"),
        Column("full replay, median µs"),
        Column("eager there, median µs"),
        Column("replay pays from, tokens"),
        Column("padded over real there"),
        Column("which", numeric=False),
    )
    table = Table(columns, tuple(map(_crossover_row, data)))
    keys = [Key(f"{name} replay beats eager", BACKEND_ROLES.get(name, "c4")) for name in backends]
    if never:
        keys.append(Key("does not pay", "c2", "cross"))
    keys.append(Key(f"waste cap of {cap:g}", "muted", "dash"))
    return drawing("prefill-crossover", "Where a padded replay stops paying", says, draw, table, keys, (360, 330))


def _crossover_row(one: Crossover) -> tuple[str, ...]:
    which = "never" if one.from_tokens is None else "at every size measured" if one.to_the_end else "crosses"
    return (
        one.backend,
        f"{one.bucket:,}",
        f"{one.next_below:,}" if one.next_below else MISSING,
        us_cell(one.replay_us),
        us_cell(one.eager_us),
        MISSING if one.from_tokens is None else f"{one.from_tokens:,.0f}",
        MISSING if one.factor is None else f"{one.factor:.2f}",
        which,
    )


@dataclass(frozen=True)
class PrefillCurve:
    """Step time over tokens of a list: padded to a bucket, or eager where the engine does not replay."""

    of: ShownList
    role: Role
    tokens: tuple[int, ...]
    step_us: tuple[float, ...]


def prefill_curves(models: Models, lists: Sequence[ShownList], top: int) -> tuple[PrefillCurve, ...]:
    """One per list, on its backend or the main one."""
    curves = []
    for of, role in zip(lists, LIST_ROLES, strict=False):
        model = models.get(of.backend) or models[main_backend(models)]
        found = {raw: _us(model, raw, of.bucket(raw)) for raw in _raw_sizes(of.sizes, top)}
        known = {raw: us for raw, us in found.items() if us is not None}
        if known:
            curves.append(PrefillCurve(of, role, tuple(known), tuple(known.values())))
    return tuple(curves)


def _raw_sizes(sizes: Sequence[int], top: int) -> list[int]:
    """Every size while they are few; then both sides of every step, and enough between for a curve."""
    dense = set(range(1, min(top, ZOOM_TOKENS) + 1))
    edges = {edge for size in sizes for edge in (size, size + 1) if edge <= top}
    ratio = (top / ZOOM_TOKENS) ** (1 / 160) if top > ZOOM_TOKENS else 1.0
    spread = {round(ZOOM_TOKENS * ratio**step) for step in range(161)} if ratio > 1 else set()
    return sorted(dense | edges | spread)


def draw_prefill_times(models: Models, lists: Sequence[ShownList]) -> Drawing:
    measured = {name: replays(models[name]) for name in sorted(models)}
    eager = eager_runs(models[main_backend(models)])
    top = models[main_backend(models)].most_tokens
    curves = prefill_curves(models, lists, top)
    zoomed = top > 2 * ZOOM_TOKENS

    def draw(figure: Figure, narrow: bool) -> None:
        if zoomed:
            panels = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
            _panel(panels[0], eager, curves, ZOOM_TOKENS)
            panels[0].set_title(f"up to {ZOOM_TOKENS} tokens")
            _panel(panels[1], eager, curves, top)
            panels[1].set_title(f"up to {top:,} tokens, both axes logarithmic")
        else:
            _panel(figure.subplots(), eager, curves, top)

    sizes = sorted({*eager, *(raw for by in measured.values() for some in by.values() for raw in some)})
    says = (
        "Step time of a prefill of one request without a cached prefix, by new tokens. A batch is padded to the next "
        "bucket of a list, which makes steps; where the engine's factor or the end of its list forbids that, the list "
        f"follows eager. {COMBINED.capitalize()}. Eager is graphtune's own path, a lower bound of a server's."
    )
    columns = [Column("tokens"), Column("eager, median µs")]
    for name in measured:
        columns += [Column(f"{name}, bucket, tokens"), Column(f"{name}, padded replay, median µs")]
    rows = tuple(
        (f"{size:,}", us_cell(eager.get(size)), *(cell for by in measured.values() for cell in _replay_at(by, size)))
        for size in sizes
    )
    keys = [Key(f"{'recommended: ' if c.of.recommended else ''}{c.of.label}", c.role) for c in curves]
    keys.append(Key("eager at the exact size", "c2", "dot"))
    height = (360, 560 if zoomed else 320)
    table = Table(tuple(columns), rows)
    of_lists = {curve.of.label: dict(zip(curve.tokens, curve.step_us, strict=True)) for curve in curves}
    data = with_curves(table, of_lists)
    return drawing("prefill-time", "Prefill step time", says, draw, table, keys, height, data=data)


def _replay_at(by_bucket: Mapping[int, Mapping[int, float]], size: int) -> tuple[str, str]:
    bucket = min((one for one, by_raw in by_bucket.items() if size in by_raw), default=None)
    return (MISSING, MISSING) if bucket is None else (f"{bucket:,}", us_cell(by_bucket[bucket][size]))


def _panel(axes: Axes, runs: Mapping[int, float], curves: Sequence[PrefillCurve], top: int) -> None:
    whole = top > ZOOM_TOKENS
    for index, curve in enumerate(curves):
        shown = [(raw, us / 1000) for raw, us in zip(curve.tokens, curve.step_us, strict=True) if raw <= top]
        style: dict[str, Any] = {"linewidth": 2.2} if index == 0 else {"linewidth": 1.4, "linestyle": (0, (4, 2))}
        style["drawstyle"] = "default" if whole else "steps-pre"
        if shown:
            axes.plot(*zip(*shown, strict=True), color=color(curve.role), zorder=3 - index * 0.1, **style)
    eager = [(size, us / 1000) for size, us in runs.items() if size <= top]
    if eager:
        axes.plot(*zip(*eager, strict=True), color=color("c2"), linewidth=1, marker="o", markersize=2.8)
    if whole:
        axes.set_yscale("log", base=2)
        request_axis(axes, [1, top], narrow=True)
        axes.yaxis.set_major_formatter(axes.xaxis.get_major_formatter())
    else:
        axes.set_xlim(0, top)
        quiet_grid(axes)
    axes.set_xlabel("new tokens")
    axes.set_ylabel("step, ms")
