"""What is best by another measure than the mean step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtune.results import CaptureList
from graphtune.store import Sweep
from graphtune.tune.candidates import Evaluator
from graphtune.tune.latency_model import latency_model
from graphtune.tune.objective import TAIL, served
from graphtune.tune.recommend import Question, recommend
from graphtune.tune.recommendation import EngineAnswer, ListAnswer
from graphtune.tune.step_table import Step
from graphtune.tune.workload import DecodeShare, Workload
from tests.synthetic import MIB, captured_list, cell_result, latency_points, point, small_sweep, sweep
from tests.tune.answers import checked
from tests.tune.test_trace_traffic import trace

SIZES = (1, 2, 4, 8, 16, 32)
MODEL = latency_model([cell_result([], [*latency_points(SIZES, 256), *latency_points(SIZES, 1024)])])


@given(st.lists(st.builds(Step, st.integers(1, 32), st.floats(0.01, 5), st.just(1024.0)), min_size=1))
@settings(max_examples=40, deadline=None)
def test_figures_follow_their_definitions(steps: list[Step]) -> None:
    evaluator = Evaluator(steps, MODEL)
    found = served(evaluator, (4, 16), "always", None)
    evaluation = evaluator.evaluate((4, 16), "always")
    mean = np.average([s.requests for s in steps], weights=[s.weight for s in steps])
    assert evaluation.expected_step_us is not None and found.inter_token_p99_us is not None
    assert found.tokens_per_s == pytest.approx(mean / evaluation.expected_step_us * 1e6)
    times = [evaluator.model.step(s.requests, evaluator.bucket(s.requests, (4, 16), "always"), 1024) for s in steps]
    tokens = sum(s.weight * s.requests for s in steps)
    within = [t is not None and t.us <= found.inter_token_p99_us + 1e-9 for t in times]
    below = [t is not None and t.us < found.inter_token_p99_us - 1e-9 for t in times]
    share: Callable[[list[bool]], float] = lambda of: (  # noqa: E731
        sum(s.weight * s.requests for s, counts in zip(steps, of, strict=True) if counts) / tokens
    )
    assert share(within) >= TAIL - 1e-9 and share(below) < TAIL


def test_a_full_cache_costs_tokens() -> None:
    """16 requests of 1,024 tokens with KV for 8: half the tokens in the time of a step of 8."""
    evaluator = Evaluator([Step(16, 1.0, 1024.0)], MODEL)
    room, full = (served(evaluator, SIZES, "always", kv) for kv in (16 * 1024, 8 * 1024 + 5))
    eight, sixteen = MODEL.graph(8, 1024), MODEL.graph(16, 1024)
    assert eight is not None and sixteen is not None
    assert room.tokens_per_s == pytest.approx(16 / sixteen.us * 1e6)
    assert full.tokens_per_s == pytest.approx(8 / eight.us * 1e6)
    assert room.inter_token_p99_us == full.inter_token_p99_us == sixteen.us


def two_lists() -> Sweep:
    """A dense list that is slow to capture and a coarse one that is as fast but for the rare step of 3 requests."""
    dense = captured_list(CaptureList("dense", "decode", "full", (3, 4)), first_bytes=60 * MIB, seconds_each=4.0)
    coarse = captured_list(CaptureList("coarse", "decode", "full", (4,)), first_bytes=90 * MIB)
    times = {3: 1000.0, 4: 1300.0}
    points = [point(size, 1024, "graph", us) for size, us in times.items()]
    points += [point(size, 1024, "eager", 4000.0) for size in times]
    return sweep([cell_result([dense, coarse], points, process=process) for process in (1, 2)])


def asked(of: Sweep, question: Question, weights: dict[int, float]) -> EngineAnswer:
    shares = tuple(DecodeShare(n, weight) for n, weight in weights.items())
    traffic = Workload(shares, (), max(weights), None, "made up", "per_step")
    answer = recommend(of, replace(question, workload=traffic, engines=("sglang",)))
    checked(answer)
    return answer.engine("sglang")


def chosen(of: EngineAnswer) -> ListAnswer:
    assert of.decode is not None
    return of.decode


def test_the_shortest_capture_of_equally_fast_lists_starts_first() -> None:
    rare = {3: 0.001, 4: 1.0}
    assert chosen(asked(two_lists(), Question(), rare)).bytes_of_list == "dense"  # fewer bytes
    quick = asked(two_lists(), Question(objective="startup"), rare)
    assert chosen(quick).bytes_of_list == "coarse"
    often = asked(two_lists(), Question(objective="startup"), {3: 1.0, 4: 1.0})
    assert chosen(often).capture_sizes == (3, 4)  # the coarse one is slower: a shorter start is no reason


def test_a_limit_on_gaps_excludes_lists_and_says_what_is_nearest() -> None:
    of = two_lists()
    often = {3: 1.0, 4: 0.001}
    loose = asked(of, Question(objective="startup", slo_inter_token_us=1400.0), often)
    assert chosen(loose).capture_sizes == (4,)
    tight = asked(of, Question(objective="startup", slo_inter_token_us=1100.0), often)
    assert 3 in chosen(tight).capture_sizes
    never = asked(of, Question(slo_inter_token_us=900.0), often)
    assert never.status == "nothing_fits" and "within 900 µs: " in never.message and "1.00 ms" in never.message


def test_the_tail_of_the_gaps_is_not_the_mean() -> None:
    """Two steps in a hundred have 4 requests: in the mean they do not count, at the 99th percentile they do."""
    of = small_sweep((1, 4), graph_us=[1000.0, 1000.0], eager_us=[3000.0, 1020.0], processes=2)
    weights = {1: 0.98, 4: 0.02}
    tail = chosen(asked(of, Question(objective="p99-itl"), weights))
    assert tail.inter_token_p99_us == pytest.approx(1000.0) and 4 in tail.capture_sizes


def test_on_a_trace_lists_are_played() -> None:
    of = small_sweep((1, 2, 4, 8, 16), graph_us=[1000.0] * 5, eager_us=[9000.0] * 5, processes=2)
    question = Question(
        workload=trace(120, 0.02, 40), gpu_mem="80", prefill_tokens_per_s=1e6, engines=("vllm",), load="2"
    )
    for objective in ("throughput", "p99-itl"):
        answer = recommend(of, replace(question, objective=objective))
        data = checked(answer)["engines"]["vllm"]
        assert data["decode"]["simulated"]["tokens_per_s"] >= data["eager"]["simulated"]["tokens_per_s"]
        assert data["decode"]["coverage"] == 1.0
    limited = recommend(of, replace(question, slo_inter_token_us=500.0))
    assert limited.status == "nothing_fits" and "within 500 µs" in limited.engine("vllm").message
