"""The correctness gate: every captured size is replayed and compared with eager before its figures count.

Per size, raw sizes at and below it are run with rows of different lengths, some of which cross into a new page.
Before each replay the slots' tails hold legal values of another live request, the output holds NaN and so do the KV
slots that the step must write: a stale tail, an unwritten output or an unwritten key shows. Replay is compared bit for
bit with the eager forward at the padded size (same buffers, same plan) and by ‖d‖/‖ref‖ with the eager step at the raw
size; KV outside the written slots must be equal bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from graphtune.results import GateCheck
from graphtune.worker.graphs.shape_key import ShapeKey
from graphtune.worker.runners.buffers import LiveBatch, StaticBuffers
from graphtune.worker.runners.decode import GraphDecode
from graphtune.worker.runners.series import make_batches

TOLERANCE_AT_RAW = {torch.bfloat16: 2e-2, torch.float16: 2e-2, torch.float32: 1e-5}
TOLERANCE_AT_PADDED = 1e-3
MAX_LENGTH_PAGES = 3


def raw_sizes(size: int, below: int) -> tuple[int, ...]:
    """Raw sizes to try in the bucket (below, size]: the one with the most padding and the one with none."""
    return tuple(sorted({below + 1, size}))


def check_list(runner: GraphDecode, *, seed: int) -> tuple[GateCheck, ...]:
    """Run the gate over every captured size of a runner, ascending. Raises nothing for a wrong result: it is in the
    checks. Needs free request rows and pages for the largest size plus one victim request.

    The whole KV pool is summed before and after the list; only when a page changed is it summed around every size, to
    name the sizes that did it.
    """
    runner.check_weights()
    cache = runner.eager.cache
    before = cache.page_checksums()
    checks = [_check_size(runner, size, below, seed=seed + size) for below, size in _buckets(runner)]
    if _same_outside_sink(before, cache.page_checksums()):
        return tuple(checks)
    located = []
    for (below, size), check in zip(_buckets(runner), checks, strict=True):
        before = cache.page_checksums()
        _check_size(runner, size, below, seed=seed + size)
        if not _same_outside_sink(before, cache.page_checksums()):
            reason = check.reason or "KV outside the written slots changed"
            check = replace(check, kv_untouched=False, passed=False, reason=reason)
        located.append(check)
    return tuple(located)


def _buckets(runner: GraphDecode) -> list[tuple[int, int]]:
    """Each captured size with the one below it, ascending."""
    return list(zip((0, *runner.sizes), runner.sizes, strict=False))


def _same_outside_sink(before: torch.Tensor, after: torch.Tensor) -> bool:
    return bool(torch.equal(before[1:], after[1:]))


def _check_size(runner: GraphDecode, size: int, below: int, *, seed: int) -> GateCheck:
    eager, table, cache = runner.eager, runner.eager.table, runner.eager.cache
    random = np.random.default_rng(seed)
    page = cache.page_size
    raws = raw_sizes(size, below)
    longest = page * min(MAX_LENGTH_PAGES, table.pages_per_request, table.free_pages // (size + 1))
    rows = table.admit([longest] * (size + 1))
    victim = int(rows[-1])
    try:
        victim_slot = int(table.slots(rows[-1:], np.asarray([longest - 1]))[0])
        saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        results: list[_Result] = []
        for raw in raws:
            lengths = random.integers(1, longest + 1, raw, dtype=np.int32)
            # Every third request starts a page with this step, the case in which a stale table shows.
            lengths[::3] = np.minimum((lengths[::3] - 1) // page * page + 1, longest)
            (live,) = make_batches(
                table,
                rows=rows[:raw],
                lengths=lengths[None, :],
                vocab_size=eager.model.config.vocab_size,
                seed=int(random.integers(1 << 30)),
            )
            saved.append((live.out_slots, cache.slots(live.out_slots)))
            results.append(_compare(runner, live, victim=victim, victim_length=longest, victim_slot=victim_slot))
        for slots, content in reversed(saved):
            cache.write_slots(slots, content)
    finally:
        table.release(rows)
    strays = runner.backend.strays(ShapeKey(size), {**eager.owners(), **eager.model.named_tensors()})
    tolerance = TOLERANCE_AT_RAW[cache.pool.dtype]
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


class _Result:
    """Outcome of one raw size: bit equality at the padded size, both errors, and whether all was written and finite."""

    def __init__(self, replayed: torch.Tensor, padded: torch.Tensor, raw: torch.Tensor, kv: list[torch.Tensor]) -> None:
        self.finite = bool(torch.isfinite(replayed).all()) and bool(torch.isfinite(kv[0]).all())
        self.equal = bool(torch.equal(replayed, padded)) and bool(torch.equal(kv[0], kv[1]))
        self.at_padded = max(relative_error(replayed, padded), relative_error(kv[0], kv[1]))
        self.at_raw = max(relative_error(replayed, raw), relative_error(kv[0], kv[2]))


def _compare(runner: GraphDecode, live: LiveBatch, *, victim: int, victim_length: int, victim_slot: int) -> _Result:
    eager, cache = runner.eager, runner.eager.cache
    # A first replay gives the recorded output's memory, which then holds NaN unless the second one writes it.
    _replay(runner, live).fill_(float("nan"))
    poison_tails(eager.buffers, live.size, row=victim, length=victim_length, slot=victim_slot)
    cache.write_slots(live.out_slots, float("nan"))
    replayed = _replay(runner, live).clone()
    kv = [cache.slots(live.out_slots)]
    cache.write_slots(live.out_slots, float("nan"))
    padded = runner.run_padded_eagerly().clone()
    kv.append(cache.slots(live.out_slots))
    cache.write_slots(live.out_slots, float("nan"))
    raw = eager.run(live).clone()
    kv.append(cache.slots(live.out_slots))
    return _Result(replayed, padded, raw, kv)


def _replay(runner: GraphDecode, live: LiveBatch) -> torch.Tensor:
    runner.fill(live)
    runner.plan()
    return runner.launch()


def poison_tails(buffers: StaticBuffers, raw: int, *, row: int, length: int, slot: int) -> None:
    """Fill every slot's tail with legal values of another live request: a fill that forgets a tail then damages it."""
    values = {
        "input_ids": 1,
        "out_slots": slot,
        "req_rows": row,
        "req_rows_host": row,
        "seq_lens": length,
        "seq_lens_host": length,
        "positions": length - 1,
    }
    for name, tensor in buffers.tensors.items():
        tensor[raw:] = values[name]


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """‖value − reference‖ / ‖reference‖, summed in float64; infinite when either is not finite."""
    reference = reference.float()
    norm = float(torch.linalg.vector_norm(reference, dtype=torch.float64))
    distance = float(torch.linalg.vector_norm(value.float() - reference, dtype=torch.float64))
    if not math.isfinite(norm) or not math.isfinite(distance):
        return math.inf
    return distance / norm if norm else (0.0 if distance == 0 else math.inf)
