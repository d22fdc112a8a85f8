"""A request trace as traffic of one engine: played on a simulated server under a list, with the KV cache it leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphtune.engines.base import Engine, Padding, Role
from graphtune.errors import InputError
from graphtune.stats import LEAST_TOLERANCE
from graphtune.tune.candidates import Candidate
from graphtune.tune.current_launch import Current
from graphtune.tune.engine_answer import answer_for, nothing_fits
from graphtune.tune.limits import Budgets, too_little
from graphtune.tune.measurements import Measurements
from graphtune.tune.objective import Judge, Served
from graphtune.tune.prefill_model import prefill_steps
from graphtune.tune.recommendation import EngineAnswer, Limits, ListAnswer, Simulated
from graphtune.tune.simulate import Server
from graphtune.tune.simulated_server import SimulatedServer
from graphtune.tune.simulation import Simulation
from graphtune.tune.solved_candidates import checked_sizes
from graphtune.tune.step_times import PrefillTimes, stated_prefill, step_times
from graphtune.tune.workload import Workload
from graphtune.tune.workloads.deployment import deployed
from graphtune.tune.workloads.trace import Trace

# A list decides how long steps take, they decide which batches form, and those decide the list: so often at most.
MOST_ROUNDS = 4
# Lists that are played for an objective other than the mean step.
MOST_JUDGED = 8


@dataclass(frozen=True)
class TraceTraffic:
    """A trace with what decides how it meets a server.

    ``load`` is as written: ``4``, or ``80%`` of what the server can take with a graph at every measured size.
    ``prefill`` is what a user states; null takes the sweep's own times, under the recommended list. The trace is that
    of one of ``dp`` ranks, which pad to the largest of them; a ``role`` keeps the steps of one phase.
    """

    trace: Trace
    load: str
    prefill: PrefillTimes | None
    chunk_size: int
    max_running_requests: int
    page_size: int
    dp: int = 1
    role: Role | None = None


@dataclass(frozen=True)
class Playback:
    """A trace on the servers of one engine. ``load`` is how many times as dense as recorded it arrives, ``padding``
    that of a list which is not said to have another; None for the engine's."""

    engine: Engine
    traffic: TraceTraffic
    of: Measurements
    prefill: PrefillTimes
    load: float = 1.0
    padding: Padding | None = None

    def server(self, sizes: Sequence[int], kv_tokens: int, padding: Padding | None = None) -> SimulatedServer:
        """Raises InputError for sizes without step times."""
        traffic = self.traffic
        most = traffic.max_running_requests
        times = step_times(self.of.model, sizes, most, padding or self.padding or self.engine.dispatch.decode)
        limits = Server(most, max(kv_tokens, 1), traffic.chunk_size, traffic.page_size)
        return SimulatedServer(limits, times, self.prefill, "")

    def run(self, sizes: Sequence[int], kv_tokens: int, padding: Padding | None = None) -> Simulation:
        return self.server(sizes, kv_tokens, padding).run(self.traffic.trace, self.load)

    def judge(self, limits: Limits) -> Judge:
        """Tells tokens per second (all of the trace there at once) and gaps between tokens (at the load) by playing."""

        def serves(one: Candidate, kv_tokens: int | None) -> Served:
            server = self.server(one.sizes, kv_tokens or 1)
            rate = gaps_us = None
            if limits.objective == "throughput":
                rate = server.run(self.traffic.trace, math.inf).tokens_per_s
            if limits.objective == "p99-itl" or limits.slo_inter_token_us is not None:
                gaps = server.run(self.traffic.trace, self.load).inter_token
                gaps_us = gaps.p99_s * 1e6 if gaps is not None else None
            return Served(rate, gaps_us)

        return Judge(serves, MOST_JUDGED)

    def simulated(self, of: ListAnswer, padding: Padding | None = None) -> ListAnswer:
        """The list with what the trace comes to under it, or with the reason why that is not known."""
        if of.kv_tokens is None:
            return of.without("simulated", "its KV tokens are not known")
        try:
            found = self.run(of.capture_sizes, of.kv_tokens, padding)
        except InputError as error:
            return of.without("simulated", error.message)
        return replace(of, simulated=Simulated.of(found))


