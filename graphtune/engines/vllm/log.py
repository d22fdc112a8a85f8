"""vLLM's log messages, from V0 to the newest. Amounts are GiB; dates have no year."""

from __future__ import annotations

import ast
import re
from typing import Any

from graphtune.engines.events import (
    Boot,
    CaptureEnd,
    CaptureProgress,
    Event,
    GraphEstimate,
    KVSize,
    ListChange,
    Memory,
    ModeChange,
    Running,
    Settings,
    Step,
    Utilization,
)
from graphtune.engines.log_fields import gib, number, sizes, whole
from graphtune.engines.log_lines import known_rank, rank
from graphtune.engines.log_shapes import CUT, Found, Shape, prefix

STATS_INTERVAL_S = 10.0
"""Readings of the running batch are printed every ten seconds unless ``VLLM_LOG_STATS_INTERVAL`` says otherwise."""

_RUNNING = re.compile(r"Running: (\d{1,7}) reqs")
_ENGINE = re.compile(r"\bEngine (\d{1,5}): ")
_VERSION = re.compile(r"\(v(\d[\w.+-]{0,40})\)|server version v?(\d[\w.+-]{0,40})")
_MODE_NAME = re.compile(r"CUDAGraphMode\.([A-Z_]+)")
_SETTING = re.compile(r"setting cudagraph_mode=([A-Z_]+)(?: because (.{1,200}))?")
_SUPPORT = re.compile(r"(?:for|with) (?:the )?attention backend (\w+)(?: \(support: (?:AttentionCGSupport\.)?(\w+)\))?")
_COUNT = re.compile(r"\b([A-Z_]+)=(\d{1,6})(?: \(largest=(\d{1,7})\))?")
_UTILIZATION = re.compile(r"gpu[-_]memory[-_]utilization(?:=| to )(\d(?:\.\d+)?)")
_ROW = re.compile(r"\|\s*(\d{1,9})\s*\|\s*(\d{1,9})\s*\|\s*(\d{1,9})\s*\|\s*([A-Z_]+)\s*\|\s*(\d{1,15})\s*\|")
_BAR = re.compile(r"Capturing CUDA graphs? ?(?:shapes)?(?:\(([^)]{1,60})\))?[^:]{0,20}:\s*\d+%\|[^|]*\| (\d+)/(\d+)")
_BLOCKS = re.compile(r"# (?:GPU|cuda) blocks: (\d{1,9})")
_LISTS = re.compile(r"\[[\d,\s]{1,20000}\]")


_USUAL = rb"(\([^()]*\) )?(?:INFO|WARNING) (\d\d-\d\d \d\d:\d\d:\d\d) \[[^\]'\"]*\] "
_USUAL_RUNNING = re.compile(
    _USUAL
    + rb"(?:Engine (\d{1,5}): )?Avg prompt throughput: [\d.]+ tokens/s, Avg generation throughput: [\d.]+ tokens/s, "
    rb"Running: (\d{1,7}) reqs,[^|]*$"
)
_USUAL_ROW = re.compile(_USUAL + rb"\| *(\d{1,9}) *\| *(\d{1,9}) *\| *\d{1,9} *\| *([A-Z_]+) *\| *(\d{1,15}) *\|\s*$")


def usual_running(line: bytes) -> Event | None:
    """A reading of one engine in the form of recent versions."""
    found = _USUAL_RUNNING.match(line)
    if found is None:
        return None
    process, when, engine, requests = found.groups()
    who = known_rank(process) if process else ""
    if engine and not who:
        who = f"DP{int(engine)}"
    return Running(when.decode(), who, int(requests), None, None, STATS_INTERVAL_S, "seconds")


def usual_row(line: bytes) -> Event | None:
    """A row of a step table in the form of recent versions."""
    found = _USUAL_ROW.match(line)
    if found is None:
        return None
    process, _, raw, padded, mode, steps = found.groups()
    return Step(known_rank(process) if process else "", int(raw), int(padded), mode.decode(), int(steps))


def running(text: str, at: int) -> Found:
    """The periodic reading of the running batch. Over several engines at once it is a sum, not a batch."""
    found = _RUNNING.search(text)
    if found is None:
        return CUT
    when, who = prefix(text, at)
    engine = _ENGINE.search(text)
    if engine and not who:
        who = f"DP{int(engine[1])}"
    aggregated = "Engines Aggregated" in text
    return Running(when, who, int(found[1]), None, None, STATS_INTERVAL_S, "seconds", aggregated)


