"""What vLLM does to a list before it captures. Sizes are tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from graphtune.engines.base import DeviceFacts, Serving
from graphtune.engines.grids import ceil_to
from graphtune.engines.rules import EffectiveList, ListInWork
from graphtune.engines.vllm import lists

Runner = Literal["V1", "V2"]


@dataclass(frozen=True)
class Asked:
    """What a user set: the list, the maximum, both or neither."""

    sizes: tuple[int, ...] | None = None
    largest: int | None = None


def resolve(asked: Asked, device: DeviceFacts, serving: Serving) -> EffectiveList:
    """The list as the configuration settles it, before any rounding for speculation."""
    limit = lists.limits(device, serving).max_num_batched_tokens
    if asked.sizes is None:
        return _from_maximum(asked.largest, device, serving)
    work = ListInWork("tokens", list(asked.sizes), width=serving.width)
    if not work.sizes:
        return work.done(error="AssertionError: an empty cudagraph_capture_sizes is not accepted")
    work.keep(lambda size: size <= limit, f"a step has at most {limit} tokens (max_num_batched_tokens)", "cap")
    work.tidy()
    top = work.sizes[-1] if work.sizes else 0
    if asked.largest is not None and asked.largest != top:
        return work.done(
            error=f"ValueError: customized max_cudagraph_capture_size(={asked.largest}) should be consistent with "
            f"the max value of cudagraph_capture_sizes(={top})"
        )
    if not work.sizes:
        work.note("empty", (), "nothing is left of the list; only a warning that it was overridden")
    return work.done()


def _from_maximum(largest: int | None, device: DeviceFacts, serving: Serving) -> EffectiveList:
    sizes = lists.generate(device, serving, largest)
    work = ListInWork("tokens", list(sizes), width=serving.width)
    if largest is None:
        return work.done()
    top = sizes[-1] if sizes else 0
    if top < largest:
        limit = lists.limits(device, serving).max_num_batched_tokens
        why = f"a step has at most {limit} tokens" if largest > limit else "it is cut to the last step of the grid"
        work.note("truncate", (largest,), f"max_cudagraph_capture_size {largest} becomes {top}: {why}")
    if not sizes:
        work.note("empty", (), "nothing is left of the list")
    return work.done()


def round_for_speculation(of: EffectiveList) -> EffectiveList:
    """Runner V1 with FULL decode graphs: the list itself is rounded up to multiples of the width; what then exceeds
    the maximum is dropped."""
    width = of.width
    if width == 1 or not of.sizes or of.error is not None:
        return of
    top = of.sizes[-1]
    work = ListInWork("tokens", list(of.sizes), width=width, changes=list(of.changes))
    work.map(
        lambda size: ceil_to(size, width),
        f"a decode request has {width} tokens: sizes are rounded up to a multiple of it",
        "round",
    )
    work.sizes = sorted(set(work.sizes))
    work.keep(lambda size: size <= top, f"after rounding to a multiple of {width} it exceeds the maximum {top}")
    if not work.sizes:
        if width > top:
            return work.done(error=f"ValueError: No valid cudagraph sizes after rounding to multiple of {width}")
        work.append(width, "one request's tokens, since nothing else is left")
    return work.done()


def full_decode(of: EffectiveList, runner: Runner, max_num_seqs: int) -> EffectiveList:
    """The sizes recorded as FULL graphs of uniform decode batches: multiples of the width, from one request to
    ``max_num_seqs``. Runner V1 has rounded the list by then; runner V2 leaves it and rounds each graph.

    A list whose next size lies above ``max_num_seqs`` requests has no FULL graph for the batches in between.
    """
    if of.error is not None:
        return of
    width, most = of.width, max_num_seqs * of.width
    rounded = round_for_speculation(of)
    if rounded.error is not None:
        # Runner V2 does not touch the list, so that it has nothing to refuse: it only records no FULL graph.
        return rounded if runner == "V1" else EffectiveList("tokens", (), of.changes, None, width)
    work = ListInWork("tokens", list(rounded.sizes), width=width, changes=list(rounded.changes))
    work.keep(
        lambda size: width <= size <= most,
        f"decode graphs hold 1 to {max_num_seqs} requests of {width} tokens",
        "cap",
    )
    return work.done()


def misplaced_compile_sizes(compile_sizes: tuple[int, ...], captured: tuple[int, ...]) -> tuple[int, ...]:
    """Entries of ``compile_sizes`` up to the maximum that padding would change: the engine refuses them."""
    top = captured[-1] if captured else 0
    return tuple(size for size in compile_sizes if size <= top and size not in captured)
