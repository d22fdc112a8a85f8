"""The correctness gate of prefills: every captured token count is replayed and compared with eager.

Per size, the fewest tokens that are admitted to it and the most are run, as one request and as several of different
lengths with and without cached prefixes, some of which end a page (above 1,024 tokens the fewest as several, the most
as one). Before each replay the slots' tails hold legal
values of another live request, the output holds NaN and so do the KV slots that the prefill must write. Hidden states
of a replay are compared bit for bit with the eager body at the padded size (same buffers, same plan) and by ‖d‖/‖ref‖
with an eager prefill of exactly the real tokens; KV outside the written slots must be equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from graphtune.results import GateCheck
from graphtune.worker.comparison import Comparison, check_sizes, compare, judge
from graphtune.worker.graphs.shape_key import ShapeKey
from graphtune.worker.runners.prefill import GraphPrefill
from graphtune.worker.runners.prefill_buffers import LivePrefill, PrefillBuffers, live_prefill

SEVERAL = 4
"""Requests of the batches with several."""

ONE_BATCH_ABOVE = 1024
"""Tokens above which each token count is run as one batch: these prefills are most of a gate's time."""

PREFIX_PAGES = 3
"""Longest cached prefix that is tried, in pages."""


def raw_tokens(size: int, below: int, waste_cap: float | None, padding: bool) -> tuple[int, ...]:
    """Token counts to try in the bucket (below, size]: the fewest that are admitted to it, and the size itself."""
    if not padding:
        return (size,)
    fewest = below + 1 if waste_cap is None else max(below + 1, math.ceil(size / waste_cap))
    return tuple(sorted({fewest, size}))


def check_prefill(runner: GraphPrefill, *, seed: int, most: int | None = None) -> tuple[GateCheck, ...]:
    """Run the gate over every captured size of a runner, or over ``most`` of them, ascending. Raises nothing for a
    wrong result: it is in the checks. Needs pages for the largest size, ``SEVERAL`` prefixes and one victim
    request.
    """
    runner.check_weights()
    check = partial(_check_size, runner, seed=seed)
    return check_sizes(runner.eager.cache, runner.sizes, check, most)


def _check_size(runner: GraphPrefill, below: int, size: int, *, seed: int) -> GateCheck:
    eager, cache = runner.eager, runner.eager.cache
    raws = raw_tokens(size, below, runner.waste_cap, runner.padding)
    results = [result for raw in raws for result in _results(runner, size, raw, seed=seed + size + raw)]
    strays = runner.backend.strays(ShapeKey(size), {**eager.owners(), **eager.model.named_tensors()})
    return judge(size, raws, results, strays=strays, dtype=cache.pool.dtype)


def _results(runner: GraphPrefill, size: int, raw: int, *, seed: int) -> Iterator[Comparison]:
    """The comparisons of one token count, each on requests of its own; KV is put back as it was.

    A long prefill is compared once: with padding as several requests, without as few.
    """
    eager, table, cache = runner.eager, runner.eager.table, runner.eager.cache
    random = np.random.default_rng(seed)
    batches = list(_batches(raw, eager.max_context, cache.page_size, runner.limits.max_requests, random))
    if size > ONE_BATCH_ABOVE:
        batches = batches[1:] if raw < size else batches[:1]
    for lengths, prefixes in batches:
        totals = [length + prefix for length, prefix in zip(lengths, prefixes, strict=True)]
        rows = table.admit([*totals, cache.page_size])
        try:
            ids = [random.integers(0, eager.model.config.vocab_size, length) for length in lengths]
            live = live_prefill(table, rows=rows[:-1].tolist(), prefix_lens=prefixes, input_ids=ids)
            victim_slot = int(table.slots(rows[-1:], np.asarray([cache.page_size - 1]))[0])
            content = cache.slots(live.out_slots)
            yield _compare(runner, size, live, victim=int(rows[-1]), victim_slot=victim_slot)
            cache.write_slots(live.out_slots, content)
        finally:
            table.release(rows)


def _batches(
    raw: int, max_context: int, page: int, max_requests: int, random: np.random.Generator
) -> Iterator[tuple[list[int], list[int]]]:
    """Lengths and prefixes to try: as few requests as hold the tokens without a prefix, then several mixed."""
    fewest = -(-raw // max_context)
    whole = [max_context] * (raw // max_context) + ([raw % max_context] if raw % max_context else [])
    yield whole, [0] * fewest
    several = min(max(fewest, SEVERAL), raw, max_requests)
    cuts = np.sort(random.choice(np.arange(1, raw), several - 1, replace=False)) if several > 1 else np.empty(0, int)
    lengths = np.diff([0, *cuts.tolist(), raw])
    if lengths.max() > max_context:
        lengths = np.asarray([raw // several + (i < raw % several) for i in range(several)])
    prefixes = random.integers(0, PREFIX_PAGES * page + 1, several)
    prefixes[::2] = prefixes[::2] // page * page  # a prefix of whole pages, as a server's cache gives it
    prefixes = np.minimum(prefixes, max_context - lengths)
    yield lengths.tolist(), prefixes.tolist()


def _compare(runner: GraphPrefill, size: int, live: LivePrefill, *, victim: int, victim_slot: int) -> Comparison:
    eager = runner.eager
    return compare(
        eager.cache,
        live.out_slots,
        output=runner.backend.output(ShapeKey(size)),
        replay=lambda: _replay(runner, live),
        poison=lambda: poison_tails(eager.buffers, live, row=victim, slot=victim_slot),
        padded=runner.run_padded_eagerly,
        raw=lambda: eager.run_hidden(live),
    )


def _replay(runner: GraphPrefill, live: LivePrefill) -> torch.Tensor:
    runner.fill(live)
    runner.plan()
    return runner.launch_body()


def poison_tails(buffers: PrefillBuffers, live: LivePrefill, *, row: int, slot: int) -> None:
    """Fill the tails with legal values of another live request: a fill that forgets a tail then damages it."""
    for name, value in {"input_ids": 1, "positions": 1, "out_slots": slot}.items():
        buffers.tensors[name][live.tokens :] = value
    for name, value in {
        "req_rows": row,
        "extend_lens": 1,
        "prefix_lens": 0,
        "extend_starts": 0,
        "last_rows": 0,
    }.items():
        buffers.tensors[name][live.requests :] = value
