"""Made-up traffic by name, for when nothing was measured: each is a formula that a page can state."""

from __future__ import annotations

import math
from collections.abc import Callable

from graphtune.errors import InputError
from graphtune.tune.workload import DecodeShare, Weighting, Workload, steady, uniform

FULL_SHARE = 0.9


def ramp(most: int) -> Workload:
    """Load that climbs evenly: every number of requests from 1 to ``most`` for as long (not for as many steps)."""
    return _workload(f"ramp to {most}", [1.0] * most, "per_second")


def interactive(most: int) -> Workload:
    """People who come and go independently: at any time a Poisson number of requests around half of ``most``, between 1
    and ``most`` (what a server with enough room sees of arrivals at random, whatever their lengths)."""
    mean = max(1.0, most / 2)
    logs = [n * math.log(mean) - mean - math.lgamma(n + 1) for n in range(1, most + 1)]
    return _workload(f"interactive up to {most}", [math.exp(log) for log in logs], "per_second")


def batch(most: int) -> Workload:
    """A queue worked off: nine of ten steps with ``most`` requests, the rest spread evenly over the draining tail."""
    tail = (1 - FULL_SHARE) / max(1, most - 1)
    return _workload(f"batch of {most}", [*[tail] * (most - 1), FULL_SHARE], "per_step")


PRESETS: dict[str, Callable[[int], Workload]] = {
    "uniform": uniform,
    "steady": steady,
    "ramp": ramp,
    "interactive": interactive,
    "batch": batch,
}


def preset(name: str, requests: int) -> Workload:
    """The preset of that name for up to ``requests`` requests. Raises InputError."""
    if name not in PRESETS:
        raise InputError(f"{name!r} is no preset", action=f"Known: {', '.join(PRESETS)}.")
    if requests < 1:
        raise InputError(f"{name} of {requests} requests makes no sense", action="Give at least 1.")
    return PRESETS[name](requests)


def _workload(source: str, weights: list[float], weighting: Weighting) -> Workload:
    shares = tuple(DecodeShare(n, weight) for n, weight in enumerate(weights, 1) if weight > 0)
    return Workload(shares, (), len(weights), None, source, weighting)
