"""What TensorRT-LLM does to a list before it captures."""

from __future__ import annotations

from collections.abc import Iterable

from graphtune.engines.base import Serving
from graphtune.engines.rules import EffectiveList, ListInWork
from graphtune.engines.tensorrt_llm import lists


def configured_decode(
    sizes: Iterable[int] | None, largest: int | None, *, padding: bool, powers_above_128: bool = False
) -> EffectiveList:
    """The list after the engine has read its settings: an empty list and a maximum of 0 count as not given."""
    given = list(sizes or ())
    if not given:
        top = largest or lists.DEFAULT_GRAPH_MAX
        made = lists.generate_decode(top, padding=padding, powers_above_128=powers_above_128)
        return EffectiveList("requests", made)
    work = ListInWork("requests", given)
    work.tidy()
    if largest and largest != work.sizes[-1]:
        return work.done(
            error=f"ValueError: cuda_graph_config.max_batch_size {largest} is not the largest of batch_sizes "
            f"({work.sizes[-1]})"
        )
    return work.done()


def effective_decode(of: EffectiveList, serving: Serving, *, padding: bool) -> EffectiveList:
    """The decode list as captured: up to what the engine can run; with padding a size above that becomes it."""
    if of.error is not None:
        return of
    work = ListInWork("requests", list(of.sizes), changes=list(of.changes))
    cap = lists.decode_cap(serving)
    if cap < 1:
        work.keep(lambda size: False, "the engine's limits leave no room for one request", "cap")
        work.note("empty", (), "no graphs are captured")
        return work.done()
    reason = f"the engine runs at most {cap} requests"
    if padding:
        work.map(lambda size: min(size, cap), f"{reason}: a larger size becomes {cap}", "cap")
        work.sizes = sorted(set(work.sizes))
    else:
        work.keep(lambda size: size <= cap, reason, "cap")
    if not work.sizes:
        work.note("empty", (), "no graphs are captured")
    return work.done()


def effective_prefill(
    sizes: Iterable[int], serving: Serving, *, max_num_tokens: int, max_seq_len: int | None
) -> EffectiveList:
    """The prefill list as captured, in tokens."""
    work = ListInWork("tokens", list(sizes))
    work.keep(lambda size: 0 < size <= max_num_tokens, f"sizes are from 1 to max_num_tokens ({max_num_tokens})", "cap")
    if max_seq_len is not None:
        batch = serving.max_running_requests or lists.DEFAULT_MAX_BATCH_SIZE
        most = batch * (max_seq_len - 1)
        work.map(lambda size: min(size, most), f"{batch} requests of {max_seq_len - 1} tokens hold {most}", "cap")
    work.tidy()
    if not work.sizes:
        work.note("empty", (), "no prefill graphs are captured")
    return work.done()
