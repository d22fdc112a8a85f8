"""How far apart are medians of one step within one process? Windows of replays and of eager forwards, in turn.

    python benchmarks/steadiness.py recipes/llama-3.1-8b.yaml --sizes 1 64 200 256 320 --seconds 5

Takes ``gpu_us`` of a step (events around it, the device idle before) as a sweep takes it, again and again, and prints
how far the medians of windows of 7, 15, 30 and 60 samples are apart (largest over smallest), beside the clock and what
the driver says of it. Samples that something but a power cap disturbed are left out, as in a sweep.
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
from graphtune.worker.nvml import Gpu
from graphtune.worker.runners.series import BatchSeries
from graphtune.worker.timing import Clock, Step

WINDOWS = (7, 15, 30, 60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 64, 200, 256, 320])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each size and execution")
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
        print(f"{cell.model_name} on {torch.cuda.get_device_name()}, context {arguments.context}")
        windows = " | ".join(f"medians of {count} apart" for count in WINDOWS)
        print(f"| requests | execution | samples | median | {windows} | clock, MHz | limited by |")
        print("|---" * (len(WINDOWS) + 6) + "|")
        for size in arguments.sizes:
            vocabulary = engine.model.config.vocab_size
            of = partial(BatchSeries, engine.table, context=arguments.context, vocab_size=vocabulary)
            with closing(of(size=size, seed=size)) as series:
                for name, step in (("replay", runner), ("eager", engine.eager)):
                    print(row(size, name, step, series, clock, gpu, arguments.seconds), flush=True)
        clock.watch.release()


def row(size: int, name: str, step: Step, series: BatchSeries, clock: Clock, gpu: Gpu, seconds: float) -> str:
    """One line of the table."""
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
    return (
        f"| {size} | {name} | {len(us)} | {median} | {apart} | {min(mhz)} to {max(mhz)} | {', '.join(sorted(limits))} |"
    )


def spread(us: Sequence[float], count: int) -> str:
    """The largest over the smallest median of windows of ``count`` samples; a dash for fewer than two windows."""
    medians = [statistics.median(us[at : at + count]) for at in range(0, len(us) - count + 1, count)]
    return f"{max(medians) / min(medians) - 1:.1%} of {len(medians)}" if len(medians) > 1 else "—"


if __name__ == "__main__":
    main()
