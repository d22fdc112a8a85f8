"""The correctness gate: every captured size is replayed and compared with eager before its figures count.

Per size, raw sizes at and below it are run with rows of different lengths, some of which cross into a new page.
Before each replay the slots' tails hold legal values of another live request, the output holds NaN and so do the KV
slots that the step must write: a stale tail, an unwritten output or an unwritten key shows. Replay is compared bit for
bit with the eager forward at the padded size (same buffers, same plan) and by ‖d‖/‖ref‖ with the eager step at the raw
size; KV outside the written slots must be equal bit for bit.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from graphtune.results import GateCheck
from graphtune.worker.comparison import Comparison, check_sizes, compare, judge
from graphtune.worker.graphs.shape_key import ShapeKey
from graphtune.worker.runners.buffers import LiveBatch, StaticBuffers
from graphtune.worker.runners.decode import GraphDecode
from graphtune.worker.runners.series import make_batches

MAX_LENGTH_PAGES = 3


def raw_sizes(size: int, below: int) -> tuple[int, ...]:
    """Raw sizes to try in the bucket (below, size]: the one with the most padding and the one with none."""
    return tuple(sorted({below + 1, size}))


def check_list(runner: GraphDecode, *, seed: int, most: int | None = None) -> tuple[GateCheck, ...]:
    """Run the gate over every captured size of a runner, or over ``most`` of them, ascending. Raises nothing for a
    wrong result: it is in the checks. Needs free request rows and pages for the largest size plus one victim
    request.
    """
    runner.check_weights()
    check = partial(_check_size, runner, seed=seed)
    return check_sizes(runner.eager.cache, runner.sizes, check, most)


def _check_size(runner: GraphDecode, below: int, size: int, *, seed: int) -> GateCheck:
    eager, table, cache = runner.eager, runner.eager.table, runner.eager.cache
    random = np.random.default_rng(seed + size)
    page = cache.page_size
    raws = raw_sizes(size, below)
    longest = page * min(MAX_LENGTH_PAGES, table.pages_per_request, table.free_pages // (size + 1))
    rows = table.admit([longest] * (size + 1))
    victim = int(rows[-1])
    try:
        victim_slot = int(table.slots(rows[-1:], np.asarray([longest - 1]))[0])
        saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        results: list[Comparison] = []
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
            results.append(_compare(runner, size, live, victim=victim, victim_length=longest, victim_slot=victim_slot))
        for slots, content in reversed(saved):
            cache.write_slots(slots, content)
    finally:
        table.release(rows)
    strays = runner.backend.strays(ShapeKey(size), {**eager.owners(), **eager.model.named_tensors()})
    return judge(size, raws, results, strays=strays, dtype=cache.pool.dtype)


def _compare(
    runner: GraphDecode, size: int, live: LiveBatch, *, victim: int, victim_length: int, victim_slot: int
) -> Comparison:
    eager = runner.eager
    return compare(
        eager.cache,
        live.out_slots,
        output=runner.backend.output(ShapeKey(size)),
        replay=lambda: _replay(runner, live),
        poison=lambda: poison_tails(eager.buffers, live.size, row=victim, length=victim_length, slot=victim_slot),
        padded=runner.run_padded_eagerly,
        raw=lambda: eager.run(live),
    )


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
