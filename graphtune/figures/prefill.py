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
)
from graphtune.figures.shown_lists import ShownList
from graphtune.results import CellResult
from graphtune.stats import COMBINED, combined_us, process_medians
from graphtune.tune.candidates import bucket_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ZOOM_TOKENS = 512
LIST_ROLES: tuple[Role, ...] = ("c1", "c3", "c4", "c5", "c6")
BACKEND_ROLES: dict[str, Role] = {"breakable": "c1", "full": "c3"}
WASTE_CAP = 2.0
"""Padded over real tokens up to which engines replay a prefill where nobody measured: SGLang's rule."""


@dataclass(frozen=True)
class PrefillTimes:
    """Step times of one request without a prefix, in µs: replays by backend, bucket and raw tokens; eager by tokens."""

    replay: Mapping[str, Mapping[int, Mapping[int, float]]]
    eager: Mapping[int, float]

    @property
    def backend(self) -> str:
        """The backend with the most buckets, ``breakable`` of two equals."""
        return max(self.replay, key=lambda name: (len(self.replay[name]), name == "breakable"))

    def replay_us(self, backend: str, bucket: int, raw: float) -> float | None:
        """A padded replay: between the raw sizes that were measured in this bucket, and as the smallest below them."""
        measured = self.replay[backend].get(bucket)
        return _between(measured, max(raw, min(measured))) if measured else None

    def eager_us(self, raw: float) -> float | None:
        """Eager at the exact size: measured or between; None outside of what was measured."""
        return _between(self.eager, raw) if self.eager else None


def prefill_times(cells: Iterable[CellResult]) -> PrefillTimes | None:
    """Of all processes; None without a replay."""
    replay: dict[str, dict[int, dict[int, float]]] = {}
    eager: dict[int, float] = {}
    for key, by_process in process_medians(cells).items():
        if key.phase == "prefill" and key.context_tokens == 0 and key.requests in (None, 1):
            us = combined_us(by_process)
            if key.execution == "eager":
                eager[key.raw_size] = us
            else:
                replay.setdefault(key.backend, {}).setdefault(key.padded_size, {})[key.raw_size] = us
    return PrefillTimes(replay, eager) if replay else None


def _between(figures: Mapping[int, float], at: float) -> float | None:
    """On the line between the two neighbours of ``at``; None outside."""
    if at in figures:
        return figures[int(at)]
    below = max((size for size in figures if size < at), default=None)
    above = min((size for size in figures if size > at), default=None)
    if below is None or above is None:
        return None
    share = (at - below) / (above - below)
    return figures[below] * (1 - share) + figures[above] * share


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


def crossovers(times: PrefillTimes) -> tuple[Crossover, ...]:
    """For every backend and bucket at which eager can be told."""
    found = []
    for backend, by_bucket in times.replay.items():
        buckets = sorted(by_bucket)
        for below, bucket in zip([0, *buckets], buckets, strict=False):
            if (exact := times.eager_us(bucket)) is None:
                continue
            start, to_the_end = _paying_from(times, backend, bucket)
            full = times.replay_us(backend, bucket, bucket)
            assert full is not None
            found.append(Crossover(backend, bucket, below, start, to_the_end, full, exact))
    return tuple(found)


def _paying_from(times: PrefillTimes, backend: str, bucket: int) -> tuple[float | None, bool]:
    """Go down from a full bucket to where the two lines cross. Both are straight between measured sizes."""

    def loss(raw: float) -> float:
        padded, exact = times.replay_us(backend, bucket, raw), times.eager_us(raw)
        assert padded is not None and exact is not None
        return padded - exact

    corners = {*times.eager, *times.replay[backend][bucket], bucket}
    lowest = min(times.eager)
    ordered = sorted((raw for raw in corners if lowest <= raw <= bucket), reverse=True)
    if loss(ordered[0]) > 0:
        return None, False
    for above, raw in itertools.pairwise(ordered):
        if (lost := loss(raw)) > 0:
            won = -loss(above)
            return above - (above - raw) * won / (won + lost), False
    return float(ordered[-1]), True


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

    label: str
    role: Role
    tokens: tuple[int, ...]
    step_us: tuple[float, ...]