def boot(text: str, at: int) -> Found:
    """The line with version and configuration. Only the few settings about graphs are kept of it."""
    when, who = prefix(text, at)
    version = _VERSION.search(text)
    values: dict[str, Any] = {}
    for key, name in (
        ("tensor_parallel_size=", "tp_size"),
        ("data_parallel_size=", "dp_size"),
        ("max_seq_len=", "max_model_len"),
        ("num_spec_tokens=", "spec_tokens"),
        ("num_speculative_tokens=", "spec_tokens"),
        ("'max_cudagraph_capture_size': ", "max_cudagraph_capture_size"),
    ):
        value = whole(text, key)
        if value is not None:
            values[name] = value
    listed = sizes(text, "'cudagraph_capture_sizes'") or sizes(text, '"cudagraph_capture_sizes"')
    if listed is not None:
        values["cudagraph_capture_sizes"] = tuple(sorted(listed))
    mode = _MODE_NAME.search(text)
    if mode:
        values["cudagraph_mode"] = mode[1]
    eager = re.search(r"\benforce_eager=(True|False)", text)
    if eager:
        values["enforce_eager"] = eager[1] == "True"
    number_of = (version[1] or version[2]) if version else None
    return Boot(when, who, "vllm", number_of, values, restart="Initializing" in text)


_KEPT_ARGS = frozenset(
    {
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "gpu_memory_utilization",
        "tensor_parallel_size",
        "enforce_eager",
        "performance_mode",
    }
)


def non_default_args(text: str, at: int) -> Found:
    """The arguments that were given, the first line of a start. Anything that is not about graphs is dropped."""
    start = text.find("{", at)
    try:
        given = ast.literal_eval(text[start:].strip()) if start >= 0 else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        given = None
    if not isinstance(given, dict):
        return CUT
    values = {key: value for key, value in given.items() if key in _KEPT_ARGS and isinstance(value, int | float | str)}
    when, who = prefix(text, at)
    return Boot(when, who, "vllm", settings=values, restart=True)


def batched_tokens(text: str, at: int) -> Found:
    value = whole(text, "max_num_batched_tokens=")
    return () if value is None else Settings(rank(text[:at]), {"max_num_batched_tokens": value})


def attention_backend(text: str, at: int) -> Found:
    found = re.search(r"Using (\w+) attention backend", text)
    return Settings(rank(text[:at]), {"attention_backend": found[1]}) if found else None


def attention_version(text: str, at: int) -> Found:
    version = whole(text, "FlashAttention version")
    return () if version is None else Settings(rank(text[:at]), {"flash_attention": version})


def profiling(text: str, at: int) -> Found:
    """How many graphs of each mode will be captured, and the largest size of each."""
    counts = {name: (int(n), int(top) if top else None) for name, n, top in _COUNT.findall(text[at:])}
    return GraphEstimate(rank(text[:at]), counts=counts) if counts else CUT


def estimated(text: str, at: int) -> Found:
    """The estimate; on models with a large transient it can be negative."""
    size = gib(text[at:], "graph memory")
    return CUT if size is None else GraphEstimate(rank(text[:at]), estimated_bytes=size)


def pool_memory(text: str, at: int) -> Found:
    found = re.search(r"(-?\d+(?:\.\d+)?) GiB \(actual\), (-?\d+(?:\.\d+)?) GiB \(estimated\)", text)
    if found is None:
        return CUT
    return GraphEstimate(rank(text[:at]), round(float(found[2]) * (1 << 30)), round(float(found[1]) * (1 << 30)))


def capturing_finished(text: str, at: int) -> Found:
    """All captures of the boot together: older versions do not say how much memory they took."""
    seconds = number(text[at:], "finished in")
    if seconds is None:
        return CUT
    when, who = prefix(text, at)
    return CaptureEnd(when, who, "target", None, seconds, gib(text[at:], "took"), None)


def capture_bar(text: str, at: int) -> Found:
    bars = list(_BAR.finditer(text))
    if not bars:
        return None
    last = bars[-1]
    return CaptureProgress(rank(text[:at]), last[1], None, "tokens", None, int(last[2]), int(last[3]))


def available_kv(text: str, at: int) -> Found:
    size = gib(text[at:], "KV cache memory")
    return CUT if size is None else KVSize(rank(text[:at]), None, size)


def kv_tokens(text: str, at: int) -> Found:
    """Tokens of the KV cache. The count of a cache on the host alone is not the device's."""
    device = text[:at].rsplit("] ", 1)[-1]
    if "GPU" not in device:
        return ()
    tokens = re.search(r"KV cache size: ([\d,]{1,20}) tokens", text)
    return KVSize(rank(text[:at]), int(tokens[1].replace(",", ""))) if tokens else CUT


def kv_blocks(text: str, at: int) -> Found:
    found = _BLOCKS.search(text)
    return KVSize(rank(text[:at]), None, blocks=int(found[1])) if found else CUT


def profile_v0(text: str, at: int) -> Found:
    """The memory profile of V0: weights, other, activation peak, and what is left for the KV cache."""
    who = rank(text[:at])
    found: list[Event] = []
    weights = gib(text, "model weights take")
    peak = gib(text, "activation peak memory takes")
    rest = gib(text, "reserved for KV Cache is")
    if weights is not None:
        found.append(Memory(who, "weights", weights))
    if peak is not None:
        found.append(Memory(who, "activation_peak", peak))
    if rest is not None:
        found.append(KVSize(who, None, rest))
    return found or CUT


