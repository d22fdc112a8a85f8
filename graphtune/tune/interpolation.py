"""How far interpolated step times are off: each measured size left out once and put back as the model would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphtune.stats import nine_of_ten
from graphtune.tune.latency_model import LatencyModel


@dataclass(frozen=True)
class Interpolation:
    """Relative errors of replays left out and interpolated: of full buckets, and of padded replays within their bucket.
    ``relative`` and ``padded_relative`` are what nine of ten stay below, null where nothing lies between two others.
    The neighbours of what is left out lie twice as far apart as those of what was not measured, so that real errors are
    smaller."""

    relative: float | None
    points: int
    padded_relative: float | None = None
    padded_points: int = 0

    @property
    def words(self) -> str:
        if self.relative is None:
            return "no size has two measured neighbours, so the error of interpolation is not known"
        said = (
            f"nine in ten of {self.points} replays left out and interpolated are within {self.relative:.1%} of measured"
        )
        if self.padded_relative is not None:
            said += f", of {self.padded_points} padded ones within {self.padded_relative:.1%}"
        return said


def interpolation_of(model: LatencyModel) -> Interpolation:
    """Leave-one-out errors over the inner sizes of every context, and over the padded replays between two others of
    their bucket, each put back as the model would."""
    full, padded = sorted(_of_full_buckets(model)), sorted(_of_padded(model))
    return Interpolation(
        nine_of_ten(full) if full else None, len(full), nine_of_ten(padded) if padded else None, len(padded)
    )


def _of_full_buckets(model: LatencyModel) -> Iterator[float]:
    for context in model.contexts():
        for size in model.sizes("graph", context)[1:-1]:
            measured = model.table["graph", context][size]
            guess = model.without(size, context).graph(size, context)
            assert guess is not None  # it has a neighbour on each side
            yield abs(guess.us / measured - 1)


def _of_padded(model: LatencyModel) -> Iterator[float]:
    if model.padded is None:
        return
    for raw, bucket in model.padded.inner():
        times = (model.padded, model.padded.without(raw, bucket))
        measured, guess = (model.replay(raw, bucket, model.main_context, of) for of in times)
        if measured is not None and guess is not None:
            yield abs(guess.us / measured.us - 1)
