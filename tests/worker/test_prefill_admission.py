"""Admission of prefills, and of decode batches with what only some servers have: each reason by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.worker.runners.admission import (
    NOT_APPLICABLE,
    Admission,
    PrefillLimits,
    PrefillShape,
    Refusal,
    admit_decode,
    admit_prefill,
)

LIMITS = PrefillLimits(sizes=(4, 8, 32), max_requests=4, max_context=100)
SHAPE = PrefillShape(tokens=7, requests=2, longest=50)


def test_the_smallest_size_that_holds_the_tokens() -> None:
    assert admit_prefill(SHAPE, LIMITS) == Admission(8, None)


@pytest.mark.parametrize(
    ("shape", "limits", "refusal"),
    [
        ({"tokens": 33}, {}, Refusal.ABOVE_TOP),
        ({"tokens": 1}, {}, Refusal.TOO_MUCH_PADDING),
        ({"tokens": 15}, {}, Refusal.TOO_MUCH_PADDING),
        ({"tokens": 7}, {"waste_cap": 1.1}, Refusal.TOO_MUCH_PADDING),
        ({"requests": 5}, {}, Refusal.TOO_MANY_REQUESTS),
        ({"longest": 101}, {}, Refusal.CONTEXT_TOO_LONG),
        ({"longest": None}, {}, Refusal.CONTEXT_UNKNOWN),
        ({"width": 4}, {}, Refusal.WIDTH_MISMATCH),
        ({"decode_requests": 1}, {}, Refusal.MIXED_BATCH),
        ({"tokens": 7}, {"padding": False}, Refusal.NO_EXACT_SIZE),
        ({"tokens": 7}, {"sizes": ()}, Refusal.ABOVE_TOP),
    ],
)
def test_each_refusal_by_name(shape: dict[str, Any], limits: dict[str, Any], refusal: Refusal) -> None:
    admission = admit_prefill(replace(SHAPE, **shape), replace(LIMITS, **limits))
    assert (admission.padded_size, admission.refusal) == (None, refusal)
    assert admission.reason == refusal.value


@pytest.mark.parametrize(
    ("shape", "limits", "padded"),
    [
        ({"tokens": 2}, {}, 4),
        ({"tokens": 16}, {}, 32),
        ({"tokens": 1}, {"waste_cap": None}, 4),
        ({"tokens": 8}, {"padding": False}, 8),
        ({"decode_requests": 1}, {"mixed": True}, 8),
        ({"requests": 4, "longest": 100, "tokens": 32}, {}, 32),
    ],
)
def test_each_limit_is_inclusive(shape: dict[str, Any], limits: dict[str, Any], padded: int) -> None:
    assert admit_prefill(replace(SHAPE, **shape), replace(LIMITS, **limits)) == Admission(padded, None)


def test_another_ranks_refusal_is_named_after_the_own() -> None:
    assert admit_prefill(SHAPE, LIMITS, others_admit=False).refusal is Refusal.OTHER_RANK
    own = admit_prefill(replace(SHAPE, tokens=33), LIMITS, others_admit=False)
    assert own.refusal is Refusal.ABOVE_TOP


shapes = st.builds(
    PrefillShape,
    tokens=st.integers(1, 80),
    requests=st.integers(1, 8),
    longest=st.none() | st.integers(1, 120),
    decode_requests=st.integers(0, 1),
    width=st.sampled_from((1, 1, 1, 4)),
)
limits = st.builds(
    PrefillLimits,
    sizes=st.sets(st.integers(1, 64), max_size=6).map(lambda sizes: tuple(sorted(sizes))),
    max_requests=st.integers(1, 8),
    max_context=st.integers(50, 120),
    waste_cap=st.none() | st.floats(1.0, 8.0),
    padding=st.booleans(),
    mixed=st.booleans(),
)


@given(shape=shapes, limits=limits, votes=st.lists(st.booleans(), max_size=3))
def test_every_rank_comes_to_the_same_verdict(shape: PrefillShape, limits: PrefillLimits, votes: list[bool]) -> None:
    """A rank votes with the predicate before the batch exists; the minimum of the votes decides for all."""
    vote = admit_prefill(shape, limits).refusal is None
    agreed = min([vote, *votes])
    decided = admit_prefill(shape, limits, others_admit=agreed)
    assert (decided.padded_size is not None) == agreed
    if agreed:
        assert decided == admit_prefill(shape, limits)


@given(shape=shapes, limits=limits)
def test_what_is_admitted_is_within_every_limit_and_what_is_not_breaks_the_one_named(
    shape: PrefillShape, limits: PrefillLimits
) -> None:
    admission = admit_prefill(shape, limits)
    holding = [size for size in limits.sizes if size >= shape.tokens]
    wasteful = bool(holding) and limits.waste_cap is not None and min(holding) > limits.waste_cap * shape.tokens
    broken = {
        Refusal.WIDTH_MISMATCH: shape.width != 1,
        Refusal.MIXED_BATCH: shape.decode_requests > 0 and not limits.mixed,
        Refusal.TOO_MANY_REQUESTS: shape.requests > limits.max_requests,
        Refusal.CONTEXT_UNKNOWN: shape.longest is None,
        Refusal.CONTEXT_TOO_LONG: shape.longest is not None and shape.longest > limits.max_context,
        Refusal.ABOVE_TOP: not holding,
        Refusal.NO_EXACT_SIZE: not limits.padding and shape.tokens not in limits.sizes,
        Refusal.TOO_MUCH_PADDING: wasteful,
    }
    if admission.refusal is None:
        assert not any(broken.values())
        assert admission.padded_size == min(holding)
    else:
        assert broken[admission.refusal]


def test_decode_knows_the_same_reasons() -> None:
    def admit(**changes: Any) -> Admission:
        given: dict[str, Any] = {"requests": 2, "longest": 10, "sizes": (4,), "max_context": 100, **changes}
        return admit_decode(given.pop("requests"), given.pop("longest"), **given)

    assert admit() == Admission(4, None)
    assert admit(width=4).refusal is Refusal.WIDTH_MISMATCH
    assert admit(width=4, captured_width=4) == Admission(4, None)
    assert admit(longest=None).refusal is Refusal.CONTEXT_UNKNOWN
    assert admit(others_admit=False).refusal is Refusal.OTHER_RANK
    assert admit(requests=5, others_admit=False).refusal is Refusal.ABOVE_TOP


def test_what_cannot_occur_is_no_refusal() -> None:
    assert not set(NOT_APPLICABLE) & {refusal.value for refusal in Refusal}
    assert all(NOT_APPLICABLE.values())
