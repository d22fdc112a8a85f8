"""From vLLM's settings to what is captured, what is reachable, and what changes on the way."""

from __future__ import annotations

from dataclasses import replace

from graphtune.engines.base import DeviceFacts
from graphtune.engines.options import Reading, Refusal
from graphtune.engines.resolution import ModeRun, Note, PhaseRun, Reach, Resolution
from graphtune.engines.rules import EffectiveList, GraphCount
from graphtune.engines.vllm import lists, modes, rules
from graphtune.engines.vllm.options import Settings

RUNNERS: tuple[rules.Runner, ...] = ("V1", "V2")


def resolve(settings: Settings, reading: Reading, device: DeviceFacts) -> Resolution:
    """Everything lint looks at for one launch on one device. What differs between the runners is given for both."""
    of = lists.limits(device, settings.serving)
    mode = resolved_mode(settings, device)
    if mode.error is not None:
        reading.refuse(settings.where.get("compilation.cudagraph_mode", "cudagraph_mode"), mode.error, "PIECEWISE")
    listed = rules.resolve(settings.asked, device, settings.serving)
    where = _list_where(settings)
    if listed.error is not None:
        reading.refuse(where, listed.error, "a list, or a maximum, that agree")
    for size in [size for size in settings.asked.sizes or () if size < 1][:1]:
        reading.refuse(where, f"size {size} passes the engine's parser unchecked", "at least 1")
    if settings.asked.largest is not None and settings.asked.largest < 1:
        reading.refuse(where, f"max_cudagraph_capture_size is {settings.asked.largest}", "at least 1")
    _check_compile_sizes(settings, listed, reading)
    runs = phase_runs(settings, mode, listed, of)
    reading.refusals.extend(
        Refusal(where, run.effective.error + (f" (runner {run.runner})" if run.runner else ""), None)
        for run in runs
        if run.effective.error is not None and listed.error is None
    )
    return Resolution(
        phases=runs,
        modes=tuple(
            ModeRun("all", change.before, change.after, change.reason, settings.mode_explicit)
            for change in mode.changes
        ),
        refusals=tuple(dict.fromkeys(reading.refusals)),
        risks=risks(settings),
        assumptions=assumptions(settings, device, of),
        unread=tuple(reading.unread),
    )


def _list_where(settings: Settings) -> str:
    names = ("cudagraph_capture_sizes", "compilation.cudagraph_capture_sizes", "max_cudagraph_capture_size")
    return next((settings.where[name] for name in names if name in settings.where), "--compilation-config")


def resolved_mode(settings: Settings, device: DeviceFacts) -> modes.Resolution:
    splitting = settings.compilation.get("splitting_ops")
    facts = modes.Facts(
        enforce_eager=settings.enforce_eager,
        compile_mode=settings.compile_mode,
        breakable=settings.breakable,
        empty_splitting_ops=splitting == [],
        pooling=settings.pooling,
        dynamic_speculation_v1=settings.dynamic_speculation and settings.runner == "V1",
        support=modes.support_of(settings.attention, device, settings.flash_attention),
        width=settings.serving.width,
    )
    return modes.resolve(settings.mode, facts)


def phase_runs(
    settings: Settings, mode: modes.Resolution, listed: EffectiveList, of: lists.Limits
) -> tuple[PhaseRun, ...]:
    """Decode once per runner where they differ, and the mixed batches that the same list serves."""
    decode_mode, mixed_mode = modes.ROUTINES[mode.runs]
    stated = settings.serving.max_running_requests is not None
    reach = Reach(
        of.max_num_seqs,
        "requests",
        stated,
        f"--max-num-seqs {of.max_num_seqs}" if stated else f"the engine's default of {of.max_num_seqs} requests",
    )
    adapters = 2 if settings.lora and settings.compilation.get("cudagraph_specialize_lora", True) else 1
    models = 2 if settings.draft_model else 1
    runs = []
    for runner in RUNNERS if settings.runner is None else (settings.runner,):
        effective = listed
        if decode_mode == "FULL" and mixed_mode != "FULL":
            effective = rules.full_decode(listed, runner, of.max_num_seqs)  # type: ignore[arg-type]
        elif decode_mode == "FULL" and runner == "V1":
            effective = rules.round_for_speculation(listed)
        runs.append(
            PhaseRun(
                "decode",
                decode_mode != "NONE",
                effective,
                reach,
                "always",
                asked=settings.asked.sizes,
                count=GraphCount(len(effective.sizes), adapter_variants=adapters, models=models),
                runner=runner,
                note=_mixed_note(effective, listed, mixed_mode, of),
            )
        )
    if len(runs) == 2 and runs[0] == replace(runs[1], runner=runs[0].runner):
        runs = [replace(runs[0], runner=None)]
    mixed = PhaseRun(
        "prefill",
        mixed_mode != "NONE" and bool(listed.sizes),
        listed,
        Reach(of.max_num_batched_tokens, "tokens", False, f"steps of {of.max_num_batched_tokens} tokens"),
        "always",
        asked=settings.asked.sizes,
        count=GraphCount(len(listed.sizes), adapter_variants=adapters),
    )
    return (*runs, mixed)


