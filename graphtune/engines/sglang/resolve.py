"""From SGLang's settings to what is captured, what is reachable, and what changes on the way."""

from __future__ import annotations

from graphtune.engines.base import DeviceFacts, Edit, Padding
from graphtune.engines.options import Reading
from graphtune.engines.resolution import ModeRun, Note, PhaseRun, Reach, Resolution
from graphtune.engines.rules import GraphCount
from graphtune.engines.sglang import lists, rules
from graphtune.engines.sglang.downgrades import RULES
from graphtune.engines.sglang.options import Settings
from graphtune.graph_config import Downgraded, downgrade

PREFILL_CAP = 2.0


def resolve(settings: Settings, reading: Reading, device: DeviceFacts) -> Resolution:
    """Everything lint looks at for one launch on one device."""
    parsed = not reading.refusals
    config = downgrade(settings.config, settings.facts, RULES)
    if config.refused is not None:
        reading.refuse("--enable-memory-saver", config.refused, "prefill backend full or disabled")
    decode = decode_run(settings, config, device)
    prefill = prefill_run(settings, config, device)
    for run in (decode, prefill):
        if run.graphs and run.effective.error is not None:
            where = settings.where.get(f"cuda_graph_bs_{run.phase}", "--cuda-graph-config")
            reading.refuse(where, f"{run.effective.error}, at the end of start-up", "sizes of at least 1 that fit")
        bad = [size for size in run.asked or () if size < 1]
        if run.graphs and bad and run.effective.error is None:
            where = settings.where.get(f"cuda_graph_bs_{run.phase}", "--cuda-graph-config")
            reading.refuse(where, f"{run.phase} size {bad[0]} passes the engine's parser unchecked", "at least 1")
    return Resolution(
        phases=(decode, prefill),
        modes=mode_runs(settings, config, prefill),
        refusals=tuple(reading.refusals),
        risks=risks(settings),
        assumptions=assumptions(settings, device),
        unread=tuple(reading.unread),
        parsed=parsed,
        ranks=settings.serving.tp,
    )


def decode_run(settings: Settings, config: Downgraded, device: DeviceFacts) -> PhaseRun:
    serving, phase = settings.serving, config.runs.decode
    if phase.bs is not None:
        listed = phase.bs
    else:
        largest = lists.decode_max(device, serving) if phase.max_bs is None else phase.max_bs
        listed = lists.generate_decode(
            largest, padding=serving.padding is not False, speculative=serving.spec_tokens > 0
        )
    padding: Padding = "exact" if serving.padding is False else "always"
    effective = rules.effective_decode(listed, serving, settings.layout)
    models = 2 if serving.spec_tokens > 0 else 1
    return PhaseRun(
        "decode",
        phase.backend != "disabled",
        effective,
        decode_reach(settings),
        padding,
        GraphCount(len(effective.sizes), models=models),
        asked=phase.bs,
        chosen=phase.bs is not None or phase.max_bs is not None,
        changes=effective.altered if phase.bs is not None or phase.max_bs is not None else (),
    )


def decode_reach(settings: Settings) -> Reach:
    """Requests of the largest decode batch: stated, the default under speculation, or by the KV cache."""
    pool, stated = rules.request_pool(settings.serving), settings.serving.max_running_requests
    if stated is not None:
        each = f" over {settings.serving.dp} data-parallel ranks" if settings.serving.dp > 1 else ""
        return Reach(pool, "requests", True, f"--max-running-requests {stated}{each}")
    if pool is not None:
        return Reach(pool, "requests", False, f"speculation takes {lists.SPECULATIVE_MAX_RUNNING} requests by default")
    text = "--max-running-requests is not given: the engine takes 2048 to 4096, at most half the KV tokens"
    return Reach(None, "requests", False, text)


