"""From TensorRT-LLM's settings to what is captured, what is reachable, and what changes on the way."""

from __future__ import annotations

from graphtune.engines.base import Edit
from graphtune.engines.options import Reading
from graphtune.engines.resolution import Note, PhaseRun, Reach, Resolution
from graphtune.engines.rules import EffectiveList, GraphCount
from graphtune.engines.tensorrt_llm import lists, rules
from graphtune.engines.tensorrt_llm.options import Settings

LIST = "cuda_graph_config.batch_sizes"


def resolve(settings: Settings, reading: Reading, *, older: bool) -> Resolution:
    """Everything lint looks at for one launch."""
    parsed = not reading.refusals
    listed = rules.configured_decode(settings.sizes, settings.largest, padding=settings.padding, powers_above_128=older)
    where = settings.where.get(LIST, "cuda_graph_config")
    if settings.graphs and listed.error is not None:
        reading.refuse(where, listed.error, "either of the two, or two that agree")
    for size in [size for size in settings.sizes or () if size < 1][:1]:
        reading.refuse(where, f"size {size} is not checked by the engine", "at least 1")
    for size in [size for size in settings.prefill_sizes or () if size < 1][:1]:
        name = "prefill_capture_num_tokens"
        reading.refuse(settings.where.get(name, name), f"size {size} is dropped", "at least 1")
    cap = lists.decode_cap(settings.serving)
    if settings.autodeploy:
        _autodeploy_limits(settings, listed, cap, reading, where)
    decode = decode_run(settings, listed, cap)
    return Resolution(
        phases=(decode, prefill_run(settings)),
        refusals=tuple(reading.refusals),
        risks=risks(settings),
        assumptions=assumptions(settings),
        unread=tuple(reading.unread),
        parsed=parsed,
        ranks=settings.serving.tp,
    )


def _autodeploy_limits(settings: Settings, listed: EffectiveList, cap: int, reading: Reading, where: str) -> None:
    """The AutoDeploy back end sizes its buffers by the batch limit and has no eager path above the largest size."""
    if listed.sizes and listed.sizes[-1] > cap:
        message = f"AssertionError: size {listed.sizes[-1]} is too large for buffers of {cap} requests (AutoDeploy)"
        reading.refuse(where, message, f"sizes up to {cap}")
    elif listed.sizes and listed.sizes[-1] < cap:
        message = f"AutoDeploy asserts at {listed.sizes[-1] + 1} requests: it has no eager path above its largest size"
        reading.refuse(where, message, f"a size of {cap}")


def decode_run(settings: Settings, listed: EffectiveList, cap: int) -> PhaseRun:
    effective = listed
    if not settings.autodeploy:
        effective = rules.effective_decode(listed, settings.serving, padding=settings.padding)
    stated = settings.serving.max_running_requests is not None
    text = f"max_batch_size {cap}" if stated else f"the engine's default max_batch_size, {cap} requests"
    return PhaseRun(
        "decode",
        settings.graphs,
        effective,
        Reach(cap, "requests", stated, text),
        "always" if settings.padding else "exact",
        GraphCount(len(effective.sizes), models=2 if settings.draft_model else 1),
        asked=settings.sizes or None,
        chosen=bool(settings.sizes or settings.largest),
        changes=effective.altered if settings.sizes or settings.largest else (),
    )


def prefill_run(settings: Settings) -> PhaseRun:
    tokens = settings.serving.max_batched_tokens or lists.DEFAULT_MAX_NUM_TOKENS
    listed = settings.prefill_sizes or lists.DEFAULT_PREFILL_SIZES
    effective = rules.effective_prefill(
        listed, settings.serving, max_num_tokens=tokens, max_seq_len=settings.max_seq_len
    )
    return PhaseRun(
        "prefill",
        settings.prefill_backend != "disabled" and bool(effective.sizes),
        effective,
        Reach(tokens, "tokens", settings.serving.max_batched_tokens is not None, f"steps of {tokens} tokens"),
        "always",
        GraphCount(len(effective.sizes)),
        asked=settings.prefill_sizes,
        chosen=settings.prefill_sizes is not None,
        changes=effective.altered if settings.prefill_sizes is not None else (),
    )


def risks(settings: Settings) -> tuple[Note, ...]:
    found = []
    fraction = settings.serving.mem_fraction
    if fraction is not None and fraction > 0.95:
        where = settings.where.get("free_gpu_memory_fraction", "--kv_cache_free_gpu_memory_fraction")
        text = f"free_gpu_memory_fraction {fraction:g} leaves little for graphs and activations"
        found.append(Note(text, where, Edit("fraction", fraction=0.9)))
    if settings.max_seq_len is not None:
        for size in settings.prefill_sizes or ():
            if size > settings.max_seq_len:
                found.append(Note(f"prefill size {size} is more than max_seq_len {settings.max_seq_len}", None))
                break
    return tuple(found)


def assumptions(settings: Settings) -> tuple[str, ...]:
    found = []
    if settings.serving.max_running_requests is None:
        found.append(f"max_batch_size is taken as {lists.DEFAULT_MAX_BATCH_SIZE}, the engine's default")
    if settings.serving.max_batched_tokens is None:
        found.append(f"max_num_tokens is taken as {lists.DEFAULT_MAX_NUM_TOKENS}, the engine's default")
    return tuple(found)
