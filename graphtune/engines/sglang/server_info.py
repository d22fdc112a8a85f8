"""SGLang's ``/server_info`` (older: ``/get_server_info``), which says the same things as a log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphtune.engines.base import GIB
from graphtune.engines.events import Boot, CaptureEnd, CapturePhase, Event, KVSize, Memory, Role

_NUMBERS = (
    "tp_size",
    "pp_size",
    "dp_size",
    "max_running_requests",
    "chunked_prefill_size",
    "context_length",
    "mem_fraction_static",
    "cuda_graph_max_bs",
    "cuda_graph_max_bs_decode",
    "cuda_graph_max_bs_prefill",
    "speculative_num_draft_tokens",
    "decode_log_interval",
)
_LISTS = ("cuda_graph_bs", "cuda_graph_bs_decode", "cuda_graph_bs_prefill")
_PHASES: dict[str, tuple[Role, CapturePhase]] = {
    "prefill": ("target", "prefill"),
    "decode": ("target", "decode"),
    "target_verify": ("target", "verify"),
    "draft_prefill": ("draft", "prefill"),
    "draft_decode": ("draft", "decode"),
    "draft_extend": ("draft", "extend"),
}


def looks_like(head: bytes) -> bool:
    """Whether the beginning of a file is such a JSON: an object with keys that no log line has."""
    if not head.lstrip().startswith(b"{"):
        return False
    return any(key in head for key in (b'"internal_states"', b'"max_total_num_tokens"', b'"cuda_graph_config"'))


def events(info: Any) -> list[Event]:
    """Events of the JSON object; only what concerns graphs is looked at. Amounts in GB are GiB."""
    if not isinstance(info, Mapping):
        return []
    states = info.get("internal_states")
    first = states[0] if isinstance(states, list) and states and isinstance(states[0], Mapping) else {}
    settings: dict[str, Any] = {}
    for key in _NUMBERS:
        value = _number(info.get(key))
        if value is not None:
            settings[key] = value
    for key in _LISTS:
        listed = info.get(key)
        if isinstance(listed, list) and listed and all(_number(size) is not None for size in listed):
            settings[key] = tuple(int(size) for size in listed)
    running = _number(first.get("effective_max_running_requests_per_dp"))
    if running is not None:
        settings["max_running_requests"] = running
    version = info.get("version")
    found: list[Event] = [
        Boot(None, "", "sglang", version if isinstance(version, str) else None, settings, restart=True)
    ]
    memory = first.get("memory_usage")
    memory = memory if isinstance(memory, Mapping) else {}
    tokens = _number(memory.get("token_capacity")) or _number(info.get("max_total_num_tokens"))
    kv = _bytes(memory.get("kvcache"))
    if tokens is not None or kv is not None:
        found.append(KVSize("", None if tokens is None else int(tokens), kv))
    weights = _bytes(memory.get("weight"))
    if weights is not None:
        found.append(Memory("", "weights", weights))
    return found + _graphs(memory.get("graph", memory.get("cuda_graph")))


def _graphs(usage: Any) -> list[Event]:
    """Graph memory: one number, or one per phase."""
    if isinstance(usage, Mapping):
        found: list[Event] = []
        for name, (role, phase) in _PHASES.items():
            used = _bytes(usage.get(name))
            if used:
                found.append(CaptureEnd(None, "", role, phase, None, used, None))
        return found
    used = _bytes(usage)
    return [] if used is None else [CaptureEnd(None, "", "target", None, None, used, None)]


def _number(value: Any) -> float | int | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _bytes(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else round(number * GIB)
