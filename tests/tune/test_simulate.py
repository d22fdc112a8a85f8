"""The simulated server: what must hold whatever the trace, and cases that can be worked out by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtune.errors import InputError
from graphtune.tune import simulate as module
from graphtune.tune.latency_model import LatencyModel, latency_model
from graphtune.tune.simulate import Server, capacity_per_s, simulate
from graphtune.tune.simulation import tail_of
from graphtune.tune.step_times import PrefillRate, StepTimes, step_times
from graphtune.tune.workloads.trace import Trace, read_trace
from tests.synthetic import cell_result, latency_points, point

RATE = PrefillRate(1000.0, 0.01, "a test")


def flat(seconds: float = 0.1, most: int = 64, sizes: tuple[int, ...] = ()) -> StepTimes:
    """Steps that always take as long."""
    return StepTimes(sizes, (None,) * (most + 1), (1.0,), ((), *((seconds,),) * most), (1e9,) * (most + 1), (0.0,) * 99)


def trace_of(*requests: tuple[float, int, int]) -> Trace:
    arrivals, prompts, generated = zip(*requests, strict=True)
    return Trace(np.array(arrivals, dtype=float), np.array(prompts), np.array(generated), "made up")


requests_ = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 300), st.integers(1, 60)), min_size=1, max_size=40).map(
    lambda some: trace_of(*((at - min(some)[0], p, g) for at, p, g in sorted(some)))
)
servers = st.builds(
    Server,
    max_running_requests=st.integers(1, 12),
    kv_tokens=st.integers(40, 900),
    chunk_size=st.integers(1, 400),
    page_size=st.sampled_from([1, 16]),
)


class Books:
    """Keeps its own account of what it is told."""

    def __init__(self, trace: Trace, server: Server) -> None:
        self.trace, self.server = trace, server
        self.told: Counter[tuple[str, int]] = Counter()
        self.holding: set[int] = set()
        self.last = 0.0

    def __call__(self, what: str, request: int, now: float) -> None:
        assert now >= self.last and now >= self.trace.arrivals_s[request]
        self.last = now
        self.told[what, request] += 1
        if what == "admitted":
            assert request not in self.holding
            self.holding.add(request)
        elif what in ("preempted", "finished"):
            self.holding.remove(request)
        if what == "finished":
            assert self.told["first_token", request] == 1
        assert len(self.holding) <= self.server.max_running_requests
        prompts = int(sum(self.trace.prompt_tokens[held] for held in self.holding))
        assert prompts + len(self.holding) * (self.server.page_size - 1) <= self.server.kv_tokens


@settings(deadline=None)
@given(requests_, servers, st.sampled_from([0.2, 1.0, 7.0, float("inf")]))
def test_nothing_is_lost_and_the_cache_never_overflows(trace: Trace, server: Server, load: float) -> None:
    books = Books(trace, server)
    scaled = Trace(trace.arrivals_s / load, trace.prompt_tokens, trace.generated_tokens, "made up")
    books.trace = scaled
    found = simulate(trace, server, flat(), RATE, load, books)
    times = Counter(books.told[("finished", at)] for at in range(len(trace)))
    assert set(times) <= {0, 1} and times[1] == found.finished and times[0] == found.refused
    whole = np.array([books.told[("finished", at)] for at in range(len(trace))], dtype=bool)
    assert found.generated_tokens == trace.generated_tokens[whole].sum()
    assert found.prompt_tokens == trace.prompt_tokens[whole].sum()
    assert found.prefill_tokens >= found.prompt_tokens
    assert (found.prefill_tokens == found.prompt_tokens) == (found.preemptions == 0)
    assert found.most_kv_tokens <= server.kv_tokens
    need = trace.prompt_tokens + trace.generated_tokens + server.page_size - 1
    assert found.refused == int((need > server.kv_tokens).sum())
    assert all(size <= server.max_running_requests for size, *_ in found.decode)
    assert all(tokens <= server.chunk_size for tokens, _ in found.prefill)
    assert sum(tokens * steps for tokens, steps in found.prefill) == found.prefill_tokens
    decoded = sum(size * steps for size, steps, *_ in found.decode)
    assert decoded == found.generated_tokens - found.finished - found.preemptions
    gaps = found.inter_token.count if found.inter_token else 0
    assert gaps == found.generated_tokens - found.finished, "every token but the first has a gap before it"


@settings(deadline=None, max_examples=50)
@given(requests_, servers)
def test_runs_of_steps_are_as_good_as_single_steps(trace: Trace, server: Server) -> None:
    together = simulate(trace, server, flat(0.0625), RATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LONGEST_RUN", 1)
        single = simulate(trace, server, flat(0.0625), RATE)
    assert together.prefill == single.prefill
    assert np.array(together.decode) == pytest.approx(np.array(single.decode))
    assert together.seconds == pytest.approx(single.seconds)
    for one, other in ((together.ttft, single.ttft), (together.inter_token, single.inter_token)):
        assert (one is None) == (other is None)
        if one and other:
            assert (one.count, one.mean_s, one.p99_s) == pytest.approx((other.count, other.mean_s, other.p99_s))


def test_two_requests_by_hand() -> None:
    # The first prefills 0.2 s and decodes; the second arrives in its second step and prefills 0.1 s after that.
    found = simulate(trace_of((0.0, 200, 4), (0.35, 100, 2)), Server(8, 1000, 512), flat(0.1), RATE)
    assert found.seconds == pytest.approx(0.2 + 2 * 0.1 + 0.1 + 0.1)
    assert [(size, steps) for size, steps, *_ in found.decode] == [(1, 2), (2, 1)]
    assert found.decode[0][2] == pytest.approx(201.5), "mean context of its two steps: 201 and 202 tokens"
    assert found.prefill == ((100, 1), (200, 1))
    assert found.ttft is not None and found.inter_token is not None
    assert found.ttft.mean_s == pytest.approx((0.2 + 0.15) / 2)
    assert found.inter_token.count == 4
    assert found.inter_token.max_s == pytest.approx(0.2), "the running request waits for the prefill"
    assert found.inter_token.mean_s == pytest.approx((0.1 + 0.1 + 0.2 + 0.1) / 4)
    work = found.workload()
    assert [(share.requests, share.weight) for share in work.decode] == [(1, 2.0), (2, 1.0)]
    assert work.weighting == "per_step" and work.source == "made up simulated at load 1"


def test_chunks_of_a_prompt_and_a_full_batch() -> None:
    found = simulate(trace_of((0, 250, 1), (0, 50, 1)), Server(1, 1000, 100), flat(), RATE)
    assert found.prefill == ((50, 2), (100, 2)), "the second waits for the first to leave"
    assert found.decode == () and found.inter_token is None and found.expected_step_us is None
    assert set(found.absent) == {"inter_token", "expected_step_us", "coverage", "padding_waste"}


def test_a_full_cache_takes_back_the_last_request() -> None:
    found = simulate(trace_of((0, 10, 20), (0, 10, 20)), Server(8, 40, 100), flat(), RATE)
    assert found.preemptions == 1 and found.finished == 2
    assert found.most_kv_tokens == 40


def test_overload_is_said_and_not_averaged() -> None:
    rng = np.random.default_rng(3)
    trace = trace_of(*((at * 0.1, 50, int(rng.integers(5, 15))) for at in range(400)))
    server = Server(4, 10_000, 512)
    most = capacity_per_s(trace, server, flat(0.05), RATE) / 10
    calm, crowded = (simulate(trace, server, flat(0.05), RATE, most * share) for share in (0.7, 1.5))
    assert calm.overload is None and calm.ttft is not None and calm.ttft.mean_s < 2
    assert crowded.overload is not None and "at the last arrival" in crowded.overload
    assert crowded.ttft is None and "falls behind" in crowded.absent["ttft"]
    assert crowded.workload().source.endswith("overloaded")
    assert crowded.as_dict()["missing"]["ttft"] == crowded.absent["ttft"]


def test_senseless_servers_and_loads_are_refused() -> None:
    trace = trace_of((0, 1, 1))
    for server, load in (
        (Server(0, 10, 10), 1.0),
        (Server(65, 10, 10), 1.0),
        (Server(1, 10, 10), 0.0),
        (Server(1, 10, 10), float("nan")),
    ):
        with pytest.raises(InputError):
            simulate(trace, server, flat(), RATE, load)


def test_percentiles_are_those_of_the_repeated_values() -> None:
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1.0, 97.0, 2.0])
    found = tail_of(values, weights)
    assert found is not None
    assert (found.count, found.p50_s, found.p90_s, found.p99_s, found.max_s) == (100, 1.0, 1.0, 2.0, 3.0)
    assert found.mean_s == pytest.approx(1.04)


# Step times


def model() -> LatencyModel:
    sizes = (1, 2, 4, 8, 16)
    return latency_model(
        [cell_result([], latency_points(sizes, 1024) + latency_points(sizes[:4], 2048) + latency_points((1,), 512))]
    )


def test_step_times_are_those_of_the_latency_model() -> None:
    of = model()
    found = step_times(of, (4, 8), 16)
    assert found.buckets == (None, 4, 4, 4, 4, 8, 8, 8, 8, *(None,) * 8)
    for requests, context in ((3, 1024), (4, 2048), (8, 1024), (16, 1024)):
        bucket = found.buckets[requests]
        figure = of.eager(requests, context) if bucket is None else of.replay(requests, bucket, context)
        assert figure is not None
        assert found.seconds(requests, context) == pytest.approx(figure.us * 1e-6)
        assert not found.is_extrapolated(requests, context)
    assert found.seconds(8, 1536) == pytest.approx((found.seconds(8, 1024) + found.seconds(8, 2048)) / 2, rel=1e-3)


def test_beyond_the_measured_contexts_each_kv_token_counts() -> None:
    found = step_times(model(), (4, 8), 16)
    slope = (found.seconds(8, 2048) - found.seconds(8, 1024)) / (8 * 1024)
    assert found.seconds(8, 3048) == pytest.approx(found.seconds(8, 2048) + slope * 8 * 1000)
    assert found.is_extrapolated(8, 2049)
    assert found.seconds(8, 1) == found.seconds(8, 512)
    larger = step_times(model(), (16,), 16)
    assert larger.is_extrapolated(16, 1025) and not larger.is_extrapolated(16, 1024)
    assert larger.seconds(16, 2048) == pytest.approx(larger.seconds(16, 1024) + slope * 16 * 1024)


def test_batches_that_were_not_measured_are_refused() -> None:
    with pytest.raises(InputError, match="no step time for 17 requests eager"):
        step_times(model(), (4, 8), 17)
    with pytest.raises(InputError, match="in a graph of 64"):
        step_times(model(), (64,), 1)


def test_a_single_context_adds_nothing_for_kv() -> None:
    only = latency_model([cell_result([], [point(1, 1024, "graph", 100.0), point(1, 1024, "eager", 300.0)])])
    found = step_times(only, (1,), 1)
    assert found.seconds(1, 10) == found.seconds(1, 5000) == pytest.approx(1e-4)
    assert found.is_extrapolated(1, 5000)


@pytest.mark.field_data
@pytest.mark.parametrize("name", ["code", "conv"])
def test_public_traces_run_to_their_end(field_data: Path, name: str) -> None:
    trace = read_trace(str(field_data / "traces" / f"azure-llm-2023-{name}.csv"))
    found = simulate(trace, Server(64, 400_000, 8192, 16), flat(0.02), PrefillRate(40_000, 0.02, "a test"), 2.0)
    assert (found.finished, found.refused) == (len(trace), 0)
    assert found.generated_tokens == trace.generated_tokens.sum()
