"""A plan as TensorRT-LLM YAML, with the keys that the engine's version has."""

from __future__ import annotations

from typing import Any

from graphtune.engines import read_back
from graphtune.engines.base import DeviceFacts, Engine, Flags, GraphPlan, Serving, checked_sizes
from graphtune.engines.launch import Launch, dump_yaml
from graphtune.engines.tensorrt_llm.options import PREFILL_BACKENDS
from graphtune.errors import InputError
from graphtune.results import Phase


def write(engine: Engine, plan: GraphPlan, serving: Serving, older: bool) -> Flags:
    """YAML for ``plan``, with what the engine would still change of it. Padding is said to be on or off."""
    if plan.kv_cache_bytes is not None:
        raise InputError("TensorRT-LLM takes no size of the KV cache in bytes", action="Give mem_fraction instead.")
    if plan.decode_backend not in (None, "full", "disabled"):
        raise InputError(f"TensorRT-LLM captures no {plan.decode_backend!r} decode graphs", action="full, disabled.")
    settings: dict[str, Any] = {}
    if plan.decode == () or plan.decode_backend == "disabled":
        settings["cuda_graph_config"] = None
    elif plan.decode is not None:
        sizes = checked_sizes(plan.decode, "decode")
        settings["cuda_graph_config"] = {"enable_padding": engine.dispatch.decode != "exact", "batch_sizes": sizes}
    settings.update(_prefill(plan, engine.version, older))
    if serving.max_running_requests is not None:
        settings["max_batch_size"] = serving.max_running_requests
    if serving.max_batched_tokens is not None:
        settings["max_num_tokens"] = serving.max_batched_tokens
    if plan.mem_fraction is not None:
        settings["kv_cache_config"] = {"free_gpu_memory_fraction": plan.mem_fraction}
    launch = Launch(settings={**settings, **_deployment(serving)})
    asked: dict[Phase, tuple[int, ...]] = {"decode": plan.decode or (), "prefill": plan.prefill or ()}
    resolution = engine.resolve(launch, DeviceFacts(None))
    return Flags(yaml=dump_yaml(settings) if settings else "", warnings=read_back.warnings(asked, resolution))


def _prefill(plan: GraphPlan, version: str, older: bool) -> dict[str, Any]:
    if plan.prefill is None and plan.prefill_backend is None:
        return {}
    if older:
        if plan.prefill == () or plan.prefill_backend == "disabled":
            return {}
        raise InputError(
            f"TensorRT-LLM {version} has no prefill_cuda_graph_backend",
            action="1.3 and later have it; or leave it out.",
        )
    backend = plan.prefill_backend or "breakable"
    if plan.prefill == () or backend == "disabled":
        return {"prefill_cuda_graph_backend": "disabled"}
    if backend not in PREFILL_BACKENDS:
        accepted = ", ".join(PREFILL_BACKENDS)
        raise InputError(f"TensorRT-LLM captures no {backend!r} prefill graphs", action=f"Backends: {accepted}.")
    keys: dict[str, Any] = {"prefill_cuda_graph_backend": backend}
    if plan.prefill is not None:
        keys["prefill_capture_num_tokens"] = checked_sizes(plan.prefill, "prefill")
    return keys


def _deployment(serving: Serving) -> dict[str, Any]:
    """The deployment as settings, for reading back only."""
    settings: dict[str, Any] = {}
    if serving.context_len is not None:
        settings["max_seq_len"] = serving.context_len
    if serving.spec_tokens:
        settings["speculative_config"] = {"max_draft_len": serving.spec_tokens}
    return settings
