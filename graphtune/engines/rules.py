"""What an engine does to a capture list before it captures: each change with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from graphtune.engines.base import Unit

ChangeKind = Literal["sort", "dedupe", "drop", "append", "align", "cap", "round", "truncate", "empty"]


@dataclass(frozen=True)
class Change:
    """One step that altered a list: the sizes it touched, as they were before it, and why it did."""

    kind: ChangeKind
    sizes: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class EffectiveList:
    """The sizes an engine captures, ascending, with everything it changed on the way.

    ``error`` is what the engine says when it refuses the list; ``sizes`` is then what was left at that moment.
    ``width`` is the number of rows of one decode request: a size in tokens serves ``size // width`` requests.
    """

    unit: Unit
    sizes: tuple[int, ...]
    changes: tuple[Change, ...] = ()
    error: str | None = None
    width: int = 1

    @property
    def top_requests(self) -> int:
        """Decode requests that the largest size serves; 0 for an empty or refused list."""
        if not self.sizes or self.error is not None:
            return 0
        return self.sizes[-1] // self.width if self.unit == "tokens" else self.sizes[-1]

    @property
    def altered(self) -> tuple[Change, ...]:
        """Changes that matter to a reader: order and repeats do not."""
        return tuple(change for change in self.changes if change.kind not in ("sort", "dedupe"))


@dataclass
class ListInWork:
    """A list while rules run over it; ``done`` freezes it."""

    unit: Unit
    sizes: list[int]
    width: int = 1
    changes: list[Change] = field(default_factory=list)

    def note(self, kind: ChangeKind, sizes: Iterable[int], reason: str) -> None:
        self.changes.append(Change(kind, tuple(sizes), reason))

    def keep(self, wanted: Callable[[int], bool], reason: str, kind: ChangeKind = "drop") -> None:
        """Drop sizes that are not wanted, noting them."""
        lost = [size for size in self.sizes if not wanted(size)]
        if lost:
            self.sizes = [size for size in self.sizes if wanted(size)]
            self.note(kind, lost, reason)

    def map(self, move: Callable[[int], int], reason: str, kind: ChangeKind) -> None:
        """Move sizes, noting those that moved."""
        moved = [size for size in self.sizes if move(size) != size]
        if moved:
            self.sizes = [move(size) for size in self.sizes]
            self.note(kind, moved, reason)

    def append(self, size: int, reason: str) -> None:
        self.sizes.append(size)
        self.note("append", (size,), reason)

    def tidy(self) -> None:
        """Sort and drop repeats, noting either when it was needed."""
        if self.sizes != sorted(self.sizes):
            self.note("sort", self.sizes, "sizes are put in ascending order")
            self.sizes.sort()
        repeated = sorted({size for size in self.sizes if self.sizes.count(size) > 1})
        if repeated:
            self.note("dedupe", repeated, "a size is captured once")
            self.sizes = sorted(set(self.sizes))

    def done(self, error: str | None = None) -> EffectiveList:
        return EffectiveList(self.unit, tuple(self.sizes), tuple(self.changes), error, self.width)


@dataclass(frozen=True)
class GraphCount:
    """How many graphs one phase records: a product of independent variants, as the engines key their graphs."""

    sizes: int
    stream_groups: int = 1
    adapter_variants: int = 1
    attention_variants: int = 1
    models: int = 1

    @property
    def total(self) -> int:
        return self.sizes * self.stream_groups * self.adapter_variants * self.attention_variants * self.models

    def __str__(self) -> str:
        parts = [f"{self.sizes} sizes"]
        for count, name in (
            (self.stream_groups, "stream groups"),
            (self.adapter_variants, "adapter variants"),
            (self.attention_variants, "attention variants"),
            (self.models, "models (target and draft)"),
        ):
            if count != 1:
                parts.append(f"{count} {name}")
        return f"{' × '.join(parts)} = {self.total} graphs" if len(parts) > 1 else f"{self.sizes} graphs"