def _mixed_note(effective: EffectiveList, listed: EffectiveList, mixed: modes.Mode, of: lists.Limits) -> str | None:
    """Decode batches above the FULL graphs that still replay a graph of mixed batches."""
    top, needed = effective.top_requests, of.max_num_seqs * listed.width
    if top >= of.max_num_seqs or mixed == "NONE" or not listed.sizes:
        return None
    reached = min(listed.sizes[-1] // listed.width, of.max_num_seqs)
    if reached <= top:
        return None
    size = next((size for size in listed.sizes if size >= min(needed, reached * listed.width)), listed.sizes[-1])
    return f"{top + 1} to {reached} requests replay {mixed} graphs of up to {size} tokens instead of FULL ones"


def _check_compile_sizes(settings: Settings, listed: EffectiveList, reading: Reading) -> None:
    given = settings.compilation.get("compile_sizes")
    if not isinstance(given, list):
        return
    sizes = tuple(size for size in given if isinstance(size, int) and not isinstance(size, bool))
    for size in rules.misplaced_compile_sizes(sizes, listed.sizes):
        reading.refuse(
            "compile_sizes", f"ValueError: compile size {size} would be padded to a larger graph", "a capture size"
        )


def risks(settings: Settings) -> tuple[Note, ...]:
    found = []
    utilization = settings.serving.mem_fraction
    if utilization is not None and utilization > 0.95 and settings.kv_cache_bytes is None:
        where = settings.where["gpu_memory_utilization"]
        found.append(
            Note(f"--gpu-memory-utilization {utilization:g} is above 0.95: graph memory is estimated low", where)
        )
    if utilization is not None and settings.kv_cache_bytes is not None:
        where = settings.where["kv_cache_memory_bytes"]
        found.append(Note("--kv-cache-memory-bytes bypasses --gpu-memory-utilization and the graph estimate", where))
    context = settings.serving.context_len
    for size in settings.asked.sizes or ():
        if context is not None and size > context:
            where = _list_where(settings)
            found.append(
                Note(f"size {size} is more than max_model_len {context}: a made-up sequence may overrun", where)
            )
            break
    for key in settings.unknown_keys:
        found.append(Note(f"{key} is not a key known here; the engine refuses keys it does not know", f"{key}"))
    return tuple(found)


def assumptions(settings: Settings, device: DeviceFacts, of: lists.Limits) -> tuple[str, ...]:
    found = []
    if device.nvml_total_mib is None and settings.serving.max_running_requests is None:
        found.append("the card is not named (--gpu-mem): max_num_seqs is taken as 256")
    if settings.serving.max_batched_tokens is None:
        found.append(f"max_num_batched_tokens is taken as {of.max_num_batched_tokens}, the engine's default")
    if settings.attention is None:
        found.append("the attention backend is not named: its graph support is taken to allow the mode")
    elif modes.support_of(settings.attention, device, settings.flash_attention) is None:
        found.append(f"the graph support of attention backend {settings.attention} is not known here")
    if (
        settings.attention is not None
        and settings.attention.upper() == "FLASHINFER"
        and device.compute_capability is None
    ):
        found.append(
            "FlashInfer is taken to have no kernels for several tokens per request (they need capability 10.x)"
        )
    return tuple(found)
