"""A server to simulate, put together from a sweep, an engine's dispatch and what the user states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from graphtune.config_file import plain_json
from graphtune.engines import engine_named
from graphtune.engines.base import DeviceFacts, Padding, Serving
from graphtune.errors import InputError
from graphtune.store import Sweep
from graphtune.tune.latency_model import LatencyModel, latency_model
from graphtune.tune.prefill_model import prefill_models, prefill_steps
from graphtune.tune.simulate import Server, capacity_per_s, simulate
from graphtune.tune.simulation import Simulation
from graphtune.tune.step_times import PrefillTimes, StepTimes, stated_prefill, step_times
from graphtune.tune.workloads.trace import Trace
from graphtune.units import swept_gpu_memory

CHUNK_SIZE = 8192


@dataclass(frozen=True)
class ServerQuestion:
    """What a user says of a server. ``sizes`` is ``default`` (the engine's own list), ``none``, or numbers with commas.

    A ``recommendation`` (the JSON of ``recommend --json``) gives the list and the KV tokens of its engine.
    ``max_running_requests`` null is the largest measured batch. KV tokens have no default, nor has the prefill rate
    where the sweep timed no prefill.
    """

    engine: str = "sglang"
    sizes: str | None = None
    recommendation: Path | None = None
    max_running_requests: int | None = None
    kv_tokens: int | None = None
    chunk_size: int = CHUNK_SIZE
    prefill_tokens_per_s: float | None = None
    eager_overhead_us: float = 0.0


@dataclass(frozen=True)
class SimulatedServer:
    """Everything that a simulation needs but the trace; ``listed`` says where the capture list comes from."""

    server: Server
    times: StepTimes
    prefill: PrefillTimes
    listed: str

    def run(self, trace: Trace, load: float) -> Simulation:
        return simulate(trace, self.server, self.times, self.prefill, load)

    def load_of(self, text: str, trace: Trace) -> float:
        """``4`` or ``0.5`` times the trace's own rate; ``80%`` of what the server can take. Raises InputError."""
        share = text.endswith("%")
        try:
            value = float(text.removesuffix("%"))
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise InputError(f"{text!r} is no load", where="--load", action="Write for example 4, or 80%.")
        if not share:
            return value
        if trace.seconds == 0:
            raise InputError("all requests of the trace arrive at once: it has no rate", where="--load")
        most = capacity_per_s(trace, self.server, self.times, self.prefill)
        return value / 100 * most / (len(trace) / trace.seconds)


def simulated_server(sweep: Sweep, question: ServerQuestion) -> SimulatedServer:
    """Raises InputError for what is missing or makes no sense, and Finding for a sweep without decode points."""
    stored = _recommended(question, sweep.model_name) if question.recommendation is not None else None
    kv_tokens = question.kv_tokens or (stored.kv_tokens if stored else None)
    if kv_tokens is None:
        raise InputError(
            "how many tokens the KV cache holds decides how many requests run at once",
            where="--kv-tokens",
            action="Give the figure that the server logs, or --recommendation FILE with one.",
        )
    model = latency_model(sweep.cells, eager_overhead_us=question.eager_overhead_us)
    prefill = _prefill(sweep, question, model)
    most = question.max_running_requests or model.largest_size
    sizes, padding, listed = _list(sweep, question, most, stored)
    times = step_times(model, sizes, most, padding)
    server = Server(most, kv_tokens, question.chunk_size, _page_size(sweep))
    server.check(times)
    return SimulatedServer(server, times, prefill, listed)


def _list(
    sweep: Sweep, question: ServerQuestion, most: int, stored: _Recommended | None
) -> tuple[tuple[int, ...], Padding, str]:
    """The capture list with the padding rule that holds for it, and where it comes from."""
    engine = engine_named(question.engine)
    if stored is not None and question.sizes is not None:
        raise InputError("is given beside --recommendation", where="--sizes", action="Leave one of them out.")
    if stored is not None:
        off = ", padding off" if stored.padding == "exact" and engine.dispatch.decode != "exact" else ""
        return stored.sizes, stored.padding, f"recommended for {engine.name}{off}"
    text = question.sizes or "default"
    if text == "none":
        return (), engine.dispatch.decode, "no graphs"
    if text == "default":
        sizes = engine.default_decode_sizes(_device(sweep), Serving(max_running_requests=most))
        return sizes, engine.dispatch.decode_by_default or engine.dispatch.decode, f"default of {engine.name}"
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) >= 1 for part in parts):
        raise InputError(
            f"{text!r} is no list of sizes", where="--sizes", action="Write for example 1,2,4,8; none; or default."
        )
    return tuple(sorted({int(part) for part in parts})), engine.dispatch.decode, "as given"


def _prefill(sweep: Sweep, question: ServerQuestion, model: LatencyModel) -> PrefillTimes:
    """As stated, else measured: under the recommended list, the engine's own beside its own decode list, else eager."""
    models = prefill_models(sweep.cells, question.eager_overhead_us)
    if question.prefill_tokens_per_s is not None or not models:
        return stated_prefill(question.prefill_tokens_per_s, model)
    engine, backend = engine_named(question.engine), None
    sizes: tuple[int, ...] = ()
    if question.recommendation is not None:
        answer = _at(_at(_at(plain_json(question.recommendation), "engines"), engine.name), "prefill")
        backend, sizes = _at(answer, "backend"), tuple(_at(answer, "capture_sizes") or ())
    elif question.sizes in (None, "default"):
        sizes = engine.default_prefill_sizes(_device(sweep), Serving())
    found = prefill_steps(models, engine.dispatch, backend, sizes)
    assert found is not None
    return found


def _device(sweep: Sweep) -> DeviceFacts:
    environment = next((cell.environment for cell in sweep.cells if cell.environment is not None), None)
    gpu = swept_gpu_memory(environment) if environment is not None else None
    if gpu is None:
        return DeviceFacts(None)
    return DeviceFacts(gpu.nvml_total_mib, gpu.compute_capability, gpu.card)


def _page_size(sweep: Sweep) -> int:
    return next((int(cell.cell.get("page_size", 1)) for cell in sweep.cells if cell.model is not None), 1)


class _Recommended(NamedTuple):
    sizes: tuple[int, ...]
    padding: Padding
    kv_tokens: int | None


def _recommended(question: ServerQuestion, model: str) -> _Recommended:
    """The decode list, its padding and KV tokens of the engine's answer in a stored recommendation for ``model``."""
    assert question.recommendation is not None
    where, values = str(question.recommendation), plain_json(question.recommendation)
    if (served := _at(_at(values, "sweep"), "model")) not in (None, model):
        raise InputError(
            f"was written for {served}, and this sweep is of {model}",
            where=where,
            action="Name the folder of a sweep of that model, or write a recommendation for this one.",
        )
    engine = engine_named(question.engine)
    name = engine.name
    answer: Any = _at(_at(values, "engines"), name)
    sizes, kv_tokens = _at(_at(answer, "decode"), "capture_sizes"), _at(_at(answer, "memory"), "kv_tokens")
    if not isinstance(sizes, list) or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise InputError(f"holds no decode list for {name}", where=where, action="`recommend --json` writes one.")
    padding: Padding = "exact" if _at(_at(answer, "dispatch"), "decode") == "exact" else engine.dispatch.decode
    return _Recommended(
        tuple(sorted(sizes)), padding, kv_tokens if isinstance(kv_tokens, int) and kv_tokens >= 1 else None
    )


def _at(values: Any, key: str) -> Any:
    return values.get(key) if isinstance(values, dict) else None
