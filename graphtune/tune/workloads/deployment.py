"""What a deployment makes of a workload: ranks that step together, a server of one phase, weights in steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from graphtune.engines.base import Role
from graphtune.errors import InputError
from graphtune.tune.candidates import bucket_for
from graphtune.tune.latency_model import LatencyModel
from graphtune.tune.workload import DecodeShare, PrefillShare, Workload


def deployed(workload: Workload, ranks: int, role: Role | None) -> Workload:
    """The steps of one of ``ranks`` servers that do one phase or both. Raises InputError where none are left."""
    return over_ranks(workload if role is None else of_role(workload, role), ranks)


def over_ranks(workload: Workload, ranks: int) -> Workload:
    """The histogram of the largest of ``ranks`` batches drawn from it: ranks that gather all pad to the largest one.

    Ranks are taken as independent and always busy: P(largest <= x) = P(one <= x) ** ranks. The mean context of a size
    stays that of the size.
    """
    if ranks < 1:
        raise InputError(f"{ranks} ranks make no sense", where="--dp", action="Give at least 1.")
    if ranks == 1:
        return workload
    contexts = _mean_contexts(workload.decode)
    decode = _largest_of({share.requests: 0.0 for share in workload.decode}, workload.decode, ranks)
    prefill = _largest_of({share.tokens: 0.0 for share in workload.prefill}, workload.prefill, ranks)
    return replace(
        workload,
        decode=tuple(DecodeShare(size, weight, contexts[size]) for size, weight in decode.items() if weight > 0),
        prefill=tuple(PrefillShare(size, weight) for size, weight in prefill.items() if weight > 0),
        source=f"{workload.source}, largest of {ranks} ranks",
    )


def _largest_of(
    weights: dict[int, float], shares: Sequence[DecodeShare] | Sequence[PrefillShare], ranks: int
) -> dict[int, float]:
    """Weights by size, ascending, of the largest of ``ranks``; they add up to what they did."""
    for share in shares:
        weights[share.requests if isinstance(share, DecodeShare) else share.tokens] += share.weight
    total = math.fsum(weights.values())
    found, below, reached = {}, 0.0, 0.0
    for size in sorted(weights):
        reached = min(1.0, reached + weights[size] / total) if total else 0.0
        found[size] = total * (reached**ranks - below**ranks)
        below = reached
    return found


def _mean_contexts(shares: Sequence[DecodeShare]) -> dict[int, float | None]:
    """The mean context of each size over its shares; None where one of them has none."""
    tokens: dict[int, float] = defaultdict(float)
    weights: dict[int, float] = defaultdict(float)
    unknown = {share.requests for share in shares if share.mean_kv_tokens is None}
    for share in shares:
        tokens[share.requests] += share.weight * (share.mean_kv_tokens or 0.0)
        weights[share.requests] += share.weight
    return {
        size: None if size in unknown or not weights[size] else tokens[size] / weights[size] for size in sorted(weights)
    }


def of_role(workload: Workload, role: Role) -> Workload:
    """The workload of a server that does only one phase. Raises InputError when nothing of that phase is there."""
    kept = replace(
        workload,
        decode=workload.decode if role == "decode" else (),
        prefill=workload.prefill if role == "prefill" else (),
        source=f"{workload.source}, {role} only",
    )
    if not kept.decode and not kept.prefill:
        raise InputError(f"has no {role} steps", where=workload.source)
    return kept


def in_steps(
    workload: Workload, model: LatencyModel | None, captured: Sequence[int] | None, captured_from: str = "its list"
) -> Workload:
    """A workload weighted by time as one weighted by steps: steps per second are one over the step time of the size.

    ``captured`` is what the server that was watched had captured (ascending): its steps took as long as the bucket that
    served them, and above its top as long as eager ones. None takes a graph of each size's own. Workloads that are not
    weighted by time come back as they are. Raises InputError without a model, or for sizes that it has no figure for.
    """
    if workload.weighting != "per_second":
        return workload
    if model is None:
        raise InputError(
            "counts how long batches ran, not how often; steps follow only from the step time of each size",
            where=workload.source,
            action="Give --sweep DIR, a sweep of the served model.",
        )
    shares, unknown = [], set()
    for share in workload.decode:
        bucket = share.requests if captured is None else bucket_for(share.requests, captured, "always")
        figure = model.step(share.requests, bucket, share.mean_kv_tokens or model.main_context)
        if figure is None:
            unknown.add(share.requests)
        else:
            shares.append(replace(share, weight=share.weight / (figure.us * 1e-6)))
    if unknown:
        raise InputError(
            f"the sweep has no step time for {', '.join(map(str, sorted(unknown)[:6]))} requests",
            where=workload.source,
            action="Sweep sizes up to its largest batch.",
        )
    served_by = "a graph of each size's own" if captured is None else captured_from
    return replace(
        workload,
        decode=tuple(shares),
        weighting="per_step",
        source=f"{workload.source}, seconds divided by step times under {served_by}",
    )
