"""What is left for the KV cache once everything else has its bytes, per engine, every term named.

    kv = total - context - weights - workspace - static buffers - activation peak - graphs - reserve

The reserve is what the engine keeps free by its own rule beyond the terms that the rule is meant to hold
(``MemoryRule.covers``). Engines state their rule as a fraction of different bases: SGLang of what is free before
loading, vLLM of the whole device, TensorRT-LLM of what is free after loading. Decode graphs are never guessed here:
SGLang's guess at them is left out of its rule and the measured bytes stand in their place; what the engine would have
arrived at by itself is stated beside.

The activation peak is the most of three: what capturing needs on top of what it keeps, the largest prefill, and a step
of the most requests, run eagerly and sampled from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from graphtune.engines.base import MemoryRule
from graphtune.units import GpuMemory


@dataclass(frozen=True)
class FixedBytes:
    """What a deployment needs whichever list it captures, as measured in the sweep.

    ``activation_bytes_per_token`` and ``logits_bytes_per_row`` follow from the model's shapes; 0 where these are not
    known, and only measured peaks count.
    """

    context_bytes: int
    weights_bytes: int
    workspace_bytes: int
    static_buffer_bytes: int
    bytes_per_kv_token: int
    page_size: int = 1
    activation_bytes_per_token: int = 0
    logits_bytes_per_row: int = 0

    def activation_peak_bytes(self, rule: MemoryRule) -> int:
        """Of the largest prefill, or of a step of the most requests with what is sampled from."""
        per_row = self.activation_bytes_per_token + self.logits_bytes_per_row
        return max(rule.chunk_tokens * self.activation_bytes_per_token, rule.rows * per_row)


@dataclass(frozen=True)
class Round:
    """One turn of list to bytes to KV tokens to request pool. A pool smaller than the list's top starts another, with
    a list that the pool does not cut; null is an engine whose pool does not depend on its KV cache."""

    graphs: int
    top: int
    graph_bytes: int
    kv_tokens: int
    request_pool: int | None

    @property
    def settled(self) -> bool:
        return self.request_pool is None or self.top <= self.request_pool


@dataclass(frozen=True)
class KvBudget:
    """One engine's budget. The terms add up to ``cuda_total_bytes`` unless ``short_by_bytes`` is positive.

    ``activation_peak_bytes`` is null when nothing says it; it then counts for nothing here, and only the engine's own
    reserve stands for it. ``max_running_requests`` is how many requests of the asked context fit. ``fraction`` of
    ``fraction_base_bytes`` is what the engine has to be given to arrive at ``kv_bytes``; ``kv_bytes_setting`` sizes the
    KV cache outright, where the engine can.

    ``own_kv_tokens`` is what the engine arrives at by ``own_fraction``, with its own guess at decode graphs, and
    ``own_reserve_bytes`` what it then keeps free. ``rounds`` are those in which list and budget settled.
    """

    cuda_total_bytes: int
    context_bytes: int
    weights_bytes: int
    workspace_bytes: int
    static_buffer_bytes: int
    activation_peak_bytes: int | None
    graph_bytes: int
    reserve_bytes: int
    kv_bytes: int
    kv_tokens: int
    bytes_per_kv_token: int
    max_running_requests: int
    needed_kv_tokens: int
    short_by_bytes: int
    fraction: float
    fraction_base: str
    fraction_base_bytes: int
    fraction_setting: str
    fraction_of_rule: float
    own_fraction: float
    own_reserve_bytes: int
    own_kv_tokens: int
    kv_bytes_setting: str | None = None
    rounds: tuple[Round, ...] = ()

    @property
    def kv_tokens_gained(self) -> int:
        """KV tokens beyond those the engine would have arrived at by itself."""
        return self.kv_tokens - self.own_kv_tokens

    @property
    def fits(self) -> bool:
        return self.short_by_bytes == 0

    @property
    def fraction_changed(self) -> bool:
        """True when the engine has to be told a fraction other than the one its rule starts from."""
        return abs(self.fraction - self.fraction_of_rule) >= 1e-4


def kv_budget(
    gpu: GpuMemory,
    fixed: FixedBytes,
    rule: MemoryRule,
    *,
    graph_bytes: int,
    activation_peak_bytes: int | None,
    context_tokens: float,
    min_kv_tokens: int = 0,
) -> KvBudget:
    """The budget of one engine with ``graph_bytes`` of graphs.

    At least one request of ``context_tokens`` and ``min_kv_tokens`` must fit; ``short_by_bytes`` is what is missing.
    """
    total = gpu.cuda_total_bytes
    before_load = total - fixed.context_bytes
    after_load = before_load - fixed.weights_bytes - fixed.workspace_bytes - fixed.static_buffer_bytes
    base = max(0, {"total": total, "free_before_load": before_load, "free_after_load": after_load}[rule.base])
    if fixed.activation_bytes_per_token:
        activation_peak_bytes = max(activation_peak_bytes or 0, fixed.activation_peak_bytes(rule))
    terms = {
        "context": fixed.context_bytes,
        "workspace": fixed.workspace_bytes,
        "static_buffers": fixed.static_buffer_bytes,
        "activation_peak": activation_peak_bytes or 0,
        "graphs": graph_bytes,
    }

    def left_of(fraction: float, covers: frozenset[str]) -> tuple[int, int]:
        """What the engine keeps free beyond the terms it covers, and what is left for KV, at a fraction of the base."""
        kept = math.ceil(base * (1 - fraction))
        reserve = max(0, kept - sum(terms[name] for name in covers))
        return reserve, total - fixed.weights_bytes - sum(terms.values()) - reserve

    reserve, left = left_of(rule.fraction, rule.covers)
    _, own_left = left_of(rule.own_fraction, rule.own_covers)
    page_bytes = fixed.bytes_per_kv_token * fixed.page_size
    needed = max(min_kv_tokens, math.ceil(context_tokens))
    needed_bytes = math.ceil(needed / fixed.page_size) * page_bytes
    kv_tokens, own_kv_tokens = (max(size, 0) // page_bytes * fixed.page_size for size in (left, own_left))
    return KvBudget(
        cuda_total_bytes=total,
        context_bytes=fixed.context_bytes,
        weights_bytes=fixed.weights_bytes,
        workspace_bytes=fixed.workspace_bytes,
        static_buffer_bytes=fixed.static_buffer_bytes,
        activation_peak_bytes=activation_peak_bytes,
        graph_bytes=graph_bytes,
        reserve_bytes=reserve,
        kv_bytes=max(left, 0),
        kv_tokens=kv_tokens,
        bytes_per_kv_token=fixed.bytes_per_kv_token,
        max_running_requests=int(kv_tokens // context_tokens),
        needed_kv_tokens=needed,
        short_by_bytes=max(0, needed_bytes - left),
        fraction=_fraction(rule, fixed.weights_bytes, max(left, 0), base),
        fraction_base=rule.base,
        fraction_base_bytes=base,
        fraction_setting=rule.setting,
        fraction_of_rule=rule.fraction,
        own_fraction=rule.own_fraction,
        own_reserve_bytes=math.ceil(base * (1 - rule.own_fraction)),
        own_kv_tokens=own_kv_tokens,
        kv_bytes_setting=rule.bytes_setting,
    )


def _fraction(rule: MemoryRule, weights_bytes: int, kv_bytes: int, base: int) -> float:
    """The fraction that gives the engine ``kv_bytes``, rounded down to four places.

    vLLM measures graphs and activations itself inside the fraction, so its own value stays; so does any engine's where
    nothing is left to divide.
    """
    if rule.base == "total" or kv_bytes == 0:
        return rule.fraction
    given = kv_bytes + (weights_bytes if rule.base == "free_before_load" else 0)
    return math.floor(given / base * 10_000) / 10_000
