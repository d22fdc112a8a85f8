"""The key under which a graph is stored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class ShapeKey:
    """``size`` in requests (decode) or tokens (prefill); the other dimensions multiply the number of graphs."""

    size: int
    stream_idx: int | None = None
    variant_label: str | None = None
    attention_variant: str | None = None

    def __str__(self) -> str:
        parts = [self.stream_idx, self.variant_label, self.attention_variant]
        return "/".join([str(self.size), *(str(part) for part in parts if part is not None)])
