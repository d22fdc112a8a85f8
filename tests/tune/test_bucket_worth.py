"""What buckets earn, by hand and against evaluating the list without them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtune.engines.base import Padding
from graphtune.results import CaptureList
from graphtune.tune.bucket_worth import NEVER, SizeCost, bucket_worths, cliff, size_costs
from graphtune.tune.candidates import Evaluator
from graphtune.tune.latency_model import latency_model
from graphtune.tune.memory_model import key_of
from graphtune.tune.recommend import Question, recommend
from graphtune.tune.recommendation_text import as_text
from graphtune.tune.step_table import Step
from tests.synthetic import MIB, captured_list, cell_result, h200_sweep, latency_points, small_sweep
from tests.tune.answers import checked

SIZES = (1, 2, 4, 8, 16, 32)
MODEL = latency_model([cell_result([], [*latency_points(SIZES, 256), *latency_points(SIZES, 1024)])])

steps_of_any = st.lists(
    st.builds(Step, st.integers(1, 32), st.floats(0.01, 5), st.sampled_from([256.0, 700.0, 1024.0])), min_size=1
)
lists = st.sets(st.sampled_from(SIZES), min_size=1).map(lambda sizes: tuple(sorted(sizes)))
paddings: st.SearchStrategy[Padding] = st.sampled_from(["always", "exact"])


@given(steps_of_any, lists, paddings)
@settings(max_examples=60, deadline=None)
def test_a_bucket_earns_what_the_step_grows_by_without_it(
    steps: list[Step], sizes: tuple[int, ...], padding: Padding
) -> None:
    evaluator = Evaluator(steps, MODEL)
    whole = evaluator.evaluate(sizes, padding).expected_step_us
    assert whole is not None
    worths = bucket_worths(evaluator, sizes, padding, {size: SizeCost(MIB, 0.5) for size in sizes})
    for worth in worths:
        rest = tuple(size for size in sizes if size != worth.size)
        without = evaluator.evaluate(rest, padding).expected_step_us
        assert without is not None and worth.earned_us == pytest.approx(without - whole, abs=1e-6)
        assert worth.us_per_mib == worth.earned_us
        if worth.pays_back_s is not None:  # what is saved in that time is what the capture took
            assert worth.pays_back_s * (1 - whole / without) == pytest.approx(0.5)
    assert sum(worth.share for worth in worths) == pytest.approx(evaluator.evaluate(sizes, padding).coverage)


def test_the_cliff_by_hand() -> None:
    of = small_sweep((1, 2, 4), graph_us=[1000.0, 1000.0, 1000.0], eager_us=[3000.0] * 3)
    evaluator = Evaluator([Step(1, 3, 1024), Step(3, 1, 1024)], latency_model(of.cells))
    above = cliff(evaluator, (1, 2))
    assert above.share == 0.25 and above.cost_us == pytest.approx(0.25 * 2000)
    assert cliff(evaluator, (4,)).share == 0.0 and cliff(evaluator, ()).share == 1.0


def test_a_bucket_that_serves_nothing_never_pays() -> None:
    of = small_sweep((1, 2, 4))
    evaluator = Evaluator([Step(1, 1.0, 1024), Step(4, 1.0, 1024)], latency_model(of.cells))
    costs = size_costs(of.cells)[key_of(CaptureList("any name", "decode", "full", (1, 2, 4)))]
    assert costs[4].graph_bytes == 90 * MIB and costs[1].graph_bytes == MIB
    one, two, four = bucket_worths(evaluator, (1, 2, 4), "always", costs)
    assert two.never_pays and two.pays_back_s is None and two.absent["pays_back_s"] == NEVER
    assert not one.never_pays and not four.never_pays


def test_sizes_that_the_list_of_the_bytes_lacks_say_so() -> None:
    evaluator = Evaluator([Step(2, 1.0, 1024)], latency_model(small_sweep((1, 2)).cells))
    (worth,) = bucket_worths(evaluator, (2,), "always", {})
    assert worth.graph_bytes is None and "not captured" in worth.absent["graph_bytes"]


def test_size_costs_count_the_most_bytes_of_any_process() -> None:
    of = CaptureList("a", "decode", "full", (1, 2))
    cells = [
        cell_result([captured_list(of, each_bytes=each * MIB)], [], process=process)
        for process, each in ((1, 2), (2, 5), (3, 3))
    ]
    assert size_costs(cells)[key_of(of)][1].graph_bytes == 5 * MIB


def test_answers_explain_the_recommended_list_and_the_engines_own() -> None:
    answer = recommend(h200_sweep(), Question(gpu_mem="80", workload="steady 20", engines=("sglang",)))
    data = checked(answer)["engines"]["sglang"]
    assert [bucket["size"] for bucket in data["default"]["buckets"]] == data["default"]["capture_sizes"]
    assert sum(bucket["earned_us"] > 0 for bucket in data["default"]["buckets"]) == 1
    assert data["eager"]["buckets"] == [] and data["eager"]["cliff"]["share"] == 1.0
    text = as_text(answer)
    assert "longer without bucket" in text and "do not pay back their capture" in text