def prefill_max(settings: Settings, device: DeviceFacts) -> int:
    """The default largest prefill size in tokens."""
    chunk = lists.chunked_prefill_size(device, settings.serving)
    if settings.attention_dp:
        chunk = max(chunk // settings.serving.dp, 1) if chunk > 0 else chunk
    largest = chunk
    if settings.max_total_tokens is not None:
        largest = min(largest, settings.max_total_tokens)
    if "llama-2" in settings.model.lower():
        largest = min(largest, 4096)
    return largest


def prefill_run(settings: Settings, config: Downgraded, device: DeviceFacts) -> PhaseRun:
    serving, phase = settings.serving, config.runs.prefill
    chunk = lists.chunked_prefill_size(device, serving)
    if phase.bs is not None:
        listed = phase.bs
    else:
        listed = lists.generate_prefill(prefill_max(settings, device) if phase.max_bs is None else phase.max_bs)
    slots, variants = None, 1
    if phase.backend == "full":
        slots = rules.full_prefill_slots(serving, chunk, phase.full_prefill_max_req)
        capacity = phase.full_prefill_prefix_chunk_tokens
        if capacity is not None and serving.context_len is not None:
            variants = 1 + len(rules.chunked_prefix_variants(serving.context_len, capacity))
    effective = rules.effective_prefill(listed, serving, settings.layout, request_slots=slots)
    most = chunk if chunk > 0 else settings.max_prefill_tokens
    text = f"chunks of {chunk} tokens" if chunk > 0 else f"prompts are not cut; at most {most} tokens a batch"
    return PhaseRun(
        "prefill",
        phase.backend != "disabled" and bool(effective.sizes),
        effective,
        Reach(most, "tokens", serving.chunked_prefill_size is not None, text),
        "capped",
        GraphCount(len(effective.sizes), attention_variants=variants),
        asked=phase.bs,
        chosen=phase.bs is not None or phase.max_bs is not None,
        cap_factor=PREFILL_CAP,
        changes=effective.altered,
    )


def mode_runs(settings: Settings, config: Downgraded, prefill: PhaseRun) -> tuple[ModeRun, ...]:
    """Where the backend that runs is not the one asked for (or the default)."""
    found = [
        ModeRun(
            fired.phase,
            str(fired.before),
            str(fired.after),
            fired.reason + (" (this overrides an explicit choice)" if fired.overrode_lock else ""),
            (fired.phase, "backend") in settings.config.locked,
        )
        for fired in config.fired
    ]
    if config.runs.prefill.backend != "disabled" and not prefill.effective.sizes:
        reason = prefill.effective.changes[-1].reason if prefill.effective.changes else "the list is empty"
        explicit = ("prefill", "backend") in settings.config.locked
        found.append(ModeRun("prefill", config.runs.prefill.backend, "disabled", reason, explicit))
    return tuple(found)


def risks(settings: Settings) -> tuple[Note, ...]:
    found = []
    fraction = settings.serving.mem_fraction
    if fraction is not None and not 0 < fraction < 1:
        where = settings.where["mem_fraction_static"]
        found.append(Note(f"--mem-fraction-static {fraction} is taken without a check; it is a share of memory", where))
    elif fraction is not None and fraction > 0.95:
        where = settings.where["mem_fraction_static"]
        text = f"--mem-fraction-static {fraction:g} leaves little for activations and graphs"
        found.append(Note(text, where, Edit("fraction", fraction=0.95)))
    context = settings.serving.context_len
    for size in settings.config.prefill.bs or ():
        if context is not None and size > context:
            found.append(Note(f"prefill size {size} is more than one request's {context} tokens", "--context-length"))
            break
    return tuple(found)


def assumptions(settings: Settings, device: DeviceFacts) -> tuple[str, ...]:
    found = []
    if device.nvml_total_mib is None:
        found.append("the card is not named (--gpu-mem), so the engine's defaults are those for unknown memory")
    if settings.facts.speculative and "speculative_num_draft_tokens" not in settings.where:
        found.append("--speculative-num-draft-tokens is not given: 4 tokens a request are assumed")
    if settings.attention_dp or settings.layout.deepep:
        found.append("sizes are not aligned to attention ranks here: whether they are depends on the model")
    if "enable_pdmux" in settings.where:
        found.append("with --enable-pdmux the list is captured once for each stream group: one is counted")
    if "enable_lora" in settings.where or "lora_paths" in settings.where:
        found.append("a server that captures with and without adapters records twice the graphs counted")
    return tuple(found)
