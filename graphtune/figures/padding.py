"""What padding takes: device time of batches replayed in larger buckets, beside their own and the full bucket."""

from __future__ import annotations

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
from graphtune.tune.padded_times import PaddedTimes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUCKET_ROLES: tuple[Role, ...] = ("c3", "c4", "c5", "c7", "c6")


def shown_buckets(of: PaddedTimes) -> tuple[int, ...]:
    """The largest bucket and, downwards, always the next one of a quarter of the one before or less."""
    shown: list[int] = []
    for bucket in reversed(of.buckets):
        if not shown or bucket * 4 <= shown[-1]:
            shown.append(bucket)
    return tuple(reversed(shown[: len(BUCKET_ROLES)]))


def draw_padding(of: PaddedTimes) -> Drawing:
    shown = dict(zip(shown_buckets(of), BUCKET_ROLES, strict=False))

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        quiet_grid(axes)
        own = sorted(of.full.items())
        axes.plot([size for size, _ in own], [us / 1000 for _, us in own], color=color("c1"), linewidth=2.4)
        for bucket, role in shown.items():
            column = of.column(bucket)
            axes.plot(column.sizes, [us / 1000 for us in column.us], color=color(role), marker="o", markersize=3.4)
        request_axis(axes, sorted(of.full), narrow=narrow)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylabel("replay on the device, ms")

    rows = tuple(
        (f"{raw}", f"{bucket}", us_cell(of.full.get(raw)), us_cell(us), us_cell(of.full[bucket]))
        for bucket in of.buckets
        for raw, us in sorted(of.padded[bucket].items())
    )
    columns = ("requests", "in bucket", "bucket of their own, µs", "padded, µs", "full bucket, µs")
    says = (
        f"Device time of batches that do not fill their bucket, at {of.context_tokens:,} KV tokens per request. A "
        "padded step runs the kernels of its bucket and reads its own KV. Where a line lies just above that of own "
        "buckets, the larger bucket serves smaller batches nearly as fast, and they need no graph of their own. Where "
        "it lies below, its kernels are faster."
    )
    keys = [
        Key("a bucket of their own", "c1"),
        *(Key(f"in a bucket of {bucket}", role) for bucket, role in shown.items()),
    ]
    table = Table(tuple(map(Column, columns)), rows)
    return drawing("padding", "What padding takes", says, draw, table, keys, (340, 300))
