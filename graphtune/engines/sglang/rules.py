"""What SGLang does to a list at run time, before it captures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from graphtune.engines.base import Serving
from graphtune.engines.grids import ceil_to
from graphtune.engines.rules import EffectiveList, ListInWork
from graphtune.engines.sglang import lists


@dataclass(frozen=True)
class Layout:
    """Settings of a deployment that align decode sizes. ``attention_tp`` counts only when a gathered buffer is used."""

    two_batch_overlap: bool = False
    gathered_attention_tp: int = 1
    attention_cp: int = 1
    hip: bool = False
    deepep: bool = False

    @property
    def alignment(self) -> int:
        of = (2 if self.two_batch_overlap else 1) * self.gathered_attention_tp
        if not self.hip and of % self.attention_cp:
            of *= self.attention_cp
        return of


def request_pool(serving: Serving) -> int | None:
    """Requests one data-parallel worker holds, as far as the settings say; the KV cache may lower it."""
    stated = serving.max_running_requests
    if stated is None and serving.spec_tokens > 0:
        stated = lists.SPECULATIVE_MAX_RUNNING
    return None if stated is None else max(1, stated // serving.dp)


def effective_decode(sizes: Iterable[int], serving: Serving, layout: Layout | None = None) -> EffectiveList:
    """The decode list as captured, in requests."""
    layout = layout or Layout()
    work = ListInWork("requests", list(sizes), width=serving.width)
    step, pool = layout.alignment, request_pool(serving)
    if pool is not None:
        pool = ceil_to(pool, step)
        if work.sizes and max(work.sizes) > pool:
            work.append(pool, f"the list goes above the {pool} running requests, so that number itself is captured")
    rows = 1 if layout.two_batch_overlap else serving.width
    work.keep(lambda size: size * rows % step == 0, f"rows of a batch must be a multiple of {step}", "align")
    if pool is not None:
        limit = pool
        work.keep(lambda size: size <= limit, f"at most {limit} requests run", "cap")
    work.tidy()
    if not work.sizes or work.sizes[0] <= 0:
        return work.done(error=f"AssertionError: capture_bs={work.sizes}")
    return work.done()


def full_prefill_slots(serving: Serving, chunk: int, stated: int | None = None) -> int:
    """Fixed request slots of a full prefill graph."""
    slots = max(chunk // 512, 1) if stated is None else stated
    pool = request_pool(serving)
    return slots if pool is None else min(slots, pool)


def effective_prefill(
    sizes: Iterable[int], serving: Serving, layout: Layout | None = None, *, request_slots: int | None = None
) -> EffectiveList:
    """The prefill list as captured, in tokens. ``request_slots`` are those of a full graph; None: breakable.

    An empty result is no error: the engine warns and runs prefill eagerly.
    """
    layout = layout or Layout()
    work = ListInWork("tokens", list(sizes))
    slots = request_pool(serving) if request_slots is None else request_slots
    if slots is not None and serving.context_len is not None:
        most = slots * serving.context_len
        work.keep(lambda size: size <= most, f"{slots} requests of {serving.context_len} tokens hold {most}", "cap")
    step = layout.alignment
    work.map(lambda size: ceil_to(size, step), f"token counts are rounded up to a multiple of {step}", "align")
    if layout.deepep and request_slots is None:
        work.map(lambda size: ceil_to(size, 8), "DeepEP takes token counts in multiples of 8", "align")
    work.tidy()
    if not work.sizes:
        work.note("empty", (), "no size fits, so prefill graphs are off and prefill runs eagerly")
    return work.done()


def chunked_prefix_variants(max_prefix: int, capacity: int) -> tuple[int, ...]:
    """Variants of a full prefill graph for cached prefixes: n slots, each of ``capacity // n`` tokens at least."""
    kept = []
    for slots in (1, 2, 4, 8, 16):
        chunk = max(capacity // slots, 1)
        if slots // 2 < -(-max_prefix // chunk):
            kept.append(slots)
    return tuple(kept)
