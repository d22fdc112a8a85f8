"""Memory of a model that was not swept, from its config.json: budgets per engine under the engine's own lists.

Step times are not known, so no list can be judged by them: the engines' own lists stand. Graph memory is played back
from the requests that a decode forward of such shapes makes (``decode_trace``), as predictions for a swept model are
from recorded ones. What belongs to a process and not to a model (context, workspace, bytes per executable) is that of
the sweep that ships with graphtune, or of another that is named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from graphtune.allocation_events import encode
from graphtune.engines import ENGINES
from graphtune.engines.base import DeviceFacts, Engine, Flags, GraphPlan, Serving
from graphtune.errors import InputError
from graphtune.model_shape import ModelShape, read_model_shape
from graphtune.recipe import model_name_of
from graphtune.results import AllocationTrace, CaptureList
from graphtune.store import Sweep
from graphtune.tune.block_pool import TORCH_RULES
from graphtune.tune.kv_budget import FixedBytes, KvBudget, kv_budget
from graphtune.tune.measurements import environment_of, fixed_bytes_of, gpu_of, model_facts_of
from graphtune.tune.memory_prediction import Outside, outside_of, played_predictor
from graphtune.tune.model_bytes import Deployment, activation_bytes_per_token, kv_bytes, logits_bytes_per_row
from graphtune.units import MIB, GpuMemory

SCHEMA = 1
NO_LATENCY = "this model was not swept: step times follow from no config.json"


@dataclass(frozen=True)
class EngineMemory:
    """One engine's own decode list and the budget with it."""

    engine: str
    version: str
    capture_sizes: tuple[int, ...]
    graph_bytes: int
    graph_bytes_interval: tuple[int, int]
    memory: KvBudget
    flags: Flags


@dataclass(frozen=True)
class MemoryAdvice:
    """Everything but latency of a model that was not swept. ``measured_on`` is the sweep that a process's own bytes
    come from."""

    model: str
    config: str
    shape: ModelShape
    ranks: int
    weights_bytes: int
    bytes_per_kv_token: int
    gpu: GpuMemory
    measured_on: str
    engines: tuple[EngineMemory, ...]

    @property
    def fits(self) -> bool:
        return any(one.memory.fits for one in self.engines)


def memory_advice(
    config: Path,
    sweep: Sweep,
    *,
    gpu_mem: str | None,
    engines: Sequence[str] = (),
    deployment: Deployment | None = None,
    context_tokens: int = 1024,
    max_running_requests: int | None = None,
) -> MemoryAdvice:
    """Budgets of the model of ``config`` on a card, with a process's own bytes from ``sweep``.

    Raises InputError without a card, for a config that is not understood and for an engine that is not known.
    """
    if gpu_mem is None:
        raise InputError(
            "the card is not known, and this model was not swept on one",
            where="--gpu-mem",
            action="Write for example --gpu-mem 80.",
        )
    asked = deployment or Deployment()
    shape = read_model_shape(config)
    ranks = asked.shard or 1
    gpu = gpu_of(gpu_mem, environment_of(sweep.cells))
    measured, why_not = fixed_bytes_of(sweep.cells, model_facts_of(sweep.cells), gpu)
    if measured is None or gpu is None:
        raise InputError(why_not, where=str(sweep.path))
    fixed = _fixed(shape, ranks, asked, measured)
    serving = Serving(tp=ranks, max_running_requests=max_running_requests, context_len=context_tokens)
    device = DeviceFacts(gpu.nvml_total_mib, gpu.compute_capability, gpu.card)
    outside = _outside(sweep)
    names = engines or tuple(ENGINES)
    file = config / "config.json" if config.is_dir() else config
    return MemoryAdvice(
        model=model_name_of(file),
        config=str(file),
        shape=shape,
        ranks=ranks,
        weights_bytes=fixed.weights_bytes,
        bytes_per_kv_token=fixed.bytes_per_kv_token,
        gpu=gpu,
        measured_on=f"{sweep.model_name} on {sweep.device_name}",
        engines=tuple(
            _engine(ENGINES[name], shape, ranks, fixed, gpu, device, serving, outside, context_tokens) for name in names
        ),
    )


