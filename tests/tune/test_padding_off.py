"""Lists for a server that is told not to pad: where a long replay would stand for a short eager step."""

from __future__ import annotations

import itertools
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtune.engines import ENGINES
from graphtune.engines.base import Padding
from graphtune.tune.candidates import bucket_for
from graphtune.tune.recommend import Question, recommend
from graphtune.tune.recommendation import EngineAnswer
from graphtune.tune.recommendation_text import as_text
from graphtune.tune.workload import DecodeShare, Workload
from tests.synthetic import small_sweep
from tests.tune.answers import checked

SIZES = (8, 100, 256)
GRAPH_US = (1000.0, 2000.0, 6000.0)
EAGER_US = (1500.0, 2500.0, 6500.0)
SWEEP = small_sweep(SIZES, graph_us=GRAPH_US, eager_us=EAGER_US)


def traffic(weights: dict[int, float]) -> Workload:
    shares = tuple(DecodeShare(n, weight) for n, weight in weights.items())
    return Workload(shares, (), max(weights), None, "made up", "per_step")


MIXED = traffic({8: 0.4, 100: 0.2, 256: 0.4})


def answered(engine: str, max_graphs: int | None = 2, current: str | None = None) -> EngineAnswer:
    answer = recommend(
        SWEEP, Question(gpu_mem="80", workload=MIXED, engines=(engine,), max_graphs=max_graphs, current=current)
    )
    checked(answer)
    (one,) = answer.engines
    if one.dispatch.decode == "exact":
        assert "with padding off" in as_text(answer)
    return one


@pytest.mark.parametrize("engine", ["sglang", "tensorrt_llm"])
def test_two_graphs_without_padding_leave_the_middle_to_eager(engine: str) -> None:
    found = answered(engine)
    assert found.dispatch.decode == "exact" and found.decode is not None and found.flags is not None
    assert found.decode.capture_sizes == (8, 256) and found.decode.coverage == pytest.approx(0.8)
    assert found.decode.expected_step_us == pytest.approx(0.4 * 1000 + 0.2 * 2500 + 0.4 * 6000)
    assert found.decode.padding_waste == 0.0
    if engine == "sglang":
        assert "--disable-cuda-graph-padding" in found.flags.args
    else:
        assert found.flags.yaml is not None and "enable_padding: false" in found.flags.yaml


def test_an_engine_that_always_pads_takes_the_smaller_pair() -> None:
    found = answered("vllm")
    assert found.dispatch.decode == "always" and found.decode is not None
    assert found.decode.capture_sizes == (8, 100)


def test_a_list_without_padding_that_is_as_fast_wins_where_it_serves_more_steps() -> None:
    """Within 1 % of each other: 8 with padding serves a third of the steps, 256 without it two thirds."""
    of = small_sweep((8, 256), graph_us=(1000.0, 6000.0), eager_us=(1260.0, 6130.0))
    asked = Question(gpu_mem="80", workload=traffic({8: 1.0, 256: 2.0}), engines=("sglang",), max_graphs=1)
    answer = recommend(of, asked)
    checked(answer)
    (found,) = answer.engines
    assert found.decode is not None and found.dispatch.decode == "exact" and found.decode.capture_sizes == (256,)
    assert "padding_is_off" in {caution.code for caution in answer.warnings}


@pytest.mark.parametrize("engine", list(ENGINES))
def test_with_a_graph_for_every_size_padding_stays_on(engine: str) -> None:
    found = answered(engine, max_graphs=None)
    assert found.dispatch == ENGINES[engine].dispatch
    assert found.decode is not None and found.decode.capture_sizes == SIZES


def test_the_command_to_paste_turns_padding_off() -> None:
    found = answered("sglang", current="python -m sglang.launch_server --model-path m --cuda-graph-bs-decode 256")
    assert found.current is not None and not found.current.leave_it and found.current.command is not None
    assert "--disable-cuda-graph-padding" in found.current.command.args
    again = answered("sglang", current=shlex.join(found.current.command.args))
    assert again.current is not None and again.current.padding == "exact" and again.current.leave_it


def test_an_engine_without_padding_cannot_be_told_twice() -> None:
    assert ENGINES["vllm"].unpadded() is None
    for name in ("sglang", "tensorrt_llm"):
        off = ENGINES[name].unpadded()
        assert off is not None and off.unpadded() is None and off.version == ENGINES[name].version


def expected_us(sizes: tuple[int, ...], padding: Padding, weights: dict[int, float], graph: dict[int, float]) -> float:
    buckets = {n: bucket_for(n, sizes, padding) for n in weights}
    times = {n: graph[n] + 500.0 if bucket is None else graph[bucket] for n, bucket in buckets.items()}
    return sum(weights[n] * times[n] for n in weights) / sum(weights.values())


@given(
    st.lists(st.floats(500.0, 8000.0), min_size=4, max_size=4),
    st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4),
    st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_no_pair_of_list_and_padding_is_faster_than_the_answer(
    us: list[float], weights: list[float], graphs: int
) -> None:
    """All lists of a sweep of four sizes by brute force, eager being 0.5 ms longer throughout."""
    sizes = (4, 32, 128, 256)
    graph = dict(zip(sizes, sorted(us), strict=True))
    of = dict(zip(sizes, weights, strict=True))
    measured = small_sweep(sizes, graph_us=tuple(graph.values()), eager_us=tuple(v + 500.0 for v in graph.values()))
    asked = Question(gpu_mem="80", workload=traffic(of), engines=("sglang",), max_graphs=graphs)
    (found,) = recommend(measured, asked).engines
    best = min(
        expected_us(chosen, padding, of, graph)
        for count in range(1, graphs + 1)
        for chosen in itertools.combinations(sizes, count)
        for padding in ("always", "exact")
    )
    assert found.decode is not None and found.decode.expected_step_us is not None
    assert found.decode.expected_step_us <= best * 1.02
