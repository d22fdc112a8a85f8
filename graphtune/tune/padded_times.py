"""What padding takes: device times of replays whose batch does not fill its bucket, at the context they were timed at.

A step of n requests in a larger bucket runs the bucket's kernels and reads the KV of n. Against n requests in a bucket
of their own it takes more by a figure that changes little with context: of 8B on the H200, 8 requests in a bucket of 24
took 167, 171 and 211 µs more at 512, 1,024 and 2,048 tokens. So that figure is measured at one context and added at
any. It may be below zero: a matrix product of 8 rows can take less time than one of 1.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

Line = tuple[tuple[int, ...], tuple[float, ...]]


@dataclass(frozen=True)
class PaddedTimes:
    """``full``: microseconds of full buckets by size. ``padded``: of each bucket, by the raw size replayed in it. Both
    at ``context_tokens``.

    A bucket between two that were timed padded takes what lies between theirs. A batch smaller than any timed in its
    bucket takes as long as the smallest one: emptier buckets take hardly less.
    """

    context_tokens: int
    full: Mapping[int, float]
    padded: Mapping[int, Mapping[int, float]]

    def extra_us(self, raw_size: int, bucket: int) -> float | None:
        """What ``raw_size`` requests take more in ``bucket`` than in one of their own; None where that is not known."""
        if raw_size == bucket:
            return 0.0
        at = bisect_left(self.buckets, bucket)
        sizes, times = self._full
        if at == len(self.buckets) or not sizes[0] <= raw_size <= sizes[-1]:
            return None
        if self.buckets[at] == bucket:
            # Below its first entry a column is as that entry.
            return float(np.interp(raw_size, *self._columns[bucket]) - np.interp(raw_size, sizes, times))
        return self._between(raw_size, bucket, self.buckets[at - 1] if at else 0, self.buckets[at])

    def inner(self) -> Iterator[tuple[int, int]]:
        """(raw size, bucket) of each padded replay that lies between two others of its bucket."""
        for bucket, (sizes, _) in self._columns.items():
            yield from ((raw, bucket) for raw in sizes[1:-1])

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
        """Those that were timed padded and full, ascending."""
        return tuple(sorted(bucket for bucket in self.padded if bucket in self.full))

    @cached_property
    def _full(self) -> Line:
        return _line(self.full)

    @cached_property
    def _columns(self) -> dict[int, Line]:
        """Raw sizes and times of each bucket, the full one among them."""
        return {bucket: _line({**self.padded[bucket], bucket: self.full[bucket]}) for bucket in self.buckets}


def _line(times: Mapping[int, float]) -> Line:
    """Sizes ascending, and their times."""
    sizes = sorted(times)
    return tuple(sizes), tuple(times[size] for size in sizes)
