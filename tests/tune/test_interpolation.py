"""The error that is stated of interpolated step times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphtune.plan import PaddedTo
from graphtune.tune.interpolation import interpolation_of
from graphtune.tune.latency_model import latency_model
from graphtune.tune.recommend import Question, recommend
from tests.synthetic import padded_points, small_sweep
from tests.tune.answers import checked


def test_times_on_a_line_have_no_error() -> None:
    of = small_sweep((1, 2, 4, 8), graph_us=[1010.0, 1020.0, 1040.0, 1080.0])
    found = interpolation_of(latency_model(of.cells))
    assert found.points == 2 and found.relative == pytest.approx(0.0)


def test_a_step_off_the_line_is_off_by_what_it_is() -> None:
    of = small_sweep((1, 2, 3), graph_us=[1000.0, 1250.0, 1000.0])
    found = interpolation_of(latency_model(of.cells))
    assert found.points == 1 and found.relative == pytest.approx(0.2) and "within 20.0%" in found.words


def test_a_padded_replay_off_the_line_between_two_others_is_off_by_what_it_is() -> None:
    of = small_sweep((1, 2, 4), graph_us=[1000.0, 1000.0, 1000.0])
    (cell,) = of.cells
    own_us = 910.0  # of the device, in each of its own buckets
    padded = padded_points(
        [PaddedTo(1, (4,)), PaddedTo(2, (4,))], 1024, lambda raw, _: own_us - (100.0 if raw == 2 else 0.0)
    )
    found = interpolation_of(latency_model([replace(cell, points=(*cell.points, *padded))]))
    # 2 requests in 4, said to take what 1 and 4 do.
    assert (found.points, found.padded_points) == (1, 1) and found.relative == pytest.approx(0.0)
    assert found.padded_relative == pytest.approx(100 / 900) and "of 1 padded ones within 11.1%" in found.words


def test_two_sizes_tell_nothing_of_it() -> None:
    answer = recommend(small_sweep((1, 2)), Question(engines=("vllm",)))
    assert answer.interpolation.relative is None
    assert "not known" in checked(answer)["missing"]["interpolation.relative"]
