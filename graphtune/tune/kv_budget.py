"""What is left for the KV cache once everything else has its bytes, per engine, every term named.

    kv = total - context - weights - workspace - static buffers - activation peak - graphs - reserve

The reserve is what the engine keeps free by its own rule beyond the terms that the rule is meant to hold
(``MemoryRule.covers``). Engines state their rule as a fraction of different bases: SGLang of what is free before
loading, vLLM of the whole device, TensorRT-LLM of what is free after loading. Decode graphs are never guessed here:
SGLang's guess at them is left out of its rule and the measured bytes stand in their place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from graphtune.engines.base import MemoryRule
from graphtune.units import GpuMemory


@dataclass(frozen=True)
class FixedBytes:
    """What a deployment needs whichever list it captures, as measured in the sweep."""

    context_bytes: int
    weights_bytes: int
    workspace_bytes: int
    static_buffer_bytes: int
    bytes_per_kv_token: int
    page_size: int = 1


@dataclass(frozen=True)
class KvBudget:
    """One engine's budget. The terms add up to ``cuda_total_bytes`` unless ``short_by_bytes`` is positive.

    ``activation_peak_bytes`` is null when no capture showed it; it then counts for nothing here, and only the
    engine's own reserve stands for it. ``max_running_requests`` is how many requests of the asked context fit.
    ``fraction`` of ``fraction_base_bytes`` is what the engine has to be given to arrive at ``kv_bytes``.
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
    base = {"total": total, "free_before_load": before_load, "free_after_load": max(after_load, 0)}[rule.base]
    kept = math.ceil(base * (1 - rule.fraction))
    terms = {
        "context": fixed.context_bytes,
        "workspace": fixed.workspace_bytes,
        "static_buffers": fixed.static_buffer_bytes,
        "activation_peak": activation_peak_bytes or 0,
        "graphs": graph_bytes,
    }
    reserve = max(0, kept - sum(terms[name] for name in rule.covers))
    left = total - fixed.weights_bytes - sum(terms.values()) - reserve
    page_bytes = fixed.bytes_per_kv_token * fixed.page_size
    needed = max(min_kv_tokens, math.ceil(context_tokens))
    needed_bytes = math.ceil(needed / fixed.page_size) * page_bytes
    kv_tokens = max(left, 0) // page_bytes * fixed.page_size
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
