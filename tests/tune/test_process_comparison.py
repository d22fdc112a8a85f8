from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtune.results import CaptureList
from graphtune.store import Sweep
from graphtune.tune.recommend import Question, recommend
from tests.synthetic import MIB, captured_list, cell_result, point, small_sweep, sweep
from tests.tune.answers import SPARSE, checked, codes


def uneven_sweep(seed: int, processes: int, pace: float, disturbed: float) -> Sweep:
    """Two lists, uneven step times, processes that disagree; process 1 takes ``pace`` times as long at everything and a
    share ``disturbed`` of all points is flagged."""
    rng = random.Random(seed)
    base = {
        (size, context, run): (1000 + 20 * size + 0.02 * size * context) * rng.uniform(0.97, 1.03)
        + (rng.choice((0, 300)) if run == "eager" else 0)
        for size in (1, 2, 4, 8, 16)
        for context in (256, 1024)
        for run in ("graph", "eager")
    }
    lists = [
        captured_list(CaptureList("powers", "decode", "full", (1, 2, 4, 8, 16))),
        captured_list(CaptureList("coarse", "decode", "full", (2, 8, 16)), position=2, each_bytes=4 * MIB),
    ]
    cells = []
    for process in range(1, processes + 1):
        points = []
        for (size, context, run), us in base.items():
            us *= rng.uniform(0.98, 1.02) * (pace if process == 1 else 1.0)
            one = point(size, context, "graph" if run == "graph" else "eager", us, gpu_us=us / 2)
            compared = (size, context) == (1, 256)  # so that all processes have a point in common
            flags = ("host slowed down 1.8x",) if rng.random() < disturbed and not compared else ()
            assert one.step_us is not None
            points.append(replace(one, step_us=replace(one.step_us, flags=flags)))
        cells.append(cell_result(lists, points, process=process))
    return sweep(cells)


@given(st.integers(0, 2**32), st.integers(1, 3), st.floats(0.1, 10), st.sampled_from([0.0, 0.2, 0.6]))
@settings(max_examples=40, deadline=None)
def test_a_process_slowed_down_by_any_factor_changes_no_answer(
    seed: int, processes: int, pace: float, disturbed: float
) -> None:
    for workload in ("uniform", "steady 3", "steady 16"):
        question = Question(workload=workload, engines=("sglang",), max_running_requests=16)
        one, other = (
            recommend(uneven_sweep(seed, processes, p, disturbed), question).engine("sglang") for p in (1.0, pace)
        )
        assert one.decode is not None and other.decode is not None
        assert one.decode.capture_sizes == other.decode.capture_sizes
        assert [tie.capture_sizes for tie in one.ties] == [tie.capture_sizes for tie in other.ties]
        assert one.default is not None and other.default is not None
        for first, second in ((one.default, other.default), (one.eager, other.eager)):
            assert first is not None and second is not None
            if first.chosen_over_this is not None and second.chosen_over_this is not None:
                assert first.chosen_over_this.by_process == pytest.approx(second.chosen_over_this.by_process)
                assert first.chosen_over_this.combined == pytest.approx(second.chosen_over_this.combined)


def disturbed_sweep() -> Sweep:
    """Replay is faster in both processes; the second is slowed down 1.6 times, its eager steps 3 times."""
    graph, eager = {1: 1000.0, 2: 1010.0, 4: 1030.0}, {1: 3000.0, 2: 3010.0, 4: 3030.0}
    lists = small_sweep((1, 2, 4)).cells[0].captured_lists
    cells = []
    for process, slow_graph, slow_eager in ((1, 1.0, 1.0), (2, 1.6, 3.0)):
        points = [point(s, 1024, "graph", us * slow_graph) for s, us in graph.items()]
        points += [point(s, 1024, "eager", us * slow_eager) for s, us in eager.items()]
        if process == 2:
            points = [replace(p, step_us=p.step_us and replace(p.step_us, flags=("host slowed",))) for p in points]
            points[0] = replace(points[0], step_us=points[0].step_us and replace(points[0].step_us, flags=()))
        cells.append(cell_result(lists, points, process=process))
    return sweep(cells)


def test_disturbed_steps_are_left_out_and_counted() -> None:
    answer = recommend(disturbed_sweep(), Question(workload="steady 2", engines=("vllm",)))
    warning = next(one for one in checked(answer)["warnings"] if one["code"] == "disturbed")
    assert "5 of 12 step times" in warning["message"] and "by no process" not in warning["message"]
    one = answer.engine("vllm")
    assert one.eager is not None and one.eager.expected_step_us == pytest.approx(3010.0)
    assert one.eager.chosen_over_this is not None and one.eager.chosen_over_this.assumed
    assert one.eager.chosen_over_this.by_process == pytest.approx((1010 / 3010,))


