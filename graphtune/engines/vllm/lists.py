"""vLLM's own capture lists. Every size is in tokens, for decode and prefill alike: one list serves both."""

from __future__ import annotations

from dataclasses import dataclass

from graphtune.engines.base import DeviceFacts, Serving
from graphtune.engines.grids import ascending, steps

DEFAULT_UTILIZATION = 0.92


@dataclass(frozen=True)
class Limits:
    """Scheduler limits that the engine settled on: running requests and tokens per step."""

    max_num_seqs: int
    max_num_batched_tokens: int


def limits(device: DeviceFacts, serving: Serving) -> Limits:
    """The scheduler's limits: given, or by device memory and use (server or offline), doubled in throughput mode.

    Unknown memory counts as a small device, as the engine counts a device it cannot read.
    """
    gib = (device.nvml_total_mib or 0) / 1024
    name = (device.name or "").lower()
    if gib >= 160:
        tokens, requests = 16384, 1024
    elif gib >= 70 and "a100" not in name and "gb10" not in name:
        tokens, requests = (16384 if serving.offline else 8192), 1024
    else:
        tokens, requests = (8192 if serving.offline else 2048), 256
    factor = 2 if serving.performance_mode == "throughput" else 1
    max_seqs = serving.max_running_requests
    if max_seqs is None:
        max_seqs = requests * factor
    batched = serving.max_batched_tokens
    if batched is None:
        batched = tokens * factor
        if serving.context_len is not None:
            batched = min(batched, max_seqs * serving.context_len)
    if serving.max_running_requests is None:
        max_seqs = min(max_seqs, batched)
    return Limits(max_seqs, batched)


def ceiling(device: DeviceFacts) -> int:
    """The largest default size: 1024 tokens on data-centre Blackwell (compute capability 10.x), else 512."""
    capability = device.compute_capability
    return 1024 if capability is not None and capability[0] == 10 else 512


def default_max(device: DeviceFacts, serving: Serving) -> int:
    """The default ``max_cudagraph_capture_size`` in tokens."""
    of = limits(device, serving)
    return min(of.max_num_seqs * serving.width * 2, ceiling(device), of.max_num_batched_tokens)


def grid(largest: int, *, interactivity: bool = False) -> tuple[int, ...]:
    """The fixed grid of token counts up to ``largest``: 100 ends at 96."""
    small = steps(1, min(largest, 32), 1) if interactivity else (n for n in (1, 2, 4) if n <= largest)
    return ascending(small, steps(8, min(largest, 255), 8), steps(256, largest, 16))


def generate(device: DeviceFacts, serving: Serving, largest: int | None = None) -> tuple[int, ...]:
    """The list when the user gives none; ``largest`` is the user's maximum, if there is one.

    Sizes of whole decode batches are added only under the default maximum; the step's token limit always.
    """
    of = limits(device, serving)
    top = default_max(device, serving) if largest is None else min(largest, of.max_num_batched_tokens)
    parts = [grid(top, interactivity=serving.performance_mode == "interactivity")]
    if of.max_num_batched_tokens <= top:
        parts.append((of.max_num_batched_tokens,))
    if largest is None:
        parts.append(uniform_decode(of, serving.width, top, ceiling(device)))
    return ascending(*parts)


def uniform_decode(of: Limits, width: int, top: int, cap: int) -> tuple[int, ...]:
    """Token counts of decode batches in which every request has ``width`` rows, up to ``top``."""
    limit = min(of.max_num_seqs, cap)
    requests = (of.max_num_seqs,) if width == 1 else ascending(grid(limit), (limit,))
    return tuple(n * width for n in requests if n * width <= top)
