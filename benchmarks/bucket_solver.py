"""How long the exact solver takes, and how that grows.

    python benchmarks/bucket_solver.py [--graphs 128] [--most 2048]

Solves made-up traffic over 256 to ``--most`` sizes, once with graph times that never fall (divide and conquer) and once
with noise in them (all pairs), draws the front, and prints the exponent between neighbouring rows: 1 is linear in the
number of sizes. Then the same for lists within a budget of graph memory. The target is 2,048 sizes and 128 graphs in
under 2 s on two cores.
"""

from __future__ import annotations

import argparse
import math
import time

import numpy as np

from graphtune.tune.bucket_solver import StepCosts, front, solve, solve_within, step_costs

REPEATS = 3


def made_up(sizes: int, noise_us: float) -> StepCosts:
    """Traffic with a long tail, steps that take longer with every request, eager steps a constant longer."""
    rng = np.random.default_rng(7)
    every = np.arange(1, sizes + 1)
    graph = 1000 + 40 * np.sqrt(every) + 2.0 * every + noise_us * rng.random(sizes)
    return step_costs(every, np.exp(-every / (sizes / 4)), every, graph, 5000 + 2.0 * every)


def seconds_of_front(sizes: int, graphs: int, noise_us: float) -> tuple[float, int]:
    best_s, points = math.inf, 0
    for _ in range(REPEATS):
        costs = made_up(sizes, noise_us)
        started = time.perf_counter()
        best = solve(costs, graphs)
        count, top = np.indices(best.expected_us.shape)
        points = len(front(best, (60 << 20) + count * 2e6 + top * 5e4, 0.3 + 0.03 * count))
        best_s = min(best_s, time.perf_counter() - started)
    return best_s, points


def seconds_of_budget(sizes: int, units: int, graphs: int) -> float:
    costs = made_up(sizes, 0.0)
    taken = 1 + np.arange(sizes) // 64
    started = time.perf_counter()
    solve_within(costs, taken, units, graphs)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--graphs", type=int, default=128, help="most graphs")
    parser.add_argument("--most", type=int, default=2048, help="most sizes")
    arguments = parser.parse_args()
    counts = [count for count in (256, 512, 1024, 2048, 4096) if count <= arguments.most]
    print(f"every list of up to {arguments.graphs} graphs and the front (best of {REPEATS})")
    print(f"{'graph times':<12} {'sizes':>6} {'seconds':>8} {'growth':>7} {'front':>7}")
    for name, noise_us in (("never fall", 0.0), ("noisy", 50.0)):
        before: tuple[int, float] | None = None
        for count in counts:
            seconds, points = seconds_of_front(count, arguments.graphs, noise_us)
            growth = "" if before is None else f"{math.log(seconds / before[1]) / math.log(count / before[0]):.2f}"
            print(f"{name:<12} {count:>6} {seconds:>8.3f} {growth:>7} {points:>7,}")
            before = (count, seconds)
    print("\nlists within a budget of 2 MiB units, at most 52 graphs")
    print(f"{'sizes':>6} {'units':>6} {'seconds':>8}")
    for count, units in ((52, 256), (52, 512), (128, 512), (256, 512)):
        print(f"{count:>6} {units:>6} {seconds_of_budget(count, units, 52):>8.3f}")


if __name__ == "__main__":
    main()
