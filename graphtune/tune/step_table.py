"""A model's figures for fixed steps in any bucket, each worked out once and gathered at once for a whole list.

A recommendation evaluates hundreds of lists on the same steps, and two lists differ in few of the buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from graphtune.tune.latency_model import StepFigure

EAGER = 0
"""Stands for no bucket."""


@dataclass(frozen=True)
class Step:
    """Decode steps of ``requests`` requests holding ``context_tokens`` KV tokens each on average."""

    requests: int
    weight: float
    context_tokens: float

    @property
    def kv_tokens(self) -> float:
        return self.requests * self.context_tokens


class StepModel(Protocol):
    """How long steps take: of ``raw_size`` rows in a bucket, or eager where it is None. ``processes`` are the same
    figures as each process measured them, ``cell_ids`` where they are from."""

    def step(self, raw_size: int, bucket: int | None, context_tokens: float) -> StepFigure | None: ...

    @property
    def processes(self) -> Mapping[int, StepModel]: ...

    @property
    def cell_ids(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class StepFigures:
    """Of each step (n,): microseconds (NaN without a figure), the share that no other process stood in for, and whether
    it was measured as it is."""

    us: np.ndarray
    own: np.ndarray
    measured: np.ndarray

    @property
    def known(self) -> np.ndarray:
        return ~np.isnan(self.us)


class StepTable:
    """``model`` at ``steps``. A cell of the table is filled when a list first asks for it."""

    def __init__(self, steps: Sequence[Step], model: StepModel) -> None:
        self._steps = steps
        self._model = model
        self._columns: dict[int, int] = {}
        shape = (len(steps), 0)
        self._us, self._own = np.empty(shape), np.empty(shape)
        self._measured, self._filled = np.empty(shape, bool), np.empty(shape, bool)

    def of(self, buckets: np.ndarray) -> StepFigures:
        """The figures of every step in its bucket of ``buckets`` (n,), or ``EAGER``."""
        used, inverse = np.unique(buckets, return_inverse=True)
        columns = np.array([self._column(bucket) for bucket in used.tolist()], dtype=int)
        at = (np.arange(len(self._steps)), columns[inverse])
        for row in np.flatnonzero(~self._filled[at]).tolist():
            self._fill(row, int(buckets[row]))
        return StepFigures(self._us[at], self._own[at], self._measured[at])

    def _column(self, bucket: int) -> int:
        if bucket not in self._columns:
            self._columns[bucket] = len(self._columns)
            if len(self._columns) > self._us.shape[1]:
                more = ((0, 0), (0, len(self._columns)))
                self._us, self._own = np.pad(self._us, more), np.pad(self._own, more)
                self._measured, self._filled = np.pad(self._measured, more), np.pad(self._filled, more)
        return self._columns[bucket]

    def _fill(self, row: int, bucket: int) -> None:
        step, at = self._steps[row], (row, self._columns[bucket])
        figure = self._model.step(step.requests, None if bucket == EAGER else bucket, step.context_tokens)
        self._us[at] = np.nan if figure is None else figure.us
        self._own[at] = 0.0 if figure is None else figure.own
        self._measured[at] = figure is not None and figure.provenance == "measured"
        self._filled[at] = True
