"""What padding takes, between the replays that were timed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.tune.padded_times import PaddedTimes

TIMES = PaddedTimes(
    context_tokens=1024,
    full={8: 100.0, 16: 120.0, 32: 160.0, 48: 300.0, 64: 400.0},
    padded={16: {8: 110.0}, 32: {8: 130.0, 16: 140.0}, 64: {16: 320.0, 32: 340.0}},
)


@pytest.mark.parametrize(
    ("raw", "bucket", "extra"),
    [
        (16, 16, 0.0),
        (8, 16, 10.0),
        (8, 32, 30.0),
        (12, 32, 135.0 - 110.0),  # few rows: between times, against what 12 requests take
        (24, 32, 10.0),  # more: between what padding adds to 16, 20 µs, and to a full bucket, nothing
        (40, 64, 0.75 * 180.0),  # whatever 40 requests take: 180 µs are added to 32
        (8, 64, 320.0 - 8 * (340.0 - 320.0) / 16 - 100.0),  # emptier than any timed: on as between the two smallest
        (16, 48, (20.0 + 200.0) / 2),  # in a bucket between two
        (40, 48, 0.75 * 180.0 / 3),  # between itself and the bucket above
    ],
)
def test_what_padding_takes(raw: int, bucket: int, extra: float) -> None:
    assert TIMES.extra_us(raw, bucket) == pytest.approx(extra)


def test_a_step_in_what_requests_take_stays_where_it_is_in_a_larger_bucket() -> None:
    """One request more begins another wave of attention work, in its own bucket and in any other."""
    full = {16: 100.0, 144: 500.0, 145: 700.0, 200: 720.0, 256: 900.0}
    times = PaddedTimes(1024, full, {256: {16: 300.0, 144: 520.0}})
    assert times.extra_us(145, 256) == pytest.approx(20.0 * 111 / 112)
    assert times.extra_us(200, 256) == pytest.approx(20.0 * 56 / 112)


def test_padding_of_more_than_a_few_rows_takes_nothing_at_the_least() -> None:
    times = PaddedTimes(1024, {16: 100.0, 32: 110.0, 64: 200.0}, {64: {16: 90.0, 32: 109.0}})
    assert times.extra_us(32, 64) == 0.0 and times.extra_us(16, 64) == pytest.approx(-10.0)


def test_what_fewer_requests_take_does_not_rise() -> None:
    """Noise between the two smallest is no slope."""
    times = PaddedTimes(1024, {1: 100.0, 16: 100.0, 32: 110.0, 64: 200.0}, {64: {16: 150.0, 32: 149.0}})
    assert times.extra_us(1, 64) == pytest.approx(50.0)


def test_a_batch_whose_own_bucket_was_not_timed_tells_nothing() -> None:
    """Its full replay failed, say; the bucket that it was replayed in is as if it had not been timed padded."""
    times = PaddedTimes(1024, {4: 100.0, 8: 120.0, 16: 150.0}, {8: {1: 110.0}, 16: {1: 120.0, 8: 140.0}})
    assert times.buckets == (16,)
    assert times.extra_us(4, 16) == pytest.approx(35.0) and times.extra_us(4, 8) == pytest.approx(35.0 / 3)
    assert times.column(16).sizes == (8, 16)


@pytest.mark.parametrize(("raw", "bucket"), [(4, 8), (8, 65), (4, 64), (64, 128)])
def test_nothing_is_said_beyond_what_was_timed(raw: int, bucket: int) -> None:
    assert TIMES.extra_us(raw, bucket) is None


@given(st.integers(8, 64), st.integers(8, 64))
def test_a_step_lies_between_the_least_and_the_most_that_was_timed(raw: int, bucket: int) -> None:
    raw, bucket = sorted((raw, bucket))
    extra = TIMES.extra_us(raw, bucket)
    assert extra is not None and -70.0 <= extra <= 240.0


def test_a_padded_replay_left_out_is_told_by_the_others() -> None:
    assert set(TIMES.inner()) == {(16, 32), (32, 64)}
    assert TIMES.without(16, 32).extra_us(16, 32) == pytest.approx(130.0 + (160.0 - 130.0) / 3 - 120.0)
    assert TIMES.without(32, 64).extra_us(16, 64) == TIMES.extra_us(16, 64)
