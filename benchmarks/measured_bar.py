"""Recommended and default lists replayed on real batches: predicted against measured mean step.

    python benchmarks/measured_bar.py --prepare CASES.json --trace conv.csv SWEEP... [--load 1 --load 80%]
    python benchmarks/measured_bar.py --predict CASES.json SWEEP...
    python benchmarks/measured_bar.py --run CASES.json [--device auto]

Preparing needs no GPU: for each sweep and load it plays the trace, takes the recommended list and the fastest of the
engines' default lists, draws 2,000 decode steps from the batches that the trace makes (250 draws of eight steps in a
row, after one that is not timed), and predicts their mean step. ``--predict`` predicts the same steps from other sweeps
of the same models: the host's part of a step is that of a machine, so the sweep should be of the machine that replays.

Running starts a fresh process for each case, which loads the model, captures the sizes of both lists and times exactly
these steps, padded as each list pads them, above its top eagerly. Both lists take their turn at every draw: what moves
the host moves both. One step of each draw is timed with the device alone. What was measured, those times draw by draw
among it, is written beside the cases (``CASES.measured.json``). The bars: predicted within 2 % of measured,
recommended at most 1 % slower than the default. Exit status 1 when a bar is missed; on a CPU no bar is applied, because
a tape saves no time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphtune.plan import Cell, LatencyAt
from graphtune.results import CaptureList
from graphtune.store import Sweep, decode_cell, read_sweep
from graphtune.tune.candidates import bucket_for
from graphtune.tune.latency_model import LatencyModel, latency_model
from graphtune.tune.recommend import Question, recommend
from graphtune.tune.recommendation import EngineAnswer, ListAnswer, Recommendation

if TYPE_CHECKING:
    from graphtune.worker.runners.decode import GraphDecode
    from graphtune.worker.runners.series import BatchSeries
    from graphtune.worker.timing import Clock, Step

STEPS = 2000
STEPS_OF_A_DRAW = 8  # twice as many as a sweep times in a row
AGAIN = 50  # disturbed draws that may be taken again; later ones count as they are
ENGINE = "sglang"
PREDICTED_BAR, SLOWER_BAR = 0.02, 0.01
SEED = 7


def prepare(sweep: Sweep, question: Question, steps: int = STEPS) -> dict[str, Any]:
    """One case: what to capture, which steps to time, and what they are predicted to take."""
    answer = recommend(sweep, question)
    recommended = answer.engine(ENGINE).decode
    if answer.engine(ENGINE).dispatch.decode == "exact":
        raise SystemExit(
            f"{sweep.path}: the recommended list is for a server without padding, which is not played here"
        )
    if recommended is None or recommended.is_eager:
        raise SystemExit(f"{sweep.path}: nothing is captured on this traffic: {answer.engine(ENGINE).message}")
    default_of, default = best_default(answer)
    lists = {"recommended": capture_list(recommended, recommended), default_of: capture_list(default, recommended)}
    model = latency_model(sweep.cells)
    draws, share = drawn(answer, model, [of.sizes for of in lists.values()], steps // STEPS_OF_A_DRAW)
    case = {
        "model": sweep.model_name,
        "device": sweep.device_name,
        "traffic": answer.engine(ENGINE).workload.source if answer.engine(ENGINE).workload else answer.workload.source,
        "draws": draws,
        "share": share,
        "lists": [asdict(of) for of in lists.values()],
        "names": list(lists),
        "cell": asdict(replace(cell_of(sweep, draws, tuple(lists.values())))),
    }
    return predict(case, sweep)


def best_default(answer: Recommendation) -> tuple[str, ListAnswer]:
    """The fastest of the engines' own lists that pad, on the traffic of the recommended one."""

    def step_us(one: EngineAnswer) -> float:
        known = one.default is not None and one.default.expected_step_us is not None
        pads = one.dispatch.decode_by_default in (None, "always")
        return one.default.expected_step_us or math.inf if known and pads and one.default else math.inf

    best = min(answer.engines, key=step_us)
    if best.default is None or math.isinf(step_us(best)):
        raise SystemExit("no engine's default list has a figure on this traffic")
    return f"{best.engine} default", best.default


def capture_list(of: ListAnswer, like: ListAnswer) -> CaptureList:
    """The list as it is captured; settings of a list that was not measured are those of the recommended one."""
    order = of.order or like.order or "descending"
    output, workspace = of.output or like.output or "shared", of.workspace or like.workspace or "shared"
    return CaptureList("bar", "decode", "full", of.capture_sizes, order, output, workspace)  # type: ignore[arg-type]


