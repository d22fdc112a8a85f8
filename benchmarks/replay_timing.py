"""Is ``gpu_us`` the time of a replay? Compares it with events around many replays in a row and with the profiler.

    python benchmarks/replay_timing.py recipes/qwen3-0.6b.yaml --sizes 1 16 64 256

Captures the recipe's first list on the GPU and prints, per size, the median of ``gpu_us`` samples (events around one
replay, the device idle before), events around 1,000 replays back to back over 1,000, and the profiler's span from the
first kernel's start to the last one's end.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import torch

from graphtune.engines.base import DeviceFacts
from graphtune.planner import plan_sweep
from graphtune.recipe import load_recipe
from graphtune.worker.engine import build
from graphtune.worker.launches import trace_step
from graphtune.worker.nvml import Gpu
from graphtune.worker.runners.decode import GraphDecode
from graphtune.worker.runners.series import BatchSeries
from graphtune.worker.timing import Clock

REPLAYS = 1000
SAMPLES = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
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
        clock = Clock(engine.device)
        print(f"{cell.model_name} on {torch.cuda.get_device_name()}, context {arguments.context}, medians in µs")
        print(f"{'size':>5} {'gpu_us':>10} {'in a row':>10} {'profiler span':>14} {'gpu_us / row':>13}")
        for size in arguments.sizes:
            vocab = engine.model.config.vocab_size
            series = BatchSeries(engine.table, size=size, context=arguments.context, vocab_size=vocab, seed=size)
            gpu_us = statistics.median(clock.alone(runner, series)["gpu_us"][0] for _ in range(SAMPLES))
            row_us = in_a_row(runner)
            clock.watch.release()  # the profiler's threads would inherit the core
            span = trace_step(runner, series).profile(size, arguments.context, "graph").span_us
            print(f"{size:>5} {gpu_us:>10.1f} {row_us:>10.1f} {span:>14.1f} {gpu_us / row_us:>13.4f}")
            series.close()


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


if __name__ == "__main__":
    main()
