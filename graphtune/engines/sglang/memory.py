"""SGLang's memory reserve: what it leaves outside ``--mem-fraction-static``, before anything is measured."""

from __future__ import annotations

from graphtune.engines.base import DeviceFacts, Serving
from graphtune.engines.sglang import lists

FRACTION_OF_UNKNOWN_DEVICE = 0.95
LARGE_DEVICE_MIB = 61440
MAX_PREFILL_TOKENS = 16384
"""Tokens of one prefill when prompts are not cut."""

LEAST_POOL, MOST_POOL = 2048, 4096
POOL_PER_CONTEXT = 512


def reserve_mib(
    device: DeviceFacts,
    serving: Serving,
    *,
    decode_graphs: bool = True,
    prefill_graphs: bool = True,
    decode_max: int | None = None,
    prefill_buckets: int | None = None,
    attention_dp: int = 0,
    mla: bool = False,
    deepep: bool = False,
    xpu: bool = False,
) -> float:
    """The reserve in MiB: constant, activations, ranks and a guess at graphs.

    The graph term grows with the largest decode size and with the number of prefill sizes, not with the number of
    decode sizes. ``decode_max`` and ``prefill_buckets`` default to the engine's own lists; ``deepep`` counts breakable
    prefill graphs.
    """
    largest = lists.decode_max(device, serving) if decode_max is None else decode_max
    chunk = lists.chunked_prefill_size(device, serving)
    buckets = len(lists.generate_prefill(chunk)) if prefill_buckets is None else prefill_buckets
    if serving.role == "decode":
        tokens = max((serving.max_running_requests or largest or 1) * serving.width, 2048)
    else:
        tokens = max(chunk if chunk > 0 else serving.max_batched_tokens or MAX_PREFILL_TOKENS, 2048)
    graphs = 0.0
    if decode_graphs and serving.role != "prefill":
        graphs += 2 * largest
    if attention_dp and serving.role != "prefill":
        graphs += 3 * largest * attention_dp + (1.5 * largest * attention_dp if largest > 300 else 0)
    if prefill_graphs and serving.role != "decode":
        graphs += (1536 if mla else 8 * buckets) + (1024 if deepep else 0)
    reserve = 512 + 1.5 * tokens + 128 * serving.tp * serving.pp + graphs
    if device.nvml_total_mib is not None and device.nvml_total_mib > LARGE_DEVICE_MIB:
        reserve = max(reserve, 10240)
    if deepep and decode_graphs and serving.role != "prefill":
        reserve += 2048
    return reserve + (2048 if xpu else 0)


def post_capture_reserve_mib(serving: Serving, *, multimodal_on_mib: int | None = None) -> float:
    """The reserve in MiB when the KV cache is sized after capture, which is off by default."""
    less = 8192 / multimodal_on_mib if multimodal_on_mib else 0.0
    return 1536 + 128 * serving.tp * serving.pp - less


def multimodal_factor(vision_layers: int, vision_hidden: int) -> float:
    """What the fraction of a multimodal model is multiplied by: less for a larger vision tower than 24 layers of
    1024, more for a smaller one, within bounds."""
    relative = vision_layers * vision_hidden**2 / (24 * 1024**2)
    return 0.95 * min(max(1 - 0.1 * (relative - 1), 0.8), 1.05)


def request_pool(kv_tokens: int, serving: Serving) -> int:
    """Running requests of a data-parallel worker: at most half the KV tokens, and what user or context allow."""
    most = kv_tokens // 2
    if serving.max_running_requests is not None:
        return min(max(1, serving.max_running_requests // serving.dp), most)
    if serving.context_len is None:
        return min(MOST_POOL, most)
    wanted = kv_tokens * POOL_PER_CONTEXT // serving.context_len
    return min(max(LEAST_POOL, min(wanted, MOST_POOL)), most)


def mem_fraction_static(device: DeviceFacts, serving: Serving, *, reserve: float | None = None) -> float:
    """The fraction of memory free before loading that weights and KV cache get, rounded to three places; 0 on a card
    that the reserve alone fills."""
    if serving.mem_fraction is not None:
        return serving.mem_fraction
    if device.nvml_total_mib is None:
        return FRACTION_OF_UNKNOWN_DEVICE
    kept = reserve_mib(device, serving) if reserve is None else reserve
    return max(0.0, round((device.nvml_total_mib - kept) / device.nvml_total_mib, 3))
