"""A replay compared with eager, and what the comparison says of a captured size: what both phases' gates share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from graphtune.results import GateCheck
from graphtune.worker.kv_cache import PagedKVCache

TOLERANCE_AT_RAW = {torch.bfloat16: 2e-2, torch.float16: 2e-2, torch.float32: 1e-5}
TOLERANCE_AT_PADDED = 1e-3

NAN = float("nan")


@dataclass(frozen=True)
class Comparison:
    """One batch: whether all was written and finite, bit equality at the padded size, and both errors."""

    finite: bool
    equal: bool
    at_padded: float
    at_raw: float


def compare(
    cache: PagedKVCache,
    out_slots: torch.Tensor,
    *,
    output: torch.Tensor | None,
    replay: Callable[[], torch.Tensor],
    poison: Callable[[], None],
    padded: Callable[[], torch.Tensor],
    raw: Callable[[], torch.Tensor],
) -> Comparison:
    """Replay a batch, then run it eagerly at the padded size and at the raw one, and compare outputs and written KV.

    ``replay`` and ``padded`` work on the same buffers and plan. ``poison`` spoils the slots' tails before the replay;
    ``output``, where it leaves its result, and the KV at ``out_slots`` hold NaN before it, and the KV before each eager
    run.
    """
    if output is not None:
        output.fill_(NAN)
    poison()
    outputs, written = [], []
    for run in (replay, padded, raw):
        cache.write_slots(out_slots, NAN)
        outputs.append(run().clone())
        written.append(cache.slots(out_slots))
    return Comparison(
        finite=bool(torch.isfinite(outputs[0]).all()) and bool(torch.isfinite(written[0]).all()),
        equal=bool(torch.equal(outputs[0], outputs[1])) and bool(torch.equal(written[0], written[1])),
        at_padded=max(relative_error(outputs[0], outputs[1]), relative_error(written[0], written[1])),
        at_raw=max(relative_error(outputs[0], outputs[2]), relative_error(written[0], written[2])),
    )


def judge(
    size: int, raws: tuple[int, ...], results: Sequence[Comparison], *, strays: tuple[str, ...], dtype: torch.dtype
) -> GateCheck:
    """The check of one captured size from its comparisons; that KV elsewhere is untouched remains to be seen."""
    tolerance = TOLERANCE_AT_RAW[dtype]
    finite = all(result.finite for result in results)
    equal = all(result.equal for result in results)
    at_padded = max(result.at_padded for result in results)
    at_raw = max(result.at_raw for result in results)
    reason = None
    if not finite:
        reason = "the replay left NaN or infinity in its output or in KV that it must write"
    elif not equal and at_padded > TOLERANCE_AT_PADDED:
        reason = f"replay differs from eager at the padded size by {at_padded:.2e}, more than {TOLERANCE_AT_PADDED:.0e}"
    elif at_raw > tolerance:
        reason = f"replay differs from eager at the raw size by {at_raw:.2e}, more than {tolerance:.0e}"
    elif strays:
        reason = f"the recording depends on memory that nobody keeps: {'; '.join(strays)}"
    return GateCheck(
        size=size,
        raw_sizes=raws,
        equal_at_padded=equal,
        error_at_padded=at_padded if finite else None,
        error_at_raw=at_raw if finite else None,
        tolerance_at_raw=tolerance,
        kv_untouched=True,
        passed=reason is None,
        reason=reason,
    )


def with_kv_changed(check: GateCheck) -> GateCheck:
    """The check of a size that changed KV outside the slots it may write."""
    reason = check.reason or "KV outside the written slots changed"
    return replace(check, kv_untouched=False, passed=False, reason=reason)


def check_sizes(
    cache: PagedKVCache, sizes: Sequence[int], check: Callable[[int, int], GateCheck], most: int | None = None
) -> tuple[GateCheck, ...]:
    """``check(below, size)`` of every size, ascending, ``below`` being the size before it or 0. With ``most`` it is
    that many sizes evenly chosen, the smallest and the largest among them.

    The whole KV pool is summed before and after all of them; only when a page changed is it summed around every size,
    to name the sizes that did it, which are all of them when it does not happen again.
    """
    buckets = list(zip((0, *sizes), sizes, strict=False))
    if most is not None and most < len(buckets):
        buckets = [buckets[round(at * (len(buckets) - 1) / (most - 1))] for at in range(most)]
    before = cache.page_checksums()
    checks = [check(below, size) for below, size in buckets]
    if same_outside_sink(before, cache.page_checksums()):
        return tuple(checks)
    located = []
    for (below, size), first in zip(buckets, checks, strict=True):
        before = cache.page_checksums()
        check(below, size)
        located.append(first if same_outside_sink(before, cache.page_checksums()) else with_kv_changed(first))
    if all(one.kv_untouched for one in located):
        located = [with_kv_changed(one) for one in located]
    return tuple(located)


def same_outside_sink(before: torch.Tensor, after: torch.Tensor) -> bool:
    """True when no page but the sink has another checksum (pages,) than before."""
    return bool(torch.equal(before[1:], after[1:]))


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """‖value − reference‖ / ‖reference‖, summed in float64; infinite when either is not finite."""
    reference = reference.float()
    norm = float(torch.linalg.vector_norm(reference, dtype=torch.float64))
    distance = float(torch.linalg.vector_norm(value.float() - reference, dtype=torch.float64))
    if not math.isfinite(norm) or not math.isfinite(distance):
        return math.inf
    return distance / norm if norm else (0.0 if distance == 0 else math.inf)