def answer_for_trace(
    engine: Engine, traffic: TraceTraffic, limits: Limits, of: Measurements, current: Current | None = None
) -> tuple[EngineAnswer, tuple[Candidate, ...]]:
    """As ``answer_for``, on the batches that the trace makes under the recommended list itself.

    The first batches are those under a graph at every checked size with all that leaves for KV. Raises InputError where
    there is no KV budget to simulate with.
    """
    bare = Budgets(engine, limits, of, 1)(None)
    if bare is None:
        raise InputError(
            f"a trace needs to know how many tokens the KV cache holds: {of.why_no_budget}", where="--workload"
        )
    if not bare.fits:
        return nothing_fits(engine, too_little(bare, limits), bare), ()
    sizes, kv_tokens = checked_sizes(of.memory, traffic.max_running_requests), bare.kv_tokens
    playback = Playback(engine, traffic, of, prefill_times(engine, traffic, of, None))
    playback = replace(playback, load=playback.server(sizes, kv_tokens).load_of(traffic.load, traffic.trace))
    seen: list[tuple[tuple[int, ...], PrefillTimes]] = []
    while True:
        found = playback.run(sizes, kv_tokens)
        workload = deployed(found.workload(), traffic.dp, traffic.role)
        if not workload.decode and traffic.role != "prefill":
            raise InputError("no request of the trace generates more than one token", where="--workload")
        answer, candidates = answer_for(engine, workload, limits, of, judge=playback.judge(limits), current=current)
        answer = replace(answer, load=playback.load, overload=found.overload)
        if answer.decode is None or answer.memory is None:
            return answer, candidates
        times = prefill_times(engine, traffic, of, answer.prefill)
        settled = answer.decode.capture_sizes == sizes and times == playback.prefill
        seen.append((sizes, playback.prefill))
        sizes, kv_tokens = answer.decode.capture_sizes, answer.memory.kv_tokens
        playback = replace(playback, prefill=times, padding=answer.dispatch.decode)
        if settled or len(seen) == MOST_ROUNDS or (sizes, times) in seen:
            return _with_simulations(replace(answer, settled=settled), playback, limits), candidates


def prefill_times(engine: Engine, traffic: TraceTraffic, of: Measurements, chosen: ListAnswer | None) -> PrefillTimes:
    """As stated, else those of the sweep under the chosen list; without one, eager. Raises InputError for neither."""
    if traffic.prefill is not None:
        return traffic.prefill
    backend = chosen.backend if chosen is not None and chosen.capture_sizes else None
    found = prefill_steps(of.prefill, engine.dispatch, backend, chosen.capture_sizes if chosen is not None else ())
    return found if found is not None else stated_prefill(None, of.model)


def not_simulated(traffic: Workload | TraceTraffic) -> Workload:
    """What stands for traffic where no engine has room to serve it: a trace without its steps."""
    if isinstance(traffic, Workload):
        return traffic
    source = f"{traffic.trace.source}, not simulated"
    return Workload((), (), traffic.max_running_requests, traffic.chunk_size, source, "per_step")


def best_limit(answer: EngineAnswer, playback: Playback, limits: Limits) -> tuple[int, float] | None:
    """The most running requests that give the most tokens per second with all of the trace there at once, and that
    rate; of limits within 1 %, the smallest. With a limit on gaps between tokens, those that keep it at the load.

    Only the captured sizes are tried, since a limit between two pads to the larger. None where no limit keeps it.
    """
    assert answer.decode is not None and answer.decode.kv_tokens is not None
    most, sizes = playback.traffic.max_running_requests, answer.decode.capture_sizes
    found = []
    for limit in sorted({*(size for size in sizes if size < most), most}, reverse=True)[:MOST_JUDGED]:
        played = replace(playback, traffic=replace(playback.traffic, max_running_requests=limit))
        server = played.server(sizes, answer.decode.kv_tokens)
        if limits.slo_inter_token_us is not None:
            gaps = server.run(playback.traffic.trace, playback.load).inter_token
            if gaps is None or gaps.p99_s * 1e6 > limits.slo_inter_token_us:
                continue
        found.append((limit, server.run(playback.traffic.trace, math.inf).tokens_per_s))
    if not found:
        return None
    best = max(rate for _, rate in found)
    return min(pair for pair in found if pair[1] >= best * (1 - LEAST_TOLERANCE))


def _with_simulations(answer: EngineAnswer, playback: Playback, limits: Limits) -> EngineAnswer:
    dispatch, current = answer.dispatch, answer.current
    assert answer.decode is not None
    joint = answer.joint
    if joint is not None and (best := best_limit(answer, playback, limits)) is not None:
        joint = replace(joint, max_running_requests=best[0], tokens_per_s=best[1])
    return replace(
        answer,
        joint=joint,
        decode=playback.simulated(answer.decode),
        default=answer.default and playback.simulated(answer.default, dispatch.decode_by_default),
        eager=answer.eager and playback.simulated(answer.eager),
        runner_up=answer.runner_up and playback.simulated(answer.runner_up),
        current=current and replace(current, list=playback.simulated(current.list, current.padding)),
    )