def drawn(
    answer: Recommendation, model: LatencyModel, lists: list[tuple[int, ...]], count: int
) -> tuple[list[tuple[int, int]], float]:
    """(requests, context tokens) drawn by weight, out of the steps with a figure under all lists; their share."""
    workload = answer.engine(ENGINE).workload or answer.workload
    weights: dict[tuple[int, int], float] = {}
    for share in workload.decode:
        context = round(model.nearest_context(share.mean_kv_tokens or answer.limits.context_tokens))
        if all(model.step(share.requests, bucket_for(share.requests, of, "always"), context) for of in lists):
            weights[share.requests, context] = share.weight
    total = sum(share.weight for share in workload.decode)
    draws = random.Random(SEED).choices(list(weights), list(weights.values()), k=count)
    return draws, sum(weights.values()) / total


def predict(case: dict[str, Any], sweep: Sweep) -> dict[str, Any]:
    """The case with the mean step, and the mean device time, that ``sweep`` predicts of its draws under each list."""
    steps, device = latency_model(sweep.cells), latency_model(sweep.cells, time="gpu_us")
    sizes = [tuple(of["sizes"]) for of in case["lists"]]
    return {
        **case,
        "sweep": str(sweep.path),
        "predicted_us": [mean_us(steps, of, case["draws"]) for of in sizes],
        "predicted_gpu_us": [mean_us(device, of, case["draws"]) for of in sizes],
    }


def mean_us(model: LatencyModel, sizes: tuple[int, ...], draws: list[tuple[int, int]]) -> float:
    figures = [model.step(n, bucket_for(n, sizes, "always"), context) for n, context in draws]
    if None in figures:
        raise SystemExit("the sweep has no figure for some of the drawn steps; take one with the same sizes")
    return sum(figure.us for figure in figures if figure is not None) / len(figures)


def cell_of(sweep: Sweep, draws: list[tuple[int, int]], lists: tuple[CaptureList, ...]) -> Cell:
    """The swept model with room for the drawn batches."""
    like = next(cell for cell in sweep.cells if cell.model is not None and cell.purpose == "main")
    cell = decode_cell(like.cell)
    page, longest = cell.page_size, max(context for _, context in draws)
    pages = max(n * math.ceil((context + 2 * page) / page) for n, context in draws)
    at = LatencyAt(tuple(sorted({n for n, _ in draws})), longest)
    return replace(
        cell,
        lists=lists,
        latency=(at,),
        prefill_latency=(),
        phase="decode",
        kv_tokens=max(pages, (max(of.sizes[-1] for of in lists) + 1)) * page + page,
    )


def run_case(case: dict[str, Any], device_name: str) -> dict[str, Any]:
    """Time the case's steps under each of its lists, in this process."""
    import torch

    from graphtune.worker.engine import build
    from graphtune.worker.nvml import Gpu
    from graphtune.worker.runners.base import CaptureFailure
    from graphtune.worker.runners.series import BatchSeries
    from graphtune.worker.timing import Clock

    started = time.perf_counter()
    cell = decode_cell(json.dumps(case["cell"]))
    if device_name == "auto":
        device_name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device_name, 0) if device_name == "cuda" else torch.device(device_name)
    gpu = Gpu(device.index or 0) if device.type == "cuda" else None
    if gpu is None:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())  # eager steps, captures and replays share one stream
    union = replace(cell.lists[0], sizes=tuple(sorted({size for of in cell.lists for size in of.sizes})))
    times: list[list[float]] = [[] for _ in cell.lists]
    device_times: list[list[float]] = [[] for _ in cell.lists]
    again = disturbed = 0
    with torch.inference_mode():
        engine = build(cell, device, lambda stage: None)
        engine.warm_up()
        runner = engine.decode_runner(union)
        failed = [size for size, outcome in runner.capture() if isinstance(outcome, CaptureFailure)]
        if failed:
            raise SystemExit(f"sizes {failed} could not be captured")
        clock = Clock(device, gpu)
        clock.watch.wait()
        for at, (requests, context) in enumerate(case["draws"]):
            vocabulary = engine.model.config.vocab_size
            with closing(
                BatchSeries(engine.table, size=requests, context=context, vocab_size=vocabulary, seed=at)
            ) as series:
                order = list(enumerate(cell.lists))[:: -1 if at % 2 else 1]
                while True:
                    quiet = not clock.watch.now()
                    taken = {}
                    for index, of in order:
                        taken[index] = timed(runner, of, series, clock)
                        quiet = not clock.watch.now() and quiet
                    if quiet or again == AGAIN:
                        break
                    again += 1
                    clock.watch.wait()
                disturbed += not quiet
                for index, (steps, alone) in taken.items():
                    times[index] += steps
                    device_times[index].append(alone)
        clock.watch.release()
        runner.tear_down()
    return {
        "measured_us": [sum(one) / len(one) for one in times],
        "measured_gpu_us": [sum(one) / len(one) for one in device_times],
        "gpu_us": device_times,
        "steps": len(case["draws"]) * STEPS_OF_A_DRAW,
        "disturbed": disturbed,
        "seconds": time.perf_counter() - started,
        "on_gpu": gpu is not None,
    }


