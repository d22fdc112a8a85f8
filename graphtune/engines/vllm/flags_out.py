"""A plan as vLLM flags, in the spelling of the engine's version. Sizes are tokens; one list serves both phases."""

from __future__ import annotations

import json
from typing import Any

from graphtune.engines import read_back
from graphtune.engines.base import DeviceFacts, Engine, Flags, GraphPlan, Serving, checked_sizes, version_tuple
from graphtune.engines.launch import Launch, split_options
from graphtune.engines.vllm.modes import Mode
from graphtune.errors import InputError
from graphtune.results import Phase

OLDEST = (0, 11)


def write(engine: Engine, plan: GraphPlan, serving: Serving, device: DeviceFacts) -> Flags:
    """Flags for ``plan``, with what the engine would still change of it."""
    if version_tuple(engine.version)[:2] < OLDEST:
        raise InputError(
            f"vLLM {engine.version} has no cudagraph_mode, and its list means something else",
            action="Flags are written for 0.11 and later.",
        )
    sizes = tuple(sorted({*checked_sizes(plan.decode or (), "decode"), *checked_sizes(plan.prefill or (), "prefill")}))
    settings: dict[str, Any] = {"cudagraph_mode": _mode(plan)}
    if sizes:
        settings["cudagraph_capture_sizes"] = list(sizes)
    args = ["--compilation-config", json.dumps(settings, separators=(",", ":"))]
    if serving.max_running_requests is not None:
        args += ["--max-num-seqs", str(serving.max_running_requests)]
    if serving.max_batched_tokens is not None:
        args += ["--max-num-batched-tokens", str(serving.max_batched_tokens)]
    # The engine ignores utilization when it is told the bytes, so that only one of them is written.
    if plan.kv_cache_bytes is not None:
        args += ["--kv-cache-memory-bytes", str(plan.kv_cache_bytes)]
    elif plan.mem_fraction is not None:
        args += ["--gpu-memory-utilization", f"{plan.mem_fraction:g}"]
    launch = Launch(options=split_options([*args, *_deployment(serving)])[1])
    asked: dict[Phase, tuple[int, ...]] = {
        "decode": tuple(plan.decode or ()),
        "prefill": sizes if plan.prefill != () else (),
    }
    return Flags(args=tuple(args), warnings=read_back.warnings(asked, engine.resolve(launch, device)))


def _mode(plan: GraphPlan) -> Mode:
    """The mode that gives each phase what the plan says: decode whole graphs, mixed batches pieces."""
    for phase, backend in (("decode", plan.decode_backend), ("prefill", plan.prefill_backend)):
        if backend not in (None, "full", "piecewise", "breakable", "disabled"):
            raise InputError(f"vLLM captures no {backend!r} graphs for {phase}", action="full, piecewise, disabled.")
    decode_off = plan.decode == () or plan.decode_backend == "disabled"
    prefill_off = plan.prefill == () or plan.prefill_backend == "disabled"
    if decode_off:
        return "NONE" if prefill_off or not plan.prefill else "PIECEWISE"
    if plan.decode_backend in ("piecewise", "breakable"):
        return "PIECEWISE"
    if prefill_off:
        return "FULL_DECODE_ONLY"
    return "FULL" if plan.prefill_backend == "full" else "FULL_AND_PIECEWISE"


def _deployment(serving: Serving) -> list[str]:
    """The deployment as flags, for reading back only."""
    args = ["--tensor-parallel-size", str(serving.tp), "--performance-mode", serving.performance_mode]
    if serving.context_len is not None:
        args += ["--max-model-len", str(serving.context_len)]
    if serving.spec_tokens:
        args += ["--spec-tokens", str(serving.spec_tokens)]
    return args
