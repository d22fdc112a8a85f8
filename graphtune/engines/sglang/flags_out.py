"""A plan as SGLang flags, in the spelling of the engine's version."""

from __future__ import annotations

import json
from typing import Any

from graphtune.engines import read_back
from graphtune.engines.base import DeviceFacts, Engine, Flags, GraphPlan, Serving, checked_sizes, version_tuple
from graphtune.engines.launch import Launch, split_options
from graphtune.engines.sglang.options import NO_PADDING
from graphtune.errors import InputError
from graphtune.graph_config import BACKENDS, Key, Layer, combine, serialise
from graphtune.results import Phase

# The JSON and the flags per phase are known from this version on; up to the second, decode has flags without a phase.
PER_PHASE_SINCE = (0, 5, 16)
BEFORE_PHASES = (0, 5, 10)


def write(engine: Engine, plan: GraphPlan, serving: Serving, device: DeviceFacts) -> Flags:
    """Flags for ``plan``, with what the engine would still change of it."""
    if plan.kv_cache_bytes is not None:
        raise InputError("SGLang takes no size of the KV cache in bytes", action="Give mem_fraction instead.")
    version = version_tuple(engine.version)
    if version >= PER_PHASE_SINCE:
        args = _per_phase(plan)
    elif version <= (*BEFORE_PHASES, 9999):
        args = _decode_only(plan, engine.version)
    else:
        raise InputError(
            f"how SGLang {engine.version} spells its graph flags is not known here",
            action="They are known up to 0.5.10 and from 0.5.16 on.",
        )
    if plan.decode and engine.dispatch.decode == "exact":
        args += [NO_PADDING]
    if serving.max_running_requests is not None:
        args += ["--max-running-requests", str(serving.max_running_requests)]
    if plan.mem_fraction is not None:
        args += ["--mem-fraction-static", f"{plan.mem_fraction:g}"]
    if version < PER_PHASE_SINCE:
        return Flags(args=tuple(args))
    launch = Launch(options=split_options([*args, *_deployment(serving)])[1])
    asked: dict[Phase, tuple[int, ...]] = {"decode": plan.decode or (), "prefill": plan.prefill or ()}
    return Flags(args=tuple(args), warnings=read_back.warnings(asked, engine.resolve(launch, device)))


def _per_phase(plan: GraphPlan) -> list[str]:
    """The JSON with only what the plan decides: whatever is written is locked against automatic downgrades."""
    values: dict[Key, Any] = {}
    for phase, sizes, backend in (
        ("decode", plan.decode, plan.decode_backend),
        ("prefill", plan.prefill, plan.prefill_backend),
    ):
        if sizes == ():
            values[(phase, "backend")] = "disabled"
            continue
        if backend is not None:
            if backend not in BACKENDS:
                raise InputError(f"SGLang captures no {backend!r} graphs", action=f"Backends: {', '.join(BACKENDS)}.")
            values[(phase, "backend")] = backend
        if sizes is not None:
            values[(phase, "bs")] = tuple(checked_sizes(sizes, phase))
    written = serialise(combine([Layer("plan", values)]))
    return ["--cuda-graph-config", json.dumps(written, separators=(",", ":"))] if written else []


def _decode_only(plan: GraphPlan, version: str) -> list[str]:
    if plan.prefill is not None or plan.prefill_backend is not None:
        raise InputError(f"SGLang {version} has no list of prefill graphs to set", action="0.5.16 and later have one.")
    if plan.decode_backend not in (None, "full"):
        raise InputError(f"SGLang {version} has full decode graphs only", action="0.5.16 and later have a choice.")
    if plan.decode == ():
        return ["--disable-cuda-graph"]
    if plan.decode is None:
        return []
    return ["--cuda-graph-bs", *(str(size) for size in checked_sizes(plan.decode, "decode"))]


def _deployment(serving: Serving) -> list[str]:
    """The deployment as flags, for reading back only."""
    args = ["--tp-size", str(serving.tp), "--pp-size", str(serving.pp), "--dp-size", str(serving.dp)]
    if serving.context_len is not None:
        args += ["--context-length", str(serving.context_len)]
    if serving.chunked_prefill_size is not None:
        args += ["--chunked-prefill-size", str(serving.chunked_prefill_size)]
    if serving.spec_tokens:
        args += ["--speculative-algorithm", "EAGLE", "--speculative-num-draft-tokens", str(serving.width)]
    if serving.role is not None:
        args += ["--disaggregation-mode", serving.role]
    if serving.padding is False:
        args += [NO_PADDING]
    return args