def _fixed(shape: ModelShape, ranks: int, asked: Deployment, measured: FixedBytes) -> FixedBytes:
    heads, kv_heads = math.ceil(shape.heads / ranks), max(1, shape.kv_heads // ranks)
    inner = math.ceil(shape.inner_per_token / ranks)
    activations = activation_bytes_per_token(
        shape.hidden, heads * shape.head_dim, kv_heads * shape.head_dim, inner, shape.width
    )
    return replace(
        measured,
        weights_bytes=asked.weights_bytes or shape.weights_bytes(ranks),
        bytes_per_kv_token=kv_bytes(shape.kv_values_per_token(ranks), asked.kv_dtype or shape.dtype),
        activation_bytes_per_token=activations,
        logits_bytes_per_row=logits_bytes_per_row(math.ceil(shape.vocabulary / ranks), shape.width),
    )


def _engine(
    engine: Engine,
    shape: ModelShape,
    ranks: int,
    fixed: FixedBytes,
    gpu: GpuMemory,
    device: DeviceFacts,
    serving: Serving,
    outside: Outside,
    context_tokens: int,
) -> EngineMemory:
    of = CaptureList("own", "decode", "full", engine.default_decode_sizes(device, serving))
    traces = {size: decode_trace(shape, ranks, size) for size in of.sizes}
    prediction = played_predictor(TORCH_RULES, of, traces, outside).predict(of)
    assert prediction is not None, "every size of the list has its requests"
    budget = kv_budget(
        gpu,
        fixed,
        engine.memory_rule(device, serving),
        graph_bytes=prediction.graph_bytes,
        activation_peak_bytes=prediction.peak_bytes - prediction.graph_bytes,
        context_tokens=context_tokens,
    )
    fraction = budget.fraction if budget.fraction_changed else None
    return EngineMemory(
        engine=engine.name,
        version=engine.version,
        capture_sizes=of.sizes,
        graph_bytes=prediction.graph_bytes,
        graph_bytes_interval=prediction.interval,
        memory=budget,
        flags=engine.flags(GraphPlan(mem_fraction=fraction), serving, device),
    )


def decode_trace(shape: ModelShape, ranks: int, size: int, *, hold_output: bool = False) -> AllocationTrace:
    """Requests of a decode forward of ``size`` requests: residual and hidden state throughout, attention and MLP layer
    by layer, then the logits, which stay where outputs are held per size. The pool starts with one block as large as
    the forward ever holds."""
    width = shape.width
    heads, kv_heads = math.ceil(shape.heads / ranks), max(1, shape.kv_heads // ranks)
    qkv = (heads + 2 * kv_heads) * shape.head_dim
    inner = math.ceil(shape.inner_per_token / ranks)
    vocabulary = math.ceil(shape.vocabulary / ranks)
    residual, hidden, first, second, logits = range(5)
    attention = [(first, qkv), (second, heads * shape.head_dim), (first, 0), (second, 0)]
    mlp = [(first, 2 * inner), (second, inner), (first, 0), (second, 0)]
    events = [(residual, shape.hidden), (hidden, shape.hidden), *(attention + mlp) * shape.layers]
    events += [(logits, vocabulary), (hidden, 0), (residual, 0)]
    events += [] if hold_output else [(logits, 0)]
    held = 2 * shape.hidden + max(qkv + heads * shape.head_dim, 3 * inner, vocabulary)
    step = TORCH_RULES.segment_step_bytes
    return AllocationTrace(
        room_bytes=math.ceil(size * held * width / step) * step,
        pool=encode((name, values * size * width) for name, values in events),
    )


def _outside(sweep: Sweep) -> Outside:
    """Bytes per executable as the sweep measured them. Other models have graphs of other sizes: 16 MiB more or less."""
    of = outside_of(sweep.cells, ("decode", "full"))
    return replace(of, off_bytes=of.off_bytes + 16 * MIB)


def as_json(of: MemoryAdvice) -> dict[str, Any]:
    """Plain data for ``json.dumps``."""
    return {
        "schema": SCHEMA,
        "kind": "memory_only",
        "model": of.model,
        "config": of.config,
        "parameters": of.shape.parameters,
        "quantised": of.shape.quantised,
        "ranks": of.ranks,
        "weights_bytes": of.weights_bytes,
        "bytes_per_kv_token": of.bytes_per_kv_token,
        "gpu": asdict(of.gpu),
        "measured_on": of.measured_on,
        "latency": None,
        "missing": {"latency": NO_LATENCY},
        "engines": {
            one.engine: {
                "version": one.version,
                "capture_sizes": list(one.capture_sizes),
                "graph_bytes": one.graph_bytes,
                "graph_bytes_interval": list(one.graph_bytes_interval),
                "graph_bytes_from": "predicted",
                "memory": {**asdict(one.memory), "kv_tokens_gained": one.memory.kv_tokens_gained},
                "flags": {"yaml": one.flags.yaml} if one.flags.yaml is not None else {"args": list(one.flags.args)},
            }
            for one in of.engines
        },
    }
