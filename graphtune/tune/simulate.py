"""A request trace on a simulated server: continuous batching, event by event.

The schedule is that of a server that prefills first. Requests wait in order of arrival. A waiting request is admitted
when fewer than ``max_running_requests`` are in the batch and the KV cache has room for its prompt; a prefill step takes
up to ``chunk_size`` tokens of admitted prompts, in order, and the end of a prompt is its first token. While there is
nothing to prefill, decode steps give every running request a token. When the cache has no room for another token of
each, the request admitted last loses its KV, goes back to the head of the queue and is prefilled again with what it had
generated. Steps do not overlap; what arrives during a step waits for its end.

Steps between two events (an arrival that could be admitted, a request's end, a full cache) are alike but for the
growing context. They are taken together, at most ``LONGEST_RUN`` at a time, each as long as the one in their middle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil

import numpy as np

from graphtune.errors import InputError
from graphtune.tune.simulation import Simulation, summary_of
from graphtune.tune.step_times import PrefillTimes, StepTimes
from graphtune.tune.workloads.trace import Trace

LONGEST_RUN = 64


@dataclass(frozen=True)
class Server:
    """Limits of a server. A request takes up to ``page_size - 1`` KV tokens more than it holds."""

    max_running_requests: int
    kv_tokens: int
    chunk_size: int
    page_size: int = 1

    def check(self, times: StepTimes) -> None:
        """Raises InputError for limits that make no sense, or that the step times do not reach."""
        for name, value in vars(self).items():
            if value < 1:
                raise InputError(f"{name.replace('_', ' ')} of {value} makes no sense", action="Give at least 1.")
        if self.max_running_requests > times.most_requests:
            raise InputError(f"{self.max_running_requests} running requests, step times for {times.most_requests}")


@dataclass
class Counts:
    """What happened. Steps and context sums by batch size, prefill steps by tokens, gaps between tokens with how many
    tokens they came before."""

    decode_steps: list[int]
    decode_kv_tokens: list[float]
    decode_s: list[float]
    prefill_steps: dict[int, int] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)
    gap_counts: list[int] = field(default_factory=list)
    extrapolated_steps: int = 0
    preemptions: int = 0
    most_kv_tokens: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    waiting_at_last_arrival: int = 0

    def gap(self, seconds: float, count: int) -> None:
        if count:
            self.gaps_s.append(seconds)
            self.gap_counts.append(count)


Watch = Callable[[str, int, float], None]


def simulate(
    trace: Trace,
    server: Server,
    times: StepTimes,
    prefill: PrefillTimes,
    load: float = 1.0,
    watch: Watch | None = None,
) -> Simulation:
    """Run a trace with its arrivals ``load`` times as dense (infinity: all at once).

    Requests that the KV cache can never hold are refused and counted. ``watch`` is told of each ``admitted``,
    ``first_token``, ``preempted`` and ``finished`` request with its index and the time. Raises InputError for a load
    that is not above 0.
    """
    if not load > 0:
        raise InputError(f"a load of {load} makes no sense", where="--load", action="Give a factor above 0.")
    server.check(times)
    run = _Run(trace, server, times, prefill, trace.arrivals_s / load, watch)
    run.to_the_end()
    return summary_of(run, load)


def capacity_per_s(trace: Trace, server: Server, times: StepTimes, prefill: PrefillTimes) -> float:
    """Requests per second that the server finishes when all of the trace is there at once."""
    return simulate(trace, server, times, prefill, float("inf")).requests_per_s


class _Run:
    """One simulation in work. Times are in seconds from the first arrival; steps count decode steps alone."""

    def __init__(
        self,
        trace: Trace,
        server: Server,
        times: StepTimes,
        prefill: PrefillTimes,
        arrivals: np.ndarray,
        watch: Watch | None,
    ) -> None:
        self.trace, self.server, self.times, self.prefill = trace, server, times, prefill
        count, entries = len(trace), times.most_requests + 1
        self.arrivals: list[float] = arrivals.tolist()
        self.prompts: list[int] = trace.prompt_tokens.tolist()
        self.wanted: list[int] = trace.generated_tokens.tolist()
        self.generated = [0] * count
        self.admitted_s: list[float | None] = [None] * count
        self.first_token_s: list[float | None] = [None] * count
        self.finished_s: list[float | None] = [None] * count
        self.refused: list[int] = []
        self.counts = Counts([0] * entries, [0.0] * entries, [0.0] * entries)
        self.now = 0.0
        self._watch = watch
        self._next = 0
        self._queue: deque[int] = deque()
        self._partial: tuple[int, int] | None = None  # a request in prefill and its tokens left
        self._steps = 0
        self._ends: list[tuple[int, int]] = []  # (decode step after which it is done, request), some of them stale
        self._end_of: dict[int, int] = {}  # running requests and their decode step of the end, in order of admission
        self._kv = 0  # tokens held by running requests and by the one in prefill
        self._held = 0  # requests that hold KV
        self._last_token_s = 0.0  # of running requests that have had a decode step
        self._fresh: list[float] = []  # times of the last token of those that have not
        self._lost_s: dict[int, float] = {}  # time of the last token of preempted requests

    def to_the_end(self) -> None:
        while True:
            self._arrive()
            if self._partial is not None or self._admits():
                self._prefill_step()
            elif self._end_of:
                self._decode_steps()
            elif self._next < len(self.arrivals):
                self.now = max(self.now, self.arrivals[self._next])
            else:
                return

    def _tell(self, what: str, request: int) -> None:
        if self._watch is not None:
            self._watch(what, request, self.now)

    def _arrive(self) -> None:
        slack, last = self.server.page_size - 1, len(self.arrivals) - 1
        while self._next <= last and self.arrivals[self._next] <= self.now:
            request = self._next
            if self.prompts[request] + self.wanted[request] + slack > self.server.kv_tokens:
                self.refused.append(request)
            else:
                self._queue.append(request)
            if request == last:
                self.counts.waiting_at_last_arrival = len(self._queue)
            self._next += 1

    def _used(self, further_tokens: int = 0, further_requests: int = 0) -> int:
        return self._kv + further_tokens + (self._held + further_requests) * (self.server.page_size - 1)

    def _admits(self) -> bool:
        """True when the head of the queue fits beside one more token of each running request."""
        if not self._queue or self._held >= self.server.max_running_requests:
            return False
        head = self._queue[0]
        tokens = self.prompts[head] + self.generated[head]
        return self._used(tokens + len(self._end_of) + 1, 1) <= self.server.kv_tokens or not self._held

    def _prefill_step(self) -> None:
        left, done = self.server.chunk_size, []
        while left:
            if self._partial is None:
                if not self._admits():
                    break
                self._admit()
            assert self._partial is not None
            request, tokens = self._partial
            taken = min(left, tokens)
            left -= taken
            if taken == tokens:
                done.append(request)
                self._partial = None
            else:
                self._partial = (request, tokens - taken)
        tokens = self.server.chunk_size - left
        self.now += self.prefill.seconds(tokens)
        self.counts.prefill_steps[tokens] = self.counts.prefill_steps.get(tokens, 0) + 1
        self.counts.prefill_tokens += tokens
        for request in done:
            self._first_token(request)

    def _admit(self) -> None:
        request = self._queue.popleft()
        if self.admitted_s[request] is None:
            self.admitted_s[request] = self.now
        tokens = self.prompts[request] + self.generated[request]
        self._kv += tokens
        self._held += 1
        self.counts.most_kv_tokens = max(self.counts.most_kv_tokens, self._used())
        self._partial = (request, tokens)
        self._tell("admitted", request)

    def _first_token(self, request: int) -> None:
        """The end of a prompt gives a token: the request's first, or its next after a preemption."""
        self.generated[request] += 1
        self.counts.generated_tokens += 1
        if self.first_token_s[request] is None:
            self.first_token_s[request] = self.now
            self._tell("first_token", request)
        else:
            self.counts.gap(self.now - self._lost_s.pop(request), 1)
        if self.generated[request] == self.wanted[request]:
            self._kv -= self.prompts[request] + self.generated[request] - 1
            self._finish(request)
            return
        end = self._steps + self.wanted[request] - self.generated[request]
        self._end_of[request] = end
        heappush(self._ends, (end, request))
        self._fresh.append(self.now)

    def _finish(self, request: int) -> None:
        self._held -= 1
        self.finished_s[request] = self.now
        self._tell("finished", request)

    def _decode_steps(self) -> None:
        """A run of steps of one batch; the token of a step takes its KV in that step."""
        requests = len(self._end_of)
        room = (self.server.kv_tokens - self._used()) // requests
        if room < 1:
            self._preempt()
            return
        while self._end_of.get(self._ends[0][1]) != self._ends[0][0]:
            heappop(self._ends)
        steps = min(self._ends[0][0] - self._steps, room, LONGEST_RUN)
        each = self.times.seconds(requests, self._kv / requests + (steps + 1) / 2)
        if self._next < len(self.arrivals) and not self._queue:
            until = ceil((self.arrivals[self._next] - self.now) / each)
            if until < steps:
                steps = max(1, until)
                each = self.times.seconds(requests, self._kv / requests + (steps + 1) / 2)
        self._count(requests, steps, each)
        self.now += steps * each
        self._last_token_s = self.now
        self._steps += steps
        self._kv += steps * requests
        self.counts.most_kv_tokens = max(self.counts.most_kv_tokens, self._used())
        while self._ends and self._ends[0][0] <= self._steps:
            end, request = heappop(self._ends)
            if self._end_of.get(request) == end:
                del self._end_of[request]
                self.generated[request] = self.wanted[request]
                self._kv -= self.prompts[request] + self.wanted[request] - 1
                self._finish(request)

    def _count(self, requests: int, steps: int, each: float) -> None:
        counts, context = self.counts, self._kv / requests + (steps + 1) / 2
        counts.decode_steps[requests] += steps
        counts.decode_kv_tokens[requests] += steps * context
        counts.decode_s[requests] += steps * each
        counts.generated_tokens += steps * requests
        if self.times.is_extrapolated(requests, context):
            counts.extrapolated_steps += steps
        first_end = self.now + each
        for since in self._fresh:
            counts.gap(first_end - since, 1)
        counts.gap(first_end - self._last_token_s, requests - len(self._fresh))
        counts.gap(each, requests * (steps - 1))
        self._fresh.clear()

    def _preempt(self) -> None:
        """Take the KV of the request admitted last; what it generated is prefilled again."""
        request, end = self._end_of.popitem()
        had = self.wanted[request] - (end - self._steps)
        fresh = bool(self._fresh) and had == self.generated[request]
        self._lost_s[request] = self._fresh.pop() if fresh else self._last_token_s
        self.generated[request] = had
        self._kv -= self.prompts[request] + had - 1
        self._held -= 1
        self._queue.appendleft(request)
        self.counts.preemptions += 1
        self._tell("preempted", request)
