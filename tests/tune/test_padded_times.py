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
        (12, 32, 135.0 - 110.0),  # between raw sizes, against what 12 requests take
        (24, 32, 150.0 - 140.0),  # between a padded and the full bucket
        (8, 64, 320.0 - 100.0),  # emptier than any timed
        (16, 48, (20.0 + 200.0) / 2),  # in a bucket between two
        (40, 48, (355.0 - 230.0) / 3),  # between itself and the bucket above
    ],
)
def test_what_padding_takes(raw: int, bucket: int, extra: float) -> None:
    assert TIMES.extra_us(raw, bucket) == pytest.approx(extra)


@pytest.mark.parametrize(("raw", "bucket"), [(4, 8), (8, 65), (4, 64), (64, 128)])
def test_nothing_is_said_beyond_what_was_timed(raw: int, bucket: int) -> None:
    assert TIMES.extra_us(raw, bucket) is None


@given(st.integers(8, 64), st.integers(8, 64))
def test_a_step_lies_between_the_least_and_the_most_that_was_timed(raw: int, bucket: int) -> None:
    raw, bucket = sorted((raw, bucket))
    extra = TIMES.extra_us(raw, bucket)
    assert extra is not None and -60.0 <= extra <= 240.0


def test_a_padded_replay_left_out_is_told_by_the_others() -> None:
    assert set(TIMES.inner()) == {(16, 32), (32, 64)}
    assert TIMES.without(16, 32).extra_us(16, 32) == pytest.approx(130.0 + (160.0 - 130.0) / 3 - 120.0)
    assert TIMES.without(32, 64).extra_us(8, 64) == TIMES.extra_us(8, 64)
