"""Admission: the smallest captured size that holds the batch, or a named refusal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graphtune.worker.runners.admission import Refusal, admit_decode

sizes_lists = st.sets(st.integers(1, 64), min_size=1).map(lambda sizes: tuple(sorted(sizes)))


@given(sizes=sizes_lists, requests=st.integers(1, 80))
def test_padding_takes_the_smallest_size_that_holds_the_batch(sizes: tuple[int, ...], requests: int) -> None:
    admission = admit_decode(requests, 10, sizes=sizes, max_context=100)
    holding = [size for size in sizes if size >= requests]
    if holding:
        assert admission.padded_size == min(holding)
        assert admission.reason == "graph"
    else:
        assert admission.padded_size is None
        assert admission.refusal is Refusal.ABOVE_TOP


@given(sizes=sizes_lists, requests=st.integers(1, 80))
def test_without_padding_only_an_equal_size_runs(sizes: tuple[int, ...], requests: int) -> None:
    admission = admit_decode(requests, 10, sizes=sizes, max_context=100, padding=False)
    assert (admission.padded_size == requests) == (requests in sizes)
    if requests < max(sizes) and requests not in sizes:
        assert admission.refusal is Refusal.NO_EXACT_SIZE


def test_a_context_beyond_the_table_is_refused() -> None:
    assert admit_decode(1, 101, sizes=(1,), max_context=100).refusal is Refusal.CONTEXT_TOO_LONG
