"""Whether a decode batch may be replayed. Every refusal has a name; the caller counts them."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from enum import StrEnum


class Refusal(StrEnum):
    """Why a batch runs eager."""

    ABOVE_TOP = "above_top"
    NO_EXACT_SIZE = "no_exact_size"
    CONTEXT_TOO_LONG = "context_too_long"


@dataclass(frozen=True)
class Admission:
    """The bucket to replay, or the reason not to."""

    padded_size: int | None
    refusal: Refusal | None

    @property
    def reason(self) -> str:
        return self.refusal.value if self.refusal else "graph"


def admit_decode(
    requests: int, longest: int, *, sizes: tuple[int, ...], max_context: int, padding: bool = True
) -> Admission:
    """Admission of ``requests`` requests whose longest has ``longest`` tokens, for captured ``sizes`` (ascending).

    The smallest captured size that holds the batch is chosen; without ``padding`` only an equal one.
    """
    if longest > max_context:
        return Admission(None, Refusal.CONTEXT_TOO_LONG)
    at = bisect.bisect_left(sizes, requests)
    if at == len(sizes):
        return Admission(None, Refusal.ABOVE_TOP)
    if not padding and sizes[at] != requests:
        return Admission(None, Refusal.NO_EXACT_SIZE)
    return Admission(sizes[at], None)