def model_loaded(text: str, at: int) -> Found:
    size = gib(text[at:], "took")
    return () if size is None else Memory(rank(text[:at]), "weights", size)


def free_on_device(text: str, at: int) -> Found:
    """The closing summary: what each part took, and what to write instead of a utilization."""
    who = rank(text[:at])
    found: list[Event] = []
    total = re.search(r"\((\d+(?:\.\d+)?)/(\d+(?:\.\d+)?) GiB\) on startup", text)
    if total:
        found.append(Memory(who, "free_at_start", round(float(total[1]) * (1 << 30))))
        found.append(Memory(who, "total", round(float(total[2]) * (1 << 30))))
    peak = re.search(r"(\d+(?:\.\d+)?) GiB for peak activation", text)
    if peak:
        found.append(Memory(who, "activation_peak", round(float(peak[1]) * (1 << 30))))
    return found or CUT


def utilization(text: str, at: int) -> Found:
    """What utilization is set and what the engine suggests, in any of the notice's wordings."""
    values = [float(value) for value in _UTILIZATION.findall(text)]
    if not values:
        return ()
    suggested = re.search(r"increase (?:--)?gpu[-_]memory[-_]utilization to (\d\.\d+)", text)
    return Utilization(rank(text[:at]), values[0], float(suggested[1]) if suggested else None)


def mode_change(text: str, at: int) -> Found:
    """Asked for one mode, another is set. The asked one is not always named."""
    runs = _SETTING.search(text)
    if runs is None:
        return CUT
    asked = _MODE_NAME.search(text)
    support = _SUPPORT.search(text)
    reason = None
    if support:
        reason = f"attention backend {support[1]}" + (f" supports {support[2]}" if support[2] else "")
    elif runs[2]:
        reason = runs[2]
    return ModeChange(rank(text[:at]), asked[1] if asked else None, runs[1], reason)


def list_overridden(text: str, at: int) -> Found:
    found = [tuple(int(n) for n in part.strip("[]").split(",") if n.strip()) for part in _LISTS.findall(text)]
    before, after = (found[0], found[1]) if len(found) >= 2 else (None, None)
    reason = "cudagraph_capture_sizes is overridden by the engine's check"
    return ListChange(rank(text[:at]), reason, before, after, after[-1] if after else None)


def list_truncated(text: str, at: int) -> Found:
    top = whole(text, "max_cudagraph_capture_size to")
    return CUT if top is None else ListChange(rank(text[:at]), "the maximum is cut to the grid", top=top)


def list_capped(text: str, at: int) -> Found:
    found = re.search(r"from max (\d{1,7}) to (\d{1,7}) to fit Mamba cache blocks", text)
    if found is None:
        return CUT
    return ListChange(rank(text[:at]), "sizes are capped to the Mamba cache blocks", top=int(found[2]))


def step_row(text: str, at: int) -> Found:
    found = _ROW.search(text)
    if found is None:
        return None
    return Step(rank(text[:at]), int(found[1]), int(found[2]), found[4], int(found[5]))


def step_mode(text: str, at: int) -> Found:
    found = re.search(r"- Mode: ([A-Z_]+)\s*$", text)
    return Settings(rank(text[:at]), {"cudagraph_mode": found[1]}) if found else None


def step_sizes(text: str, at: int) -> Found:
    listed = sizes(text, "Capture sizes")
    return CUT if listed is None else Settings(rank(text[:at]), {"cudagraph_capture_sizes": tuple(sorted(listed))})


SHAPES: tuple[Shape, ...] = tuple(
    Shape(anchor, handler, "vllm")
    for anchor, handler in (
        (b"LLM engine (v", boot),
        (b"API server version", boot),
        (b"non-default args:", non_default_args),
        (b"Chunked prefill is enabled with", batched_tokens),
        (b" attention backend", attention_backend),
        (b"Using FlashAttention version", attention_version),
        (b"Profiling CUDA graph memory", profiling),
        (b"Estimated CUDA graph memory", estimated),
        (b"CUDA graph pool memory", pool_memory),
        (b"Graph capturing finished", capturing_finished),
        (b"Capturing CUDA graph", capture_bar),
        (b"Available KV cache memory", available_kv),
        (b"KV cache size:", kv_tokens),
        (b" blocks: ", kv_blocks),
        (b"model weights take", profile_v0),
        (b"Model loading took", model_loaded),
        (b"Loading model weights took", model_loaded),
        (b"Free memory on device", free_on_device),
        (b"memory-utilization", utilization),
        (b"setting cudagraph_mode=", mode_change),
        (b"is overridden by config", list_overridden),
        (b"Truncating max_cudagraph_capture_size", list_truncated),
        (b"Capping cudagraph capture sizes", list_capped),
        (b"- Mode: ", step_mode),
        (b"- Capture sizes: ", step_sizes),
    )
)
HOT: tuple[Shape, ...] = (
    Shape(b"Avg prompt throughput", running, "vllm", usual_running),
    Shape(b" | ", step_row, "vllm", usual_row),
)
