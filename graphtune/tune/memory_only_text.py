"""Memory advice as text of at most 80 columns."""

from __future__ import annotations

from graphtune.tune.memory_only import NO_LATENCY, MemoryAdvice
from graphtune.tune.recommendation_text import NAMES, WIDTH, flag_lines, memory_words, size_range, wrapped
from graphtune.units import format_bytes


def as_text(of: MemoryAdvice) -> str:
    """The model, the card, and per engine its own list, the budget and the flags."""
    kind = f", {of.shape.quantised}" if of.shape.quantised else ""
    experts = f", {of.shape.experts.count} experts" if of.shape.experts else ""
    ranks = f" on each of {of.ranks} ranks" if of.ranks > 1 else ""
    lines = [f"{of.model}, {of.shape.parameters / 1e9:,.2f} billion parameters{kind}{experts}: memory only"]
    lines += wrapped(f"Card: {of.gpu.rule}.")
    lines += wrapped(
        f"Weights {format_bytes(of.weights_bytes)}{ranks}, KV cache {format_bytes(of.bytes_per_kv_token)} a token, by "
        f"shapes. A process's own bytes as measured with {of.measured_on}."
    )
    lines += wrapped(f"Latency: none; {NO_LATENCY}. The engines' own lists stand.")
    for one in of.engines:
        low, high = (format_bytes(size) for size in one.graph_bytes_interval)
        leaves = f"{one.memory.kv_tokens:,} KV tokens"
        if not one.memory.fits:
            leaves = f"does not fit: short by {format_bytes(one.memory.short_by_bytes)}"
        lines.append("")
        lines += wrapped(
            f"{NAMES.get(one.engine, one.engine)} {one.version}: {size_range(one.capture_sizes)}, predicted "
            f"{format_bytes(one.graph_bytes)} of graphs ({low} to {high}), {leaves}",
            hang="  ",
        )
        lines += wrapped(memory_words(one.memory), indent="  ", hang="  ")
        if one.memory.fits:
            lines += flag_lines(one.flags, WIDTH)
    if not of.fits:
        lines += ["", *wrapped("Give a larger card, more ranks (--shard N), or the smaller --weights of a checkpoint.")]
    return "\n".join(lines) + "\n"
