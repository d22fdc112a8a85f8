"""What padding takes: device times of replays whose batch does not fill its bucket, at the context they were timed at.

A step of n requests in a larger bucket runs the bucket's kernels and reads the KV of n. What it takes more than n
requests in a bucket of their own is measured at one context and added at any. The kernels' part does not change with
context; attention's does where buckets are emptier than half: of 8B on the H200, 32 requests in a bucket of 72 took
340, 358 and 372 µs more at 512, 1,024 and 2,048 tokens, but of 0.6B, 32 in 136 took 466, 762 and 1,318 (14 % of the
step too much at half the context, 12 % too little at twice). It may be below zero: a matrix product of 8 rows can take
less time than one of 1.

Between two raw sizes that were timed in a bucket, what is smooth depends on the size. Up to ``FEW_ROWS`` requests it is
the time in the bucket: products of few rows take other kernels from one size to the next in buckets of their own, not
in one bucket. Above, it is what padding adds: there attention makes steps where another wave of work begins (0.6B takes
22 % longer with 152 requests than with 144), and those belong to the requests, whatever the bucket. On replays of
real batches the first way was 14 % off just above such a step, the second 4 % off at few rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

FEW_ROWS = 16


class Column(NamedTuple):
    """Raw sizes replayed in one bucket (ascending, the full bucket last), their times, and what those are more than in
    a bucket of their own."""

    sizes: tuple[int, ...]
    us: tuple[float, ...]
    extra_us: tuple[float, ...]


@dataclass(frozen=True)
class PaddedTimes:
    """``full``: microseconds of full buckets by size. ``padded``: of each bucket, by the raw size replayed in it. Both
    at ``context_tokens``.

    A bucket between two that were timed padded takes what lies between theirs. Below the smallest batch timed in a
    bucket its time goes on as between the two smallest.
    """

    context_tokens: int
    full: Mapping[int, float]
    padded: Mapping[int, Mapping[int, float]]

    def extra_us(self, raw_size: int, bucket: int) -> float | None:
        """What ``raw_size`` requests take more in ``bucket`` than in one of their own; None where that is not known."""
        if raw_size == bucket:
            return 0.0
        at = bisect_left(self.buckets, bucket)
        own = self._own_us(raw_size)
        if at == len(self.buckets) or own is None:
            return None
        if self.buckets[at] != bucket:
            return self._between(raw_size, bucket, self.buckets[at - 1] if at else 0, self.buckets[at])
        column = self.column(bucket)
        if raw_size < column.sizes[0]:
            per_request = max(0.0, (column.us[1] - column.us[0]) / (column.sizes[1] - column.sizes[0]))
            return column.us[0] - per_request * (column.sizes[0] - raw_size) - own
        if raw_size <= FEW_ROWS:
            return float(np.interp(raw_size, column.sizes, column.us)) - own
        # What is measured below nothing here is noise, and would make larger buckets look better than exact ones.
        return max(0.0, float(np.interp(raw_size, column.sizes, column.extra_us)))

    def inner(self) -> Iterator[tuple[int, int]]:
        """(raw size, bucket) of each padded replay that lies between two others of its bucket."""
        for bucket in self.buckets:
            yield from ((raw, bucket) for raw in self.column(bucket).sizes[1:-1])

    def without(self, raw_size: int, bucket: int) -> PaddedTimes:
        """The same without one padded replay, to see how well the others tell it."""
        left = {raw: us for raw, us in self.padded[bucket].items() if raw != raw_size}
        return replace(self, padded={**self.padded, bucket: left})

    def _between(self, raw_size: int, bucket: int, below: int, above: int) -> float | None:
        low, high = max(below, raw_size), above
        least, most = self.extra_us(raw_size, low), self.extra_us(raw_size, high)
        if least is None or most is None:
            return None
        return least + (most - least) * (bucket - low) / (high - low)

    @cached_property
    def buckets(self) -> tuple[int, ...]:
        """Those that were timed full and with batches of which it is known what they take by themselves, ascending."""
        least = min(self.full, default=0)
        return tuple(
            sorted(of for of, times in self.padded.items() if of in self.full and max(times, default=0) >= least)
        )

    def column(self, bucket: int) -> Column:
        """What was timed in one of ``buckets``; each is worked out once."""
        if bucket not in self._columns:
            known = [*self._known(bucket), (bucket, self.full[bucket], self.full[bucket])]
            sizes, times, owns = zip(*known, strict=True)
            extra = tuple(us - own for us, own in zip(times, owns, strict=True))
            self._columns[bucket] = Column(sizes, times, extra)
        return self._columns[bucket]

    def _known(self, bucket: int) -> list[tuple[int, float, float]]:
        """Raw sizes timed in a bucket, ascending, with their times there and in a bucket of their own."""
        times = sorted(self.padded[bucket].items())
        return [(raw, us, own) for raw, us in times if (own := self._own_us(raw)) is not None]

    def _own_us(self, raw_size: int) -> float | None:
        sizes, times = self._full
        if not sizes.size or not sizes[0] <= raw_size <= sizes[-1]:
            return None
        return float(np.interp(raw_size, sizes, times))

    @cached_property
    def _full(self) -> tuple[np.ndarray, np.ndarray]:
        """Sizes ascending, and their times."""
        sizes = sorted(self.full)
        return np.array(sizes), np.array([self.full[size] for size in sizes])

    @cached_property
    def _columns(self) -> dict[int, Column]:
        return {}
