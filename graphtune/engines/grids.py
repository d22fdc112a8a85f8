"""Ascending lists of capture sizes put together from steps, as engines write them down."""

from __future__ import annotations

from collections.abc import Iterable


def steps(first: int, last: int, step: int) -> range:
    """Integers from ``first`` to ``last`` inclusive; empty when ``last`` is below ``first``."""
    return range(first, last + 1, step)


def ascending(*parts: Iterable[int]) -> tuple[int, ...]:
    """All sizes of all parts, sorted, each once."""
    return tuple(sorted({size for part in parts for size in part}))


def ceil_to(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple
