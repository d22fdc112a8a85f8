"""What a server's log says of its own graphs, set against the sweep: bytes, seconds and eager steps.

    server's bytes   = offset + slope x predicted bytes     over the capture lists of the log
    server's seconds = offset + slope x predicted seconds
    eager overhead   = median of (server's eager step - graphtune's), where the log has steps off graph

One list cannot tell an offset from a slope: its difference in bytes then is an offset (a server's own buffers), its
ratio in seconds a slope (a server's own host work).
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import IO, NamedTuple

from graphtune.engines.log_lines import open_log
from graphtune.errors import Finding
from graphtune.tune.latency_model import LatencyModel
from graphtune.tune.log_records import CaptureRecord
from graphtune.tune.log_summary import summarise_file
from graphtune.tune.memory_model import GraphCost, MemoryModel, Provenance
from graphtune.units import format_bytes, format_duration_s, format_us

WHERE = "--calibrate"

_STEADY = re.compile(
    rb"Decode batch[.,] #running-req: (\d{1,7}), #(?:full )?token: (\d{1,12}),.*?"
    rb"cuda graph: (True|False),.*?gen throughput \(token/s\): (\d+(?:\.\d+)?)"
)
_PREFILL = b"Prefill batch"


@dataclass(frozen=True)
class Line:
    """offset + slope x."""

    offset: float
    slope: float

    def __call__(self, value: float) -> float:
        return self.offset + self.slope * value


class StepReading(NamedTuple):
    """A decode step as a server's log has it: running requests, their mean KV tokens, on a graph or not."""

    requests: int
    context_tokens: float
    graph: bool
    us: float


@dataclass(frozen=True)
class Calibration:
    """How one server differs from the sweep. ``eager_overhead_us`` is null where no step ran off graph;
    ``graph_ratio`` is the server's step on a graph over graphtune's, null where no such step can be read;
    ``weights_bytes`` those of one rank, null where the log does not say."""

    engine: str
    source: str
    lists: int
    bytes_line: Line | None
    seconds_line: Line | None
    eager_overhead_us: float | None
    graph_ratio: float | None
    sentence: str
    weights_bytes: int | None = None

    def cost(self, of: GraphCost) -> GraphCost:
        """What capturing costs on this server."""
        if self.bytes_line is not None:
            graph_bytes = round(self.bytes_line(of.graph_bytes))
            more = graph_bytes - of.graph_bytes
            interval = of.interval and (max(0, of.interval[0] + more), of.interval[1] + more)
            peak = None if of.capture_peak_bytes is None else max(graph_bytes, of.capture_peak_bytes + more)
            origin: Provenance = "bound" if of.provenance == "bound" else "predicted"
            of = replace(of, provenance=origin, graph_bytes=graph_bytes, interval=interval, capture_peak_bytes=peak)
        if self.seconds_line is not None and of.capture_s is not None:
            of = replace(of, capture_s=max(0.0, self.seconds_line(of.capture_s)))
        return of


def calibrate(log: str, engine: str | None, memory: MemoryModel, latency: LatencyModel) -> Calibration:
    """Read a server's log and fit it. Raises InputError for a file that is no log and Finding where it names no capture
    list that the sweep knows and no decode step."""
    summary = summarise_file(log, engine)
    name = engine or summary.engine
    records = [record for boot in summary.boots for record in boot.captured("decode")]
    known = [
        (record, cost)
        for record in records
        if record.sizes and (cost := memory.cost(record.sizes, checked=False)) is not None
    ]
    with open_log(log) as stream:
        steps = tuple(step_readings(stream))
    if name is None or not (known or steps):
        raise Finding(
            "names no capture list whose sizes were swept, and no decode step with its throughput",
            where=f"{WHERE} {log}",
            action="Sweep the sizes that the server captures, or give a log from its start.",
        )
    bytes_line = _fit(
        [(cost.graph_bytes, record.used_bytes) for record, cost in known if record.used_bytes is not None],
        alone=lambda predicted, said: Line(said - predicted, 1.0),
    )
    seconds_line = _fit(
        [(cost.capture_s, record.seconds) for record, cost in known if record.seconds and cost.capture_s],
        alone=lambda predicted, said: Line(0.0, said / predicted),
    )
    overhead = _eager_overhead_us(steps, latency)
    ratio = _graph_ratio(steps, latency)
    words = [*_bytes_words(known, bytes_line), *_seconds_words(known, seconds_line), *_step_words(overhead, ratio)]
    sentence = "; ".join(words) or "the log states neither bytes nor seconds of its captures"
    weights = next((boot.memory["weights"] for boot in reversed(summary.boots) if "weights" in boot.memory), None)
    return Calibration(name, log, len(known), bytes_line, seconds_line, overhead, ratio, sentence, weights)


def step_readings(stream: IO[bytes]) -> Iterable[StepReading]:
    """Steps of SGLang's decode lines that follow one with as many requests and no prefill in between: the throughput
    that a line states is over the steps since the line before."""
    before: int | None = None
    for line in stream:
        if _PREFILL in line:
            before = None
            continue
        found = _STEADY.search(line)
        if found is None:
            continue
        requests, tokens, throughput = int(found[1]), int(found[2]), float(found[4])
        if requests == before and requests > 0 and throughput > 0:
            yield StepReading(requests, tokens / requests, found[3] == b"True", requests / throughput * 1e6)
        before = requests


def _fit(pairs: Sequence[tuple[float | None, float | None]], alone: Callable[[float, float], Line]) -> Line | None:
    """Least squares where the predictions differ, else what ``alone`` makes of the means; None without pairs."""
    known = [(x, y) for x, y in pairs if x is not None and y is not None]
    if not known:
        return None
    mean_x, mean_y = statistics.fmean(x for x, _ in known), statistics.fmean(y for _, y in known)
    square = sum((x - mean_x) ** 2 for x, _ in known)
    if square == 0:
        return alone(mean_x, mean_y)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in known) / square
    return Line(mean_y - slope * mean_x, slope)


def _eager_overhead_us(steps: Iterable[StepReading], latency: LatencyModel) -> float | None:
    apart = [
        step.us - (figure.us - latency.eager_overhead_us)
        for step in steps
        if not step.graph
        and (figure := latency.eager(step.requests, latency.nearest_context(step.context_tokens))) is not None
    ]
    return max(0.0, statistics.median(apart)) if apart else None


def _graph_ratio(steps: Iterable[StepReading], latency: LatencyModel) -> float | None:
    ratios = [
        step.us / figure.us
        for step in steps
        if step.graph
        and (figure := latency.graph(step.requests, latency.nearest_context(step.context_tokens))) is not None
    ]
    return statistics.median(ratios) if ratios else None


Known = Sequence[tuple[CaptureRecord, GraphCost]]


def _bytes_words(known: Known, line: Line | None) -> list[str]:
    if line is None:
        return []
    said = [(record.used_bytes, cost.graph_bytes) for record, cost in known if record.used_bytes is not None]
    pairs = ", ".join(f"{format_bytes(server)} where {format_bytes(ours)} were predicted" for server, ours in said)
    return [f"graph memory {pairs}: {format_bytes(round(line.offset))} + {line.slope:.2f} x predicted"]


def _seconds_words(known: Known, line: Line | None) -> list[str]:
    if line is None:
        return []
    said = [(record.seconds, cost.capture_s) for record, cost in known if record.seconds and cost.capture_s]
    pairs = ", ".join(
        f"{format_duration_s(server)} where {format_duration_s(ours)} were predicted"
        for server, ours in said
        if server is not None and ours is not None
    )
    return [f"capture {pairs}: {line.offset:.2f} s + {line.slope:.2f} x predicted"]


def _step_words(overhead: float | None, ratio: float | None) -> list[str]:
    words = []
    if ratio is not None:
        words.append(f"steps on a graph take {ratio:.2f} times those of the sweep")
    if overhead is not None:
        words.append(f"steps off graph take {format_us(overhead)} longer than graphtune's")
    return words
