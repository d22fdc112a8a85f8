"""Step time of one prefill from measured points: one request without a cached prefix, by new tokens.

A bucket is measured at its size and just over the bucket below it in the measured list, where padding is worst; between
the two the time is on the line. In a shorter list a bucket also serves fewer tokens than that: it then takes as long as
at the fewest that were measured, an upper bound. A bucket that was not measured takes as long as the line between its
full neighbours says. Eager runs are measured at the same tokens and lie on the line between neighbours; they are
graphtune's own, a lower bound of a server's, to which a stated overhead is added. Nothing is extrapolated but for
``PrefillSteps``, which says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from graphtune.engines.base import Dispatch, Padding
from graphtune.results import CellResult
from graphtune.stats import PointKey, all_medians, combined_us, undisturbed
from graphtune.tune.candidates import bucket_for
from graphtune.tune.latency_model import StepFigure, between
from graphtune.tune.stand_ins import with_stand_ins


class PrefillKey(NamedTuple):
    """One entry of a model: ``bucket`` is None for eager."""

    backend: str
    bucket: int | None
    tokens: int


@dataclass(frozen=True)
class PrefillModel:
    """Medians by bucket and new tokens, of eager runs and of one backend's graphs.

    ``cell_ids`` are the cells whose points are in it; ``processes`` holds the same points as each process measured
    them, and ``stood_in`` those of a process that others stood in for.
    """

    backend: str
    table: Mapping[PrefillKey, float]
    cell_ids: tuple[str, ...]
    processes: Mapping[int, PrefillModel] = field(default_factory=dict)
    stood_in: frozenset[PrefillKey] = frozenset()

    def step(self, raw_size: int, bucket: int | None, context_tokens: float = 0.0) -> StepFigure | None:
        """A prefill of ``raw_size`` tokens in ``bucket``, or eager where it is None; None beyond what was measured.

        Each is worked out once.
        """
        key = (raw_size, bucket)
        if key not in self._steps:
            self._steps[key] = self._step(raw_size, bucket)
        return self._steps[key]

    def _step(self, raw_size: int, bucket: int | None) -> StepFigure | None:
        column = self._columns.get(bucket)
        if column is None:
            return None if bucket is None or raw_size > bucket else self._unmeasured(bucket)
        if raw_size > (max(column) if bucket is None else bucket):
            return None
        least = next(iter(column))
        if raw_size < least:
            return column[least]._replace(provenance="interpolated")
        return between(column, raw_size)

    def _unmeasured(self, bucket: int) -> StepFigure | None:
        """A full bucket between two measured ones, or below the smallest."""
        full = {of: figure for of in self.buckets if (figure := self._columns[of].get(of)) is not None}
        if not full or bucket > max(full):
            return None
        figure = between(full, max(bucket, min(full)))
        return figure and figure._replace(provenance="interpolated")

    @cached_property
    def buckets(self) -> tuple[int, ...]:
        """Measured buckets, ascending."""
        return tuple(sorted({key.bucket for key in self.table if key.bucket is not None}))

    @property
    def most_tokens(self) -> int:
        """The most tokens of any point."""
        return max(key.tokens for key in self.table)

    def slower_than_eager(self, bucket: int, by: float) -> bool:
        """True when the full bucket takes longer than an eager run of its tokens, by more than the share ``by``."""
        replay, eager = self.step(bucket, bucket), self.step(bucket, None)
        return replay is not None and eager is not None and replay.us > eager.us * (1 + by)

    @cached_property
    def knots(self) -> tuple[int, ...]:
        """Token counts between which every bucket and eager runs take longer in proportion, ascending."""
        return tuple(sorted({key.tokens for key in self.table} | set(self.buckets)))

    @cached_property
    def _steps(self) -> dict[tuple[int, int | None], StepFigure | None]:
        return {}

    @cached_property
    def _columns(self) -> dict[int | None, dict[int, StepFigure]]:
        columns: dict[int | None, dict[int, StepFigure]] = {}
        for key, us in sorted(self.table.items(), key=lambda item: item[0].tokens):
            column = columns.setdefault(key.bucket, {})
            column[key.tokens] = StepFigure(us, "measured", float(key not in self.stood_in))
        return columns


def prefill_models(cells: Iterable[CellResult], eager_overhead_us: float = 0.0) -> dict[str, PrefillModel]:
    """A model for each backend that prefill was recorded with, of the attention with the most points.

    Empty where no prefill of one request without a prefix was timed.
    """
    cells = tuple(cells)
    medians = {key: by for key, by in all_medians(cells).items() if _is_plain(key)}
    attentions = Counter(key.attention for key in medians if key.execution == "graph")
    if not attentions:
        return {}
    attention = attentions.most_common(1)[0][0]
    known = {_key_of(key): undisturbed(by) for key, by in medians.items() if key.attention == attention}
    complete = with_stand_ins(known, kind=lambda key: key.backend)
    ids = tuple(cell.cell_id for cell in cells if any(point.phase == "prefill" for point in cell.points))
    processes = sorted({process for by in known.values() for process in by})

    def us(key: PrefillKey, figure: float) -> float:
        return figure + eager_overhead_us if key.bucket is None else figure

    def of(backend: str) -> PrefillModel:
        mine = {key: by for key, by in complete.items() if key.backend in (backend, "eager")}
        each = {
            process: PrefillModel(
                backend,
                {key: us(key, by[process]) for key, by in mine.items()},
                ids,
                stood_in=frozenset(key for key in mine if process not in known[key]),
            )
            for process in processes
        }
        return PrefillModel(backend, {key: us(key, combined_us(by)) for key, by in mine.items()}, ids, each)

    return {backend: of(backend) for backend in sorted({key.backend for key in known} - {"eager"})}


def _is_plain(key: PointKey) -> bool:
    return key.phase == "prefill" and key.requests in (None, 1) and key.context_tokens == 0


def _key_of(key: PointKey) -> PrefillKey:
    bucket = None if key.execution == "eager" else key.padded_size
    return PrefillKey("eager" if bucket is None else key.backend, bucket, key.raw_size)


def prefill_steps(
    models: Mapping[str, PrefillModel], dispatch: Dispatch, backend: str | None = None, sizes: tuple[int, ...] = ()
) -> PrefillSteps | None:
    """Prefill times of a server under a list (none: eager), for simulation; None where the sweep holds none."""
    if not models:
        return None
    model = models.get(backend or "", next(iter(models.values())))
    return PrefillSteps(model, sizes, dispatch.prefill, dispatch.prefill_cap_factor)


@dataclass(frozen=True)
class PrefillSteps:
    """Prefill times of a server under a list, for simulation. Tokens above the measured ones take as much longer as the
    last two measured eager runs say; tokens without any figure the shortest measured time."""

    model: PrefillModel
    sizes: tuple[int, ...]
    padding: Padding
    cap_factor: float | None
    source: str = "this sweep"

    def seconds(self, tokens: int) -> float:
        bucket = bucket_for(tokens, self.sizes, self.padding, self.cap_factor)
        figure = self.model.step(tokens, bucket)
        return (self._beyond(tokens) if figure is None else figure.us) * 1e-6

    def _beyond(self, tokens: int) -> float:
        (low, at_low), (high, at_high) = self._last_two
        return at_high + max(0.0, at_high - at_low) / max(1, high - low) * max(0, tokens - high)

    @cached_property
    def _last_two(self) -> tuple[tuple[int, float], tuple[int, float]]:
        eager = sorted((key.tokens, us) for key, us in self.model.table.items() if key.bucket is None)
        eager = eager or sorted((key.tokens, us) for key, us in self.model.table.items())
        return eager[max(0, len(eager) - 2)], eager[-1]
