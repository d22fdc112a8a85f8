"""Is ``gpu_us`` the time of a replay, and how far apart are medians of it within one process?

    python benchmarks/replay_timing.py recipes/qwen3-0.6b.yaml --sizes 1 16 64 256
    python benchmarks/replay_timing.py recipes/llama-3.1-8b.yaml --sizes 1 64 256 320 --windows 2.5

Captures sizes of the recipe's first list on the GPU. Prints, per size, the median of ``gpu_us`` samples (events around
one replay, the device idle before), events around 1,000 replays back to back over 1,000, and the profiler's span from
the first kernel's start to the last one's end.

With ``--windows`` each size is replayed, then run eagerly, for so many seconds, as a sweep samples it. Printed is how
far the medians of windows of 7, 15, 30 and 60 samples are apart (largest over smallest), beside the clock and what the
driver says of it. Samples that something but a power cap disturbed are left out, as in a sweep.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from graphtune.engines.base import DeviceFacts
from graphtune.planner import plan_sweep
from graphtune.recipe import load_recipe
from graphtune.worker.disturbance import HOST
from graphtune.worker.engine import build
from graphtune.worker.launches import trace_step
from graphtune.worker.nvml import Gpu
from graphtune.worker.runners.decode import GraphDecode
from graphtune.worker.runners.series import BatchSeries
from graphtune.worker.timing import Clock, Step

REPLAYS = 1000
SAMPLES = 20
WINDOWS = (7, 15, 30, 60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--windows", type=float, metavar="SECONDS")
    arguments = parser.parse_args()
    gpu = Gpu(0)
    facts = DeviceFacts(gpu.total_bytes >> 20)
    cell = plan_sweep(load_recipe(arguments.recipe), device="cuda", device_facts=facts).cells[0]
    cell = replace(cell, lists=(replace(cell.lists[0], sizes=tuple(arguments.sizes)),))
    torch.cuda.set_stream(torch.cuda.Stream())
    with torch.inference_mode():
        engine = build(cell, torch.device("cuda", 0), lambda stage: None)
        engine.eager.warm_up(cell.lists[0].sizes)
        runner = engine.decode_runner(cell.lists[0])
        list(runner.capture())
        clock = Clock(engine.device, gpu)
        vocabulary = engine.model.config.vocab_size
        batches = partial(BatchSeries, engine.table, context=arguments.context, vocab_size=vocabulary)
        print(f"{cell.model_name} on {torch.cuda.get_device_name()}, context {arguments.context}")
        if arguments.windows is None:
            print(f"{'size':>5} {'gpu_us':>10} {'in a row':>10} {'profiler span':>14} {'gpu_us / row':>13}")
        else:
            apart = " | ".join(f"medians of {count} apart" for count in WINDOWS)
            print(f"| requests | execution | samples | median | {apart} | clock, MHz | limited by |")
            print("|---" * (len(WINDOWS) + 6) + "|")
        for size in arguments.sizes:
            with closing(batches(size=size, seed=size)) as series:
                if arguments.windows is None:
                    print(times(runner, series, clock), flush=True)
                    continue
                for name, step in (("replay", runner), ("eager", engine.eager)):
                    print(windows(name, step, series, clock, gpu, arguments.windows), flush=True)
        clock.watch.release()


def times(runner: GraphDecode, series: BatchSeries, clock: Clock) -> str:
    """One line: the same replay timed three ways, medians in µs."""
    gpu_us = statistics.median(clock.alone(runner, series)["gpu_us"][0] for _ in range(SAMPLES))
    row_us = in_a_row(runner)
    clock.watch.release()  # the profiler's threads would inherit the core
    span = trace_step(runner, series).profile(series.size, series.context, "graph").span_us
    return f"{series.size:>5} {gpu_us:>10.1f} {row_us:>10.1f} {span:>14.1f} {gpu_us / row_us:>13.4f}"


def in_a_row(runner: GraphDecode) -> float:
    """µs per replay of the step that was planned last, over REPLAYS replays between two events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    runner.launch()
    start.record()
    for _ in range(REPLAYS):
        runner.launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / REPLAYS


def windows(name: str, step: Step, series: BatchSeries, clock: Clock, gpu: Gpu, seconds: float) -> str:
    """One line: how far apart medians of a step's samples are."""
    replays = name == "replay"
    us: list[float] = []
    mhz: list[int] = []
    limits: set[str] = set()
    until = time.perf_counter() + seconds
    clock.watch.wait()
    before = clock.watch.now()
    while time.perf_counter() < until:
        one = clock.alone(step, series, delay=replays)["gpu_us"][0]
        after = clock.watch.now()
        # The device time of a replay holds nothing of the host.
        if not {*before, *after} - ({HOST} if replays else set()):
            us.append(one)
        if after:
            clock.watch.wait()
            after = clock.watch.now()
        before = after
        mhz.append(gpu.clock_mhz() or 0)
        limits.update(gpu.throttle_reasons())
    apart = " | ".join(spread(us, count) for count in WINDOWS)
    median = f"{statistics.median(us):.0f} µs" if us else "none undisturbed"
    of_clock = f"{min(mhz)} to {max(mhz)} | {', '.join(sorted(limits))}"
    return f"| {series.size} | {name} | {len(us)} | {median} | {apart} | {of_clock} |"


def spread(us: Sequence[float], count: int) -> str:
    """The largest over the smallest median of windows of ``count`` samples; a dash for fewer than two windows."""
    medians = [statistics.median(us[at : at + count]) for at in range(0, len(us) - count + 1, count)]
    return f"{max(medians) / min(medians) - 1:.1%} of {len(medians)}" if len(medians) > 1 else "—"


if __name__ == "__main__":
    main()
