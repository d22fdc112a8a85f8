"""What a sweep measured and what a device has, put together to answer with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graphtune.engines.base import DeviceFacts, Padding, Serving
from graphtune.errors import InputError
from graphtune.model_config import ModelConfig
from graphtune.results import CellResult, Environment, ModelFacts
from graphtune.stats import Disturbances, Noise
from graphtune.tune.bucket_worth import SizeCost
from graphtune.tune.candidates import Candidate
from graphtune.tune.kv_budget import FixedBytes
from graphtune.tune.latency_model import LatencyModel
from graphtune.tune.memory_model import ListKey, MemoryModel, context_bytes
from graphtune.tune.model_bytes import Deployment, model_bytes
from graphtune.tune.prefill_model import PrefillModel
from graphtune.tune.step_table import Step
from graphtune.units import GpuMemory, format_bytes, parse_gpu_memory, swept_gpu_memory


class Traffic(NamedTuple):
    """What decides the candidates of decode."""

    steps: tuple[Step, ...]
    padding: Padding
    largest_size: int | None
    max_graph_bytes: int | None


@dataclass(frozen=True)
class Measurements:
    """Everything that a sweep and a device say, ready to answer with.

    ``fixed`` is null, for the reason ``why_no_budget``, where no budget can be drawn up. ``distinguishes_eager`` is
    false on a CPU, where a tape replay saves nothing over the eager step. ``deployment`` is how the server differs from
    what was swept. ``size_costs`` is what each size added to each captured list. ``prefill`` and ``prefill_memory`` are
    by backend. ``candidates`` are those of decode worked out so far: engines that pad alike share them.
    """

    model: LatencyModel
    memory: MemoryModel
    noise: Noise
    disturbances: Disturbances
    gpu: GpuMemory | None
    fixed: FixedBytes | None
    why_no_budget: str
    device: DeviceFacts
    serving: Serving
    distinguishes_eager: bool
    deployment: Deployment = field(default_factory=Deployment)
    size_costs: Mapping[ListKey, Mapping[int, SizeCost]] = field(default_factory=dict)
    prefill: Mapping[str, PrefillModel] = field(default_factory=dict)
    prefill_memory: Mapping[str, MemoryModel] = field(default_factory=dict)
    candidates: dict[Traffic, tuple[Candidate, ...]] = field(init=False, default_factory=dict, compare=False)


# Weights of one model on two engines differ by padding and fused copies; two models, shards or types by far more.
SAME_WEIGHTS = 1.2


def refuse_other_weights(weights_bytes: int | None, of: Measurements, where: str) -> None:
    """Raise InputError when a server's weights of one rank are those of another deployment than is answered for."""
    if weights_bytes is None or of.fixed is None:
        return
    ours = of.fixed.weights_bytes
    if max(weights_bytes, ours) > SAME_WEIGHTS * min(weights_bytes, ours):
        raise InputError(
            f"its weights take {format_bytes(weights_bytes)} a rank and those answered for {format_bytes(ours)}: it "
            "serves another model, or this one otherwise",
            where=where,
            action="Give a log of this model, or say with --shard and --weights how its server differs.",
        )


def environment_of(cells: Sequence[CellResult]) -> Environment | None:
    return next((cell.environment for cell in cells if cell.environment is not None), None)


def model_facts_of(cells: Sequence[CellResult]) -> ModelFacts | None:
    """Facts of the cell with the largest workspace and buffers: a sweep's cells load one model, and a server holds what
    both phases need, as a cell that captures both does."""
    facts = [cell.model for cell in cells if cell.model is not None]
    return max(facts, key=lambda one: one.workspace_bytes + one.static_buffer_bytes, default=None)


def gpu_of(gpu_mem: str | None, environment: Environment | None) -> GpuMemory | None:
    if gpu_mem is not None:
        return parse_gpu_memory(gpu_mem, environment)
    return swept_gpu_memory(environment) if environment is not None else None


def device_facts_of(gpu: GpuMemory | None) -> DeviceFacts:
    if gpu is None:
        return DeviceFacts(None)
    return DeviceFacts(gpu.nvml_total_mib, gpu.compute_capability, gpu.card)


def fixed_bytes_of(
    cells: Sequence[CellResult],
    facts: ModelFacts | None,
    gpu: GpuMemory | None,
    deployment: Deployment | None = None,
) -> tuple[FixedBytes | None, str]:
    """The bytes that every list needs under a deployment, or the reason why there is no budget."""
    contexts = [count for cell in cells if (count := context_bytes(cell)) is not None]
    if gpu is None:
        return None, "the device's memory is not known; give --gpu-mem"
    if facts is None:
        return None, "no cell of this sweep loaded the model"
    if not contexts:
        return None, "this sweep holds no readings of device memory, so the bytes of a CUDA context are not known"
    asked = deployment or Deployment()
    loaded = next(cell for cell in cells if cell.model is not None).cell
    config = ModelConfig.from_mapping(loaded["model_config"]).shard(facts.shard_of)
    shapes = model_bytes(config, loaded["dtype"], asked)
    own_weights = asked.weights_bytes is not None or asked.shard not in (None, facts.shard_of)
    own_kv = asked.kv_dtype is not None or asked.shard not in (None, facts.shard_of)
    return (
        FixedBytes(
            context_bytes=max(contexts),
            weights_bytes=shapes.weights_bytes if own_weights else facts.weights_bytes,
            workspace_bytes=facts.workspace_bytes,
            static_buffer_bytes=facts.static_buffer_bytes,
            bytes_per_kv_token=shapes.bytes_per_kv_token if own_kv else facts.kv_bytes_per_token,
            page_size=int(loaded.get("page_size", 1)),
            activation_bytes_per_token=shapes.activation_bytes_per_token,
            logits_bytes_per_row=shapes.logits_bytes_per_row,
        ),
        "",
    )
