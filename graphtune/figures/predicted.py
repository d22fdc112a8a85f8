"""Predicted against measured graph memory of the random lists that were held back, beside the two-sample estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphtune.figures.base import MISSING, Column, Drawing, Key, Table, color, drawing, mib, quiet_grid
from graphtune.memory_cells import is_held_out
from graphtune.tune.memory_prediction import MemoryPredictor
from graphtune.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROW_PX = 22


@dataclass(frozen=True)
class PredictedList:
    """One list that nothing was derived from. Bytes; ``two_sample`` is the first graph's and, for each other one, the
    second's, null for a list of one size."""

    phase: str
    backend: str
    name: str
    setting: str
    graphs: int
    predicted_bytes: int
    low_bytes: int
    high_bytes: int
    measured_bytes: int
    two_sample_bytes: int | None

    @property
    def inside(self) -> bool:
        return self.low_bytes <= self.measured_bytes <= self.high_bytes


def predicted_lists(found: MemoryPredictor | None) -> tuple[PredictedList, ...]:
    """The held-out lists, the smallest first; empty for a sweep without them."""
    if found is None:
        return ()
    lists = [
        PredictedList(
            phase=of.phase,
            backend=of.backend,
            name=of.name,
            setting=f"{of.order}, output {of.output}",
            graphs=len(of.sizes),
            predicted_bytes=one.prediction.graph_bytes,
            low_bytes=one.prediction.interval[0],
            high_bytes=one.prediction.interval[1],
            measured_bytes=one.measured_bytes,
            two_sample_bytes=one.two_sample_bytes,
        )
        for one in found.checked
        if is_held_out(of := one.prediction.of)
    ]
    return tuple(sorted(lists, key=lambda one: (one.phase, one.backend, one.measured_bytes)))


def draw_predicted(data: Sequence[PredictedList]) -> Drawing:
    """Each list as a row: predicted over measured with its interval, and the two-sample estimate over measured."""
    known = [one for one in data if one.measured_bytes > 0]

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        quiet_grid(axes, "x")
        axes.axvline(1.0, color=color("ink"), linewidth=1.0)
        for row, one in enumerate(known):
            measured = one.measured_bytes
            axes.plot([one.low_bytes / measured, one.high_bytes / measured], [row, row], color=color("c1"), alpha=0.5)
            axes.plot([one.predicted_bytes / measured], [row], "o", color=color("c1"), markersize=5)
            if one.two_sample_bytes is not None:
                axes.plot([one.two_sample_bytes / measured], [row], "x", color=color("c2"), markersize=6)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        labels = [format_bytes(one.measured_bytes) for one in known]
        axes.set_yticks(range(len(known)), labels)
        axes.set_ylim(len(known) - 0.5, -0.5)
        axes.set_xlabel("over measured" if narrow else "predicted over measured bytes")
        axes.set_ylabel("held-out list, by its measured bytes")

    worst = max(abs(one.predicted_bytes - one.measured_bytes) for one in known)
    apart = [one.two_sample_bytes / one.measured_bytes for one in known if one.two_sample_bytes is not None]
    says = (
        f"{len(known)} random lists that nothing was derived from. Predicted bytes are off by {format_bytes(worst)} at "
        f"most, and {sum(one.inside for one in known)} lie in the stated interval."
    )
    if apart:
        says += (
            f" The first graph's bytes plus the second's for every other graph, an estimate that engines make, come to "
            f"{min(apart):.2f} to {max(apart):.2f} times what was measured."
        )
    columns = ("predicted", "low", "high", "measured", "error", "two-sample estimate")
    rows = tuple(
        (
            f"{one.phase} {one.backend}",
            one.name,
            one.setting,
            f"{one.graphs}",
            mib(one.predicted_bytes),
            mib(one.low_bytes),
            mib(one.high_bytes),
            mib(one.measured_bytes),
            mib(one.predicted_bytes - one.measured_bytes),
            MISSING if one.two_sample_bytes is None else mib(one.two_sample_bytes),
        )
        for one in known
    )
    head = (Column("phase", numeric=False), Column("list", numeric=False), Column("setting", numeric=False))
    table = Table((*head, Column("graphs"), *(Column(f"{title}, MiB") for title in columns)), rows)
    keys = [Key("predicted, with its interval", "c1", "dot"), Key("two-sample estimate", "c2", "cross")]
    height = 110 + ROW_PX * len(known)
    return drawing("predicted-memory", "Predicted graph memory", says, draw, table, keys, (height, height))
