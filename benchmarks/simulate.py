"""How long simulating a trace takes, and how that grows.

    python benchmarks/simulate.py [--requests 100000]

Made-up requests (arrivals at random, prompts and outputs with long tails, as public traces have) at three loads: mostly
single requests, batches of some tens, and more than the server can take. The target is 100,000 requests in under 20 s.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from graphtune.tune.simulate import Server, capacity_per_s, simulate
from graphtune.tune.step_times import PrefillRate, StepTimes
from graphtune.tune.workloads.trace import Trace

MOST = 256


def made_up(requests: int) -> Trace:
    rng = np.random.default_rng(7)
    arrivals = np.cumsum(rng.exponential(0.2, requests))
    prompts = np.clip(rng.lognormal(6.5, 1.0, requests), 1, 8000).astype(np.int64)
    generated = np.clip(rng.lognormal(5.0, 0.8, requests), 1, 2000).astype(np.int64)
    return Trace(arrivals - arrivals[0], prompts, generated, "made up")


def times() -> StepTimes:
    """Steps of 5 ms and more, which grow with requests and KV tokens."""
    contexts = tuple(float(256 * at) for at in range(1, 65))
    rows = tuple(tuple(5e-3 + 3e-5 * n + 3e-8 * n * context for context in contexts) for n in range(1, MOST + 1))
    slopes = (0.0, *(3e-8,) * MOST)
    return StepTimes((), (None,) * (MOST + 1), contexts, ((), *rows), (contexts[-1],) * (MOST + 1), slopes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=100_000)
    arguments = parser.parse_args()
    server, rate = Server(MOST, 400_000, 8192, 16), PrefillRate(20_000, 5e-3, "made up")
    print(
        f"{'requests':>9} {'load':>9} {'seconds':>8} {'decode steps':>13} {'mean batch':>11} {'preempted':>10} overload"
    )
    for requests in sorted({arguments.requests // 4, arguments.requests}):
        trace = made_up(requests)
        most = capacity_per_s(trace, server, times(), rate) / (requests / trace.seconds)
        for share in (0.05, 0.5, 0.8, 1.5):
            started = time.perf_counter()
            found = simulate(trace, server, times(), rate, most * share)
            seconds = time.perf_counter() - started
            steps = sum(ran for _, ran, *_ in found.decode)
            batch = sum(size * ran for size, ran, *_ in found.decode) / steps
            print(
                f"{requests:>9,} {share:>9.0%} {seconds:>8.2f} {steps:>13,} {batch:>11.1f} {found.preemptions:>10,} "
                f"{'yes' if found.overload else 'no'}"
            )


if __name__ == "__main__":
    main()