def timed(runner: GraphDecode, of: CaptureList, series: BatchSeries, clock: Clock) -> tuple[list[float], float]:
    """The steps of one draw in a row, and the device time of one alone, in µs. The runner holds the sizes of all lists;
    these steps are padded as ``of`` pads them."""
    from graphtune.worker.runners.base import PaddedReplay

    bucket = bucket_for(series.size, of.sizes, "always")
    step: Step = runner.eager if bucket is None else PaddedReplay(runner, bucket)
    one_step(step, series)  # a batch of another size than before: servers keep one for many steps
    taken: list[float] = []
    while len(taken) < STEPS_OF_A_DRAW:
        taken += clock.in_a_row(step, series)["step_us"]
    return taken, clock.alone(step, series, delay=bucket is not None)["gpu_us"][0]


def one_step(step: Step, series: BatchSeries) -> None:
    """A step that is not timed."""
    step.fill(series.next())
    step.plan()
    step.launch()


def report(cases: list[dict[str, Any]], results: list[dict[str, Any]]) -> bool:
    """Print the table; True when every bar is met."""
    print(
        "| model, traffic | list | graphs | predicted | measured | apart | to the default | "
        "device predicted | device measured | apart | disturbed | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    good = True
    for case, result in zip(cases, results, strict=True):
        ratio = result["measured_us"][0] / result["measured_us"][1]
        for index, name in enumerate(case["names"]):
            predicted, measured = case["predicted_us"][index], result["measured_us"][index]
            device, alone = case["predicted_gpu_us"][index], result["measured_gpu_us"][index]
            apart = predicted / measured - 1
            missed = abs(apart) > PREDICTED_BAR or (not index and ratio > 1 + SLOWER_BAR)
            good = good and (not missed or not result["on_gpu"])
            against = f"{ratio - 1:+.2%}" if not index else ""
            print(
                f"| {case['model']}, {case['traffic']} | {name} | {len(case['lists'][index]['sizes'])} | "
                f"{predicted / 1000:.3f} ms | {measured / 1000:.3f} ms | {apart:+.2%} | {against} | "
                f"{device / 1000:.3f} ms | {alone / 1000:.3f} ms | {device / alone - 1:+.2%} | "
                f"{result['disturbed']} | {result['seconds']:.0f} |"
            )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--prepare", type=Path, metavar="CASES.json")
    mode.add_argument("--predict", type=Path, metavar="CASES.json")
    mode.add_argument("--run", type=Path, metavar="CASES.json")
    mode.add_argument("--case", type=Path, metavar="CASES.json", help=argparse.SUPPRESS)
    parser.add_argument("sweeps", nargs="*", type=Path, help="with --prepare and --predict: folders of sweeps")
    parser.add_argument("--trace", help="with --prepare: a request trace")
    parser.add_argument(
        "--load", action="append", help="with --prepare: 1, 80%%; may be repeated. [default: 1 and 80%%]"
    )
    parser.add_argument("--prefill-tokens-per-s", type=float, help="where a sweep holds no prefill times")
    parser.add_argument("--index", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    if asked.prepare is not None:
        if asked.trace is None or not asked.sweeps:
            parser.error("--prepare needs --trace and sweeps")
        cases = [
            prepare(
                read_sweep(sweep),
                Question(workload=asked.trace, load=load, prefill_tokens_per_s=asked.prefill_tokens_per_s),
            )
            for sweep in asked.sweeps
            for load in asked.load or ("1", "80%")
        ]
        asked.prepare.write_text(json.dumps(cases) + "\n")
        return
    if asked.predict is not None:
        sweeps = {sweep.model_name: sweep for sweep in map(read_sweep, asked.sweeps)}
        cases = json.loads(asked.predict.read_text())
        without = sorted({case["model"] for case in cases} - set(sweeps))
        if without:
            parser.error(f"--predict needs a sweep of every model; none is of {', '.join(without)}")
        asked.predict.write_text(json.dumps([predict(case, sweeps[case["model"]]) for case in cases]) + "\n")
        return
    if asked.case is not None:
        print(json.dumps(run_case(json.loads(asked.case.read_text())[asked.index], asked.device)))
        return
    cases = json.loads(asked.run.read_text())
    if not all("predicted_gpu_us" in case for case in cases):
        parser.error(f"{asked.run} was prepared by an earlier version; prepare it anew")
    results = []
    for index in range(len(cases)):
        command = [sys.executable, __file__, "--case", str(asked.run), "--index", str(index), "--device", asked.device]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"case {index + 1} of {len(cases)}: {results[-1]['seconds']:.0f} s", file=sys.stderr, flush=True)
        asked.run.with_suffix(".measured.json").write_text(json.dumps(results) + "\n")
    sys.exit(0 if report(cases, results) else 1)


if __name__ == "__main__":
    main()