def prefill_curves(times: PrefillTimes, lists: Sequence[ShownList], top: int) -> tuple[PrefillCurve, ...]:
    """One per list. A bucket that was not measured counts as the next measured one."""
    backend = times.backend
    measured = sorted(times.replay[backend])
    curves = []
    for of, role in zip(lists, LIST_ROLES, strict=False):
        tokens, step_us = [], []
        for raw in _raw_sizes(of.sizes, top):
            bucket = of.bucket(raw)
            stands_for = None if bucket is None else bucket_for(bucket, measured, "always")
            us = times.eager_us(raw) if bucket is None else None
            if stands_for is not None:
                us = times.replay_us(backend, stands_for, raw)
            if us is not None:
                tokens.append(raw)
                step_us.append(us)
        if tokens:
            curves.append(PrefillCurve(of.label, role, tuple(tokens), tuple(step_us)))
    return tuple(curves)


def _raw_sizes(sizes: Sequence[int], top: int) -> list[int]:
    """Every size while they are few; then both sides of every step, and enough between for a curve."""
    dense = set(range(1, min(top, ZOOM_TOKENS) + 1))
    edges = {edge for size in sizes for edge in (size, size + 1) if edge <= top}
    ratio = (top / ZOOM_TOKENS) ** (1 / 160) if top > ZOOM_TOKENS else 1.0
    spread = {round(ZOOM_TOKENS * ratio**step) for step in range(161)} if ratio > 1 else set()
    return sorted(dense | edges | spread)


def draw_prefill_times(times: PrefillTimes, lists: Sequence[ShownList]) -> Drawing:
    buckets = times.replay[times.backend]
    top = max([*buckets, *times.eager])
    curves = prefill_curves(times, lists, top)
    zoomed = top > 2 * ZOOM_TOKENS

    def draw(figure: Figure, narrow: bool) -> None:
        if zoomed:
            panels = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
            _panel(panels[0], times, curves, ZOOM_TOKENS)
            panels[0].set_title(f"up to {ZOOM_TOKENS} tokens")
            _panel(panels[1], times, curves, top)
            panels[1].set_title(f"up to {top:,} tokens, both axes logarithmic")
        else:
            _panel(figure.subplots(), times, curves, top)

    sizes = sorted({*times.eager, *(raw for by_raw in buckets.values() for raw in by_raw)})
    says = (
        "Step time of a prefill of one request without a cached prefix, by new tokens. A batch is padded to the next "
        "bucket of a list, which makes steps; where the engine's factor or the end of its list forbids that, the list "
        f"follows eager. {COMBINED.capitalize()}. Eager is graphtune's own path, a lower bound of a server's."
    )
    names = sorted(times.replay)
    columns = [Column("tokens"), Column("eager, median µs")]
    for name in names:
        columns += [Column(f"{name}, bucket, tokens"), Column(f"{name}, padded replay, median µs")]
    rows = tuple((f"{size:,}", us_cell(times.eager.get(size)), *_replays_at(times, names, size)) for size in sizes)
    keys = [Key(curve.label, curve.role) for curve in curves]
    keys.append(Key("eager at the exact size", "c2", "dot"))
    height = (360, 560 if zoomed else 320)
    return drawing("prefill-time", "Prefill step time", says, draw, Table(tuple(columns), rows), keys, height)


def _replays_at(times: PrefillTimes, names: Sequence[str], size: int) -> list[str]:
    cells = []
    for name in names:
        bucket = min((one for one, by_raw in times.replay[name].items() if size in by_raw), default=None)
        cells += [MISSING, MISSING] if bucket is None else [f"{bucket:,}", us_cell(times.replay[name][bucket][size])]
    return cells


def _panel(axes: Axes, times: PrefillTimes, curves: Sequence[PrefillCurve], top: int) -> None:
    whole = top > ZOOM_TOKENS
    for index, curve in enumerate(curves):
        shown = [(raw, us / 1000) for raw, us in zip(curve.tokens, curve.step_us, strict=True) if raw <= top]
        style: dict[str, Any] = {"linewidth": 2.2} if index == 0 else {"linewidth": 1.4, "linestyle": (0, (4, 2))}
        style["drawstyle"] = "default" if whole else "steps-pre"
        if shown:
            axes.plot(*zip(*shown, strict=True), color=color(curve.role), zorder=3 - index * 0.1, **style)
    eager = [(size, us / 1000) for size, us in sorted(times.eager.items()) if size <= top]
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