def test_a_disturbed_step_that_decides_is_named() -> None:
    of = disturbed_sweep()
    only = replace(of, cells=of.cells[1:])
    decides = recommend(only, Question(workload="steady 4", engines=("vllm",)))
    warning = next(one for one in checked(decides)["warnings"] if one["code"] == "disturbed_decides")
    assert "4 requests on a graph at 1,024 tokens" in warning["message"]
    small = recommend(only, Question(workload="steady 1", engines=("vllm",)))  # its replay was not disturbed
    assert small.engine("vllm").decode.capture_sizes == (1,)  # type: ignore[union-attr]
    assert "disturbed_decides" not in codes(checked(small))
    assert "disturbed_decides" not in codes(checked(recommend(of, Question(engines=("vllm",)))))


def test_only_disturbed_steps_are_used_and_said_to_be() -> None:
    of = disturbed_sweep()
    answer = recommend(replace(of, cells=of.cells[1:]), Question(engines=("vllm",)))
    warning = next(one for one in checked(answer)["warnings"] if one["code"] == "disturbed")
    assert (
        "5 of 6 step times" in warning["message"]
        and "5 of them were measured undisturbed by no process" in warning["message"]
    )
    assert answer.engine("vllm").decode is not None


def test_processes_that_disagree_about_everything_but_the_ratio_still_agree() -> None:
    """The second process is 1.8 times as slow: a comparison across processes would drown a gain of 4 %."""
    graph = [1000.0, 1010.0, 1030.0]
    fast = small_sweep((1, 2, 4), graph_us=graph, eager_us=[us * 1.04 for us in graph])
    slow = small_sweep((1, 2, 4), graph_us=[us * 1.8 for us in graph], eager_us=[us * 1.88 for us in graph])
    second = replace(slow.cells[0], cell={**slow.cells[0].cell, "process": 2})
    question = Question(workload="steady 4", engines=("sglang",))
    answer = recommend(sweep([fast.cells[0], second]), question).engine("sglang")
    assert answer.decode is not None and answer.decode.capture_sizes == (4,)
    assert answer.eager is not None and answer.eager.chosen_over_this is not None
    assert answer.eager.chosen_over_this.by_process == pytest.approx((1 / 1.04, 1.8 / 1.88))


def test_a_gain_that_every_process_shows_is_no_reason_to_serve_without_graphs() -> None:
    """A server that is told to turn graphs off because two processes disagree about how much they gain loses both."""
    graph = [1000.0, 1010.0, 1030.0]
    good = small_sweep((1, 2, 4), graph_us=graph, eager_us=[us * 1.30 for us in graph])
    less = small_sweep((1, 2, 4), graph_us=graph, eager_us=[us * 1.06 for us in graph])
    second = replace(less.cells[0], cell={**less.cells[0].cell, "process": 2})
    answer = recommend(sweep([good.cells[0], second]), Question(engines=("sglang",))).engine("sglang")
    assert answer.decode is not None and answer.decode.coverage == 1.0
    assert "no list gains more than the noise, 17.5%, but a server's eager step is longer than this" in answer.message


def test_what_one_process_loses_and_another_gains_is_no_reason_to_serve_without_graphs() -> None:
    graph = [1000.0, 1010.0, 1030.0]
    good = small_sweep((1, 2, 4), graph_us=graph, eager_us=[us * 1.05 for us in graph])
    for eager, pays in ((0.90, True), (0.95, None)):
        bad = small_sweep((1, 2, 4), graph_us=graph, eager_us=[us * eager for us in graph])
        first = good.cells[0] if pays else bad.cells[0]
        second = replace(bad.cells[0], cell={**bad.cells[0].cell, "process": 2})
        answer = recommend(sweep([first, second]), Question(engines=("sglang",))).engine("sglang")
        assert answer.decode is not None and answer.decode.is_eager is not bool(pays)
        said = "a server's eager step is longer" if pays else "it pays once eager steps take"
        assert said in answer.message


def test_what_the_limits_cost_is_said() -> None:
    answer = recommend(SPARSE, Question(max_graphs=1, engines=("vllm",))).engine("vllm")
    assert "without the limits 3 sizes, 8 to 32 would take 5.98 ms" in answer.message
    assert "without the limits" not in recommend(SPARSE, Question(engines=("vllm",))).engine("vllm").message


def test_steps_that_eager_serves_as_fast_are_told_from_steps_without_a_list() -> None:
    """Above 2 requests replay is slower: those steps run eager by choice, and the warning names the lower bound."""
    of = small_sweep((1, 2, 4), graph_us=[1000.0, 1010.0, 4000.0], eager_us=[3000.0, 3010.0, 3020.0], processes=2)
    found = codes(checked(recommend(of, Question(engines=("sglang",)))))
    assert "eager_is_as_fast" in found and "steps_run_eager" not in found
    cut = recommend(small_sweep((1, 2, 4), processes=2, failing=(4,)), Question(engines=("sglang",)))
    assert "steps_run_eager" in codes(checked(cut)) and "eager_is_as_fast" not in codes(checked(cut))


def test_the_answer_names_the_options_that_were_assumed() -> None:
    def options(**question: Any) -> tuple[str, ...]:
        return recommend(SPARSE, Question(**question)).assumed

    assert options() == ("--workload", "--max-running", "--context-len")
    assert options(max_running_requests=8, context_tokens=300) == ("--workload",)
    assert options(workload="steady 4") == ("--context-len",)
    assert options(workload="steady 4", context_tokens=300) == ()
