"""From vLLM's settings to what is captured, what is reachable, and what changes on the way."""

from __future__ import annotations

from dataclasses import replace

from graphtune.engines.base import DeviceFacts, Edit
from graphtune.engines.options import Reading, Refusal
from graphtune.engines.resolution import ModeRun, Note, PhaseRun, Reach, Resolution
from graphtune.engines.rules import EffectiveList, GraphCount
from graphtune.engines.vllm import lists, modes, rules
from graphtune.engines.vllm.options import Settings

RUNNERS: tuple[rules.Runner, ...] = ("V1", "V2")


def resolve(settings: Settings, reading: Reading, device: DeviceFacts) -> Resolution:
    """Everything lint looks at for one launch on one device. What differs between the runners is given for both."""
    parsed = not reading.refusals
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
        risks=risks(settings, device),
        assumptions=assumptions(settings, device, of),
        unread=tuple(reading.unread),
        parsed=parsed,
        ranks=settings.serving.tp,
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
    """Decode and mixed batches, once per runner where the runners differ."""
    runners: tuple[rules.Runner, ...] = RUNNERS if settings.runner is None else (settings.runner,)
    per_runner = [_runs_of(runner, settings, mode, listed, of) for runner in runners]
    runs: list[PhaseRun] = []
    for same_phase in zip(*per_runner, strict=True):
        first = replace(same_phase[0], runner=None)
        alike = all(replace(run, runner=None) == first for run in same_phase)
        runs.extend([first] if alike and len(runners) > 1 else same_phase)
    return tuple(runs)


def _runs_of(
    runner: rules.Runner, settings: Settings, mode: modes.Resolution, listed: EffectiveList, of: lists.Limits
) -> tuple[PhaseRun, PhaseRun]:
    decode_mode, mixed_mode = modes.ROUTINES[mode.runs]
    # Runner V1 rounds the one list for speculation, so that mixed batches see the rounded list too.
    shared = rules.round_for_speculation(listed) if runner == "V1" and decode_mode == "FULL" else listed
    effective = shared
    if decode_mode == "FULL" and mixed_mode != "FULL":
        effective = rules.full_decode(listed, runner, of.max_num_seqs)
    stated = settings.serving.max_running_requests is not None
    option = f"--max-num-seqs {of.max_num_seqs}" if stated else f"the engine's default of {of.max_num_seqs} requests"
    adapters = 2 if settings.lora and settings.compilation.get("cudagraph_specialize_lora", True) else 1
    chosen = settings.asked.sizes is not None or settings.asked.largest is not None
    decode = PhaseRun(
        "decode",
        decode_mode != "NONE",
        effective,
        Reach(of.max_num_seqs, "requests", stated, option),
        "always",
        GraphCount(len(effective.sizes), adapter_variants=adapters, models=2 if settings.draft_model else 1),
        asked=settings.asked.sizes,
        chosen=chosen,
        runner=runner,
        shared=mixed_mode != "NONE",
        changes=() if mixed_mode != "NONE" or not chosen else effective.altered,
        rest_top=_served_by_mixed(effective, shared, mixed_mode, of),
        rest_mode=mixed_mode,
    )
    mixed = PhaseRun(
        "prefill",
        mixed_mode != "NONE",
        shared,
        Reach(of.max_num_batched_tokens, "tokens", False, f"steps of {of.max_num_batched_tokens} tokens"),
        "always",
        GraphCount(len(shared.sizes), adapter_variants=adapters),
        asked=settings.asked.sizes,
        chosen=chosen,
        runner=runner,
        changes=shared.altered if chosen else (),
    )
    return decode, mixed


def _served_by_mixed(
    effective: EffectiveList, shared: EffectiveList, mixed: modes.Mode, of: lists.Limits
) -> int | None:
    """The largest decode batch above the FULL graphs that replays a graph of mixed batches instead."""
    if mixed == "NONE" or not shared.sizes or shared.error is not None:
        return None
    reached = min(shared.sizes[-1] // shared.width, of.max_num_seqs)
    return reached if reached > effective.top_requests else None


def _check_compile_sizes(settings: Settings, listed: EffectiveList, reading: Reading) -> None:
    given = settings.compilation.get("compile_sizes")
    if not isinstance(given, list):
        return
    sizes = tuple(size for size in given if isinstance(size, int) and not isinstance(size, bool))
    for size in rules.misplaced_compile_sizes(sizes, listed.sizes):
        reading.refuse(
            "compile_sizes", f"ValueError: compile size {size} would be padded to a larger graph", "a capture size"
        )


def risks(settings: Settings, device: DeviceFacts) -> tuple[Note, ...]:
    found = []
    utilization = settings.serving.mem_fraction
    if utilization is not None and utilization > 0.95 and settings.kv_cache_bytes is None:
        where = settings.where["gpu_memory_utilization"]
        text = f"--gpu-memory-utilization {utilization:g} is above 0.95, and graph memory is only estimated beforehand"
        found.append(Note(text, where, Edit("fraction", fraction=0.95)))
    if utilization is not None and settings.kv_cache_bytes is not None:
        where = settings.where["kv_cache_memory_bytes"]
        found.append(Note("--kv-cache-memory-bytes bypasses --gpu-memory-utilization and the graph estimate", where))
    unknown = modes.support_of(settings.attention, device, settings.flash_attention) is None
    if settings.mode == "FULL" and settings.mode_explicit and unknown:
        text = "FULL graphs of batches that mix prefill and decode freeze their lengths, unless the attention backend"
        text += f" declares ALWAYS; {settings.attention or 'the backend, which is not named,'} is not known to"
        at = settings.where.get("compilation.cudagraph_mode")
        found.append(Note(text, at, Edit("mode", text="FULL_AND_PIECEWISE")))
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
