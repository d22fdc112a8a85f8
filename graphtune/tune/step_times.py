"""How long steps take under a capture list, looked up fast: a table over batch sizes and contexts.

A decode step of ``n`` requests is a replay of the bucket that the engine's dispatch picks, or eager. The table holds
the latency model's figures at the measured contexts and at points between them, and is linear between those.
Below the measured contexts the lowest answers. Above them (or above those that a size was measured at) the time grows
with every further KV token as it does between the last two contexts of the largest size that has two: such steps are
extrapolated, and counted.

``PrefillRate`` is what a user states of prefill, and says so; ``prefill_model.PrefillSteps`` is what a sweep measured.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np

from graphtune.engines.base import Padding
from graphtune.errors import InputError
from graphtune.results import Execution
from graphtune.tune.candidates import bucket_for
from graphtune.tune.latency_model import LatencyModel

POINTS_BETWEEN_CONTEXTS = 8


class PrefillTimes(Protocol):
    """How long prefill steps take, and where that is from."""

    @property
    def source(self) -> str: ...

    def seconds(self, tokens: int) -> float: ...


@dataclass(frozen=True)
class PrefillRate:
    """Prefill steps at a stated rate. ``least_s`` is the shortest step: one token reads all weights, as a decode step
    of one request does. ``source`` says who states the rate."""

    tokens_per_s: float
    least_s: float
    source: str

    def seconds(self, tokens: int) -> float:
        return max(self.least_s, tokens / self.tokens_per_s)


def stated_prefill(tokens_per_s: float | None, model: LatencyModel) -> PrefillRate:
    """The rate that a user states. Raises InputError without one."""
    if tokens_per_s is None or not 0 < tokens_per_s < float("inf"):
        raise InputError(
            "this sweep holds no prefill times, and without them there is no waiting time to tell",
            where="--prefill-tokens-per-s",
            action="Give the prompt tokens per second that your server prefills.",
        )
    smallest = model.sizes("graph", model.main_context)[0]
    least = model.step(smallest, smallest, model.main_context)
    assert least is not None
    return PrefillRate(tokens_per_s, least.us * 1e-6, "--prefill-tokens-per-s")


@dataclass(frozen=True)
class StepTimes:
    """Decode step times in seconds for batches of 1 to ``len(buckets) - 1`` requests.

    ``buckets[n]`` serves ``n`` requests (None: eager; entry 0 is unused). ``rows[n]`` holds the times at
    ``contexts`` (mean KV tokens per request, ascending); ``known_upto[n]`` is the last context with a measurement
    around it and ``per_kv_token_s`` what each KV token adds beyond, by how the step runs.
    """

    sizes: tuple[int, ...]
    buckets: tuple[int | None, ...]
    contexts: tuple[float, ...]
    rows: tuple[tuple[float, ...], ...]
    known_upto: tuple[float, ...]
    per_kv_token_s: tuple[float, ...]

    @property
    def most_requests(self) -> int:
        return len(self.buckets) - 1

    def seconds(self, requests: int, context_tokens: float) -> float:
        """One step of ``requests`` requests that hold ``context_tokens`` KV tokens each on average."""
        contexts, row = self.contexts, self.rows[requests]
        if context_tokens >= contexts[-1]:
            return row[-1] + self.per_kv_token_s[requests] * requests * (context_tokens - contexts[-1])
        at = bisect_right(contexts, context_tokens)
        if at == 0:
            return row[0]
        low, high = contexts[at - 1], contexts[at]
        return row[at - 1] + (row[at] - row[at - 1]) * (context_tokens - low) / (high - low)

    def is_extrapolated(self, requests: int, context_tokens: float) -> bool:
        return context_tokens > self.known_upto[requests]


def step_times(
    model: LatencyModel,
    sizes: Sequence[int],
    most_requests: int,
    padding: Padding = "always",
    cap_factor: float | None = None,
) -> StepTimes:
    """The table for a capture list (in requests). Raises InputError for batches or buckets that were not measured."""
    captured = tuple(sorted(set(sizes)))
    buckets = [bucket_for(n, captured, padding, cap_factor) for n in range(1, most_requests + 1)]
    contexts = _grid(model.contexts())
    slopes = {execution: _slope(model, execution) for execution in ("graph", "eager")}
    rows, known = [], []
    for requests, bucket in enumerate(buckets, 1):
        slope = slopes["eager" if bucket is None else "graph"]
        row, upto = _row(model, requests, bucket, contexts, slope)
        rows.append(row)
        known.append(upto)
    return StepTimes(
        sizes=captured,
        buckets=(None, *buckets),
        contexts=contexts,
        rows=((), *rows),
        known_upto=(0.0, *known),
        per_kv_token_s=(0.0, *(slopes["eager" if bucket is None else "graph"] for bucket in buckets)),
    )


def _grid(measured: Sequence[int]) -> tuple[float, ...]:
    """The measured contexts with points between, evenly spaced between two neighbours."""
    points: list[float] = [float(measured[0])]
    for low, high in pairwise(measured):
        points += np.linspace(low, high, POINTS_BETWEEN_CONTEXTS + 2)[1:].tolist()
    return tuple(points)


def _row(
    model: LatencyModel, requests: int, bucket: int | None, contexts: Sequence[float], slope: float
) -> tuple[tuple[float, ...], float]:
    """Times of one batch size at all contexts, and the last context that is measured or between measured ones."""
    found: list[float | None] = []
    for context in contexts:
        figure = model.step(requests, bucket, context)
        found.append(None if figure is None else figure.us * 1e-6)
    measured = [at for at, seconds in enumerate(found) if seconds is not None]
    if not measured:
        served = "eager" if bucket is None else f"in a graph of {bucket}"
        raise InputError(
            f"the sweep has no step time for {requests} requests {served}",
            action="Lower --max-running, capture other sizes, or sweep larger ones.",
        )
    first, last = measured[0], measured[-1]
    row: list[float] = []
    for at, seconds in enumerate(found):
        if seconds is not None:
            row.append(seconds)
        elif at < first:
            row.append(float(found[first] or 0.0))
        else:
            nearest = max(m for m in measured if m < at)
            row.append(float(found[nearest] or 0.0) + slope * requests * (contexts[at] - contexts[nearest]))
    return tuple(row), contexts[last]


def _slope(model: LatencyModel, execution: Literal["graph", "eager"]) -> float:
    """Seconds that one more KV token adds: between the last two contexts of the largest size measured at two; 0 when
    none was."""
    run: Execution = execution
    by_size: dict[int, list[int]] = {}
    for context in model.contexts(run):
        for size in model.sizes(run, context):
            by_size.setdefault(size, []).append(context)
    several = [size for size, contexts in by_size.items() if len(contexts) > 1]
    if not several:
        return 0.0
    size = max(several)
    low, high = by_size[size][-2:]
    table = {context: model.table[run, context][size] for context in (low, high)}
    return max(0.0, (table[high] - table[low]) * 1e-6 / (size * (high - low)))
