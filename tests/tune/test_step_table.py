"""Figures gathered for whole lists: each is that of the model, and asked of it once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.tune.latency_model import StepFigure
from graphtune.tune.step_table import EAGER, Step, StepModel, StepTable

STEPS = [Step(n, 1.0, 100.0 * n) for n in range(1, 9)]


class Asked:
    """A model that counts what it is asked; steps of 7 requests have no figure in buckets."""

    cell_ids: tuple[str, ...] = ()
    processes: Mapping[int, StepModel] = {}

    def __init__(self) -> None:
        self.asked: Counter[tuple[int, int | None]] = Counter()

    def step(self, raw_size: int, bucket: int | None, context_tokens: float) -> StepFigure | None:
        self.asked[raw_size, bucket] += 1
        if bucket is None:
            return StepFigure(1000.0 + raw_size, "measured", 0.25)
        if raw_size == 7:
            return None
        return StepFigure(10.0 * bucket + context_tokens, "measured" if raw_size == bucket else "interpolated")


@given(st.lists(st.lists(st.sampled_from([EAGER, *range(1, 40)]), min_size=8, max_size=8), min_size=1, max_size=12))
def test_figures_are_those_of_the_model_and_asked_for_once(lists: list[list[int]]) -> None:
    model, plain = Asked(), Asked()
    table = StepTable(STEPS, model)
    for buckets in lists:
        found = table.of(np.array(buckets))
        for at, (step, bucket) in enumerate(zip(STEPS, buckets, strict=True)):
            figure = plain.step(step.requests, bucket or None, step.context_tokens)
            assert bool(found.known[at]) == (figure is not None)
            if figure is not None:
                assert (found.us[at], found.own[at]) == (figure.us, figure.own)
                assert bool(found.measured[at]) == (figure.provenance == "measured")
    assert set(model.asked.values()) == {1} and set(model.asked) == set(plain.asked)


def test_no_steps_have_no_figures() -> None:
    found = StepTable([], Asked()).of(np.array([], dtype=int))
    assert found.us.shape == (0,) and bool(found.known.all())


def test_an_error_of_the_model_leaves_the_cell_to_be_asked_again() -> None:
    model = Asked()
    table = StepTable(STEPS[:1], model)

    def fails(raw_size: int, bucket: int | None, context_tokens: float) -> StepFigure | None:
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(model, "step", fails)
        table.of(np.array([4]))
    assert table.of(np.array([4])).us.tolist() == [140.0]
