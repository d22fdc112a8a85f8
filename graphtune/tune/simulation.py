"""What a simulated trace came to: histograms, throughput, waiting times, and whether the server kept up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from graphtune.tune.workload import DecodeShare, PrefillShare, Workload

if TYPE_CHECKING:
    from graphtune.tune.simulate import _Run

QUANTILES = (50, 90, 99)
# A server falls behind when waits grow from quarter to quarter of the trace and this share of it waits at its end.
OVERLOAD_SHARE = 0.01
OVERLOAD_LEAST = 10
OVERLOAD_MISSING = (
    "the server falls behind: waits grow for as long as the load lasts, so that their figures say nothing"
)


@dataclass(frozen=True)
class Tail:
    """Mean and percentiles in seconds. ``count`` is how many values there were."""

    count: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True)
class Simulation:
    """A trace under one graph configuration.

    ``decode`` are (requests, steps, mean KV tokens per request, seconds), ``prefill`` (tokens, steps). ``overload``
    says how the queue grew, None when the server kept up; ``ttft`` is None with it (see ``absent``) and where nothing
    finished, ``inter_token`` where no request generates two tokens. ``prefill_source`` says who states prefill times;
    ``extrapolated`` is the share of decode steps at contexts beyond the sweep.
    """

    source: str
    load: float
    sizes: tuple[int, ...]
    requests: int
    finished: int
    refused: int
    preemptions: int
    seconds: float
    requests_per_s: float
    tokens_per_s: float
    prompt_tokens: int
    prefill_tokens: int
    generated_tokens: int
    decode: tuple[tuple[int, int, float, float], ...]
    prefill: tuple[tuple[int, int], ...]
    expected_step_us: float | None
    coverage: float | None
    padding_waste: float | None
    ttft: Tail | None
    inter_token: Tail | None
    most_kv_tokens: int
    kv_tokens: int
    max_running_requests: int
    chunk_size: int
    extrapolated: float
    prefill_source: str
    overload: str | None
    absent: dict[str, str]

    def workload(self) -> Workload:
        """The steps of this simulation as a histogram."""
        return Workload(
            decode=tuple(DecodeShare(size, float(steps), max(1.0, kv)) for size, steps, kv, _ in self.decode),
            prefill=tuple(PrefillShare(tokens, float(steps)) for tokens, steps in self.prefill),
            max_running_requests=self.max_running_requests,
            chunk_size=self.chunk_size,
            source=f"{self.source} simulated at load {self.load:.3g}" + (", overloaded" if self.overload else ""),
            weighting="per_step",
        )

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["decode"] = [
            {"requests": size, "steps": steps, "mean_kv_tokens": kv, "seconds": seconds}
            for size, steps, kv, seconds in self.decode
        ]
        values["prefill"] = [{"tokens": tokens, "steps": steps} for tokens, steps in self.prefill]
        values["missing"] = values.pop("absent")
        return {"schema": 1, **values}


def summary_of(run: _Run, load: float) -> Simulation:
    """The figures of a finished run."""
    counts, trace = run.counts, run.trace
    finished = [at for at, second in enumerate(run.finished_s) if second is not None]
    overload = _overload(run)
    absent = {}
    ttft = None
    if overload is not None:
        absent["ttft"] = OVERLOAD_MISSING
    elif not finished:
        absent["ttft"] = "no request finished"
    else:
        ttft = tail_of(
            np.array([(run.first_token_s[at] or 0.0) - run.arrivals[at] for at in finished]), np.ones(len(finished))
        )
    inter_token = tail_of(np.array(counts.gaps_s), np.array(counts.gap_counts, dtype=float))
    if inter_token is None:
        absent["inter_token"] = "no request generates two tokens"
    steps = sum(counts.decode_steps)
    if not steps:
        absent |= dict.fromkeys(("expected_step_us", "coverage", "padding_waste"), "no decode step ran")
    decode = tuple(
        (size, ran, counts.decode_kv_tokens[size] / ran, counts.decode_s[size])
        for size, ran in enumerate(counts.decode_steps)
        if ran
    )
    served = [(size, ran, bucket) for size, ran, *_ in decode if (bucket := run.times.buckets[size]) is not None]
    computed = sum(ran * bucket for _, ran, bucket in served)
    if steps and not computed:
        absent["padding_waste"] = "no step is served by a graph"
    return Simulation(
        source=trace.source,
        load=load,
        sizes=run.times.sizes,
        requests=len(trace),
        finished=len(finished),
        refused=len(run.refused),
        preemptions=counts.preemptions,
        seconds=run.now,
        requests_per_s=len(finished) / run.now if run.now else 0.0,
        tokens_per_s=counts.generated_tokens / run.now if run.now else 0.0,
        prompt_tokens=sum(run.prompts[at] for at in finished),
        prefill_tokens=counts.prefill_tokens,
        generated_tokens=counts.generated_tokens,
        decode=decode,
        prefill=tuple(sorted(counts.prefill_steps.items())),
        expected_step_us=sum(counts.decode_s) / steps * 1e6 if steps else None,
        coverage=sum(ran for _, ran, _ in served) / steps if steps else None,
        padding_waste=sum(ran * (bucket - size) for size, ran, bucket in served) / computed if computed else None,
        ttft=ttft,
        inter_token=inter_token,
        most_kv_tokens=counts.most_kv_tokens,
        kv_tokens=run.server.kv_tokens,
        max_running_requests=run.server.max_running_requests,
        chunk_size=run.server.chunk_size,
        extrapolated=counts.extrapolated_steps / steps if steps else 0.0,
        prefill_source=run.prefill.source,
        overload=overload,
        absent=absent,
    )


def tail_of(values: NDArray[np.float64], weights: NDArray[np.float64]) -> Tail | None:
    """Weighted mean and nearest-rank percentiles; None without values."""
    if not len(values):
        return None
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    at = np.searchsorted(reached, [reached[-1] * q / 100 * (1 - 1e-12) for q in QUANTILES])
    p50, p90, p99 = (float(values[order[index]]) for index in at)
    mean = float(values @ weights / reached[-1])
    return Tail(int(reached[-1]), mean, p50, p90, p99, float(values.max()))


def _overload(run: _Run) -> str | None:
    """How the queue grew, or None: the mean wait rises through the last three quarters of the arrivals, and at the last
    arrival more than a hundredth of the trace (ten requests at least) still waits."""
    waiting = run.counts.waiting_at_last_arrival
    if waiting <= max(OVERLOAD_LEAST, OVERLOAD_SHARE * len(run.trace)):
        return None
    waits = [
        admitted - arrival
        for admitted, arrival in zip(run.admitted_s, run.arrivals, strict=True)
        if admitted is not None
    ]
    quarters = _quarter_means(waits)
    if not quarters[1] < quarters[2] < quarters[3]:
        return None
    last = run.arrivals[-1]
    return (
        f"requests wait {quarters[1]:.1f} s, {quarters[2]:.1f} s and {quarters[3]:.1f} s in the last three quarters of "
        f"the trace; at the last arrival {waiting:,} wait, and {run.now - last:,.0f} s pass until all are done"
    )


def _quarter_means(values: Sequence[float]) -> list[float]:
    return [float(np.mean(part)) if len(part) else 0.0 for part in np.array_split(np.array(values), 4)]
