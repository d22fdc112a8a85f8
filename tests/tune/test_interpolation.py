"""The error that is stated of interpolated step times."""

from __future__ import annotations

import pytest

from graphtune.tune.interpolation import interpolation_of
from graphtune.tune.latency_model import latency_model
from graphtune.tune.recommend import Question, recommend
from tests.synthetic import small_sweep
from tests.tune.answers import checked


def test_times_on_a_line_have_no_error() -> None:
    of = small_sweep((1, 2, 4, 8), graph_us=[1010.0, 1020.0, 1040.0, 1080.0])
    found = interpolation_of(latency_model(of.cells))
    assert found.points == 2 and found.relative == pytest.approx(0.0)


def test_a_step_off_the_line_is_off_by_what_it_is() -> None:
    of = small_sweep((1, 2, 3), graph_us=[1000.0, 1250.0, 1000.0])
    found = interpolation_of(latency_model(of.cells))
    assert found.points == 1 and found.relative == pytest.approx(0.2) and "within 20.0%" in found.words


def test_two_sizes_tell_nothing_of_it() -> None:
    answer = recommend(small_sweep((1, 2)), Question(engines=("vllm",)))
    assert answer.interpolation.relative is None
    assert "not known" in checked(answer)["missing"]["interpolation.relative"]
