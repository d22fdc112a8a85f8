"""SGLang's log messages, from the oldest wording to the newest. Amounts in "GB" are GiB."""

from __future__ import annotations

import re
from typing import Any

from graphtune.engines.base import Unit
from graphtune.engines.events import (
    Boot,
    CaptureBegin,
    CaptureEnd,
    CapturePhase,
    CaptureProgress,
    CaptureSizes,
    Event,
    KVSize,
    Memory,
    Prefill,
    PrefillGraphsOff,
    Role,
    Running,
    Settings,
)
from graphtune.engines.log_fields import gib, number, sizes, whole
from graphtune.engines.log_lines import known_rank, rank, stamp
from graphtune.engines.log_shapes import CUT, Found, Shape, prefix

DECODE_LOG_INTERVAL = 40
"""Decode lines are printed every 40th iteration unless ``--decode-log-interval`` says otherwise."""

_REQUESTS = re.compile(r"#running-req: ?(\d{1,7})\s*(?:,|$)")
_TOKENS = re.compile(r"#(?:full )?token: ?(\d{1,12})\s*,")
_GRAPH = re.compile(r"(?:cuda|npu|cpu|xpu|musa) graph: ?(True|False)\b")
_NEW_TOKENS = re.compile(r"#new-token: ?(\d{1,9})\s*,")
_NEW_REQUESTS = re.compile(r"#new-seq: ?(\d{1,7})\s*,")
_PREFIX = re.compile(r"\[(?:(\d{4}-\d\d-\d\d) )?(\d\d:\d\d:\d\d)((?: [A-Z]+\d+)*)\] ?$")
_CAPTURE = re.compile(
    r"(?:Capture )?((?:[\w-]+ ){0,5}?)(?:(?:cuda|cpu|npu|xpu|hip|musa) )?graph (begin|end)\b", re.IGNORECASE
)
_STEP = re.compile(r"\bstep=(\d{1,4})\b")
_PROGRESS = re.compile(
    r"Capturing (?:batches|num tokens) ?\((bs|num_tokens)=(\d{1,9})(?: avail_mem=(\d+(?:\.\d+)?) GB)?[^)]*\)"
    r"(?::\s*\d+%\|[^|]*\| (\d+)/(\d+))?"
)
_BAR = "Capturing "
_TRUTH = {"True": True, "False": False, b"True": True, b"False": False}
_USUAL = rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)((?: [A-Z]+\d+)*)\] "
_USUAL_DECODE = re.compile(
    _USUAL + rb"Decode batch[.,] #running-req: (\d{1,7}), #token: (\d{1,12}), token usage: [\d.]+,"
    rb"(?: accept len: [\d.]+,)?(?: accept rate: [\d.]+,)? cuda graph: (True|False),[^\[]*$"
)
_USUAL_PREFILL = re.compile(
    _USUAL + rb"Prefill batch[.,] #new-seq: (\d{1,7}), #new-token: (\d{1,9}), [^\[]*?cuda graph: (True|False)\b[^\[]*$"
)


def _stamped(before: str) -> tuple[str | None, str]:
    """Time and rank of the usual prefix, quickly; any other prefix by search."""
    found = _PREFIX.search(before)
    if found is None:
        return stamp(before), rank(before)
    return (f"{found[1]} {found[2]}" if found[1] else found[2]), known_rank(found[3].encode())


def usual_decode(line: bytes) -> Event | None:
    """A decode line in the form of recent versions."""
    found = _USUAL_DECODE.match(line)
    if found is None:
        return None
    when, written, requests, tokens, graph = found.groups()
    return Running(
        when.decode(), known_rank(written), int(requests), int(tokens), _TRUTH[graph], DECODE_LOG_INTERVAL, "iterations"
    )


def usual_prefill(line: bytes) -> Event | None:
    """A prefill line in the form of recent versions."""
    found = _USUAL_PREFILL.match(line)
    if found is None:
        return None
    when, written, requests, tokens, graph = found.groups()
    return Prefill(when.decode(), known_rank(written), int(requests), int(tokens), _TRUTH[graph])


def decode_batch(text: str, at: int) -> Found:
    """``Decode batch``: running requests, KV tokens, and whether a graph served it (older lines do not say)."""
    requests = _REQUESTS.search(text, at)
    if requests is None or text.find("Decode batch", at + 12) >= 0:
        return CUT
    graph = _GRAPH.search(text, at)
    if graph is None and "throughput" not in text and "#queue-req:" not in text:
        return CUT
    tokens = _TOKENS.search(text, at)
    when, who = _stamped(text[:at])
    return Running(
        when,
        who,
        int(requests[1]),
        int(tokens[1]) if tokens else None,
        _TRUTH[graph[1]] if graph else None,
        DECODE_LOG_INTERVAL,
        "iterations",
    )


def prefill_batch(text: str, at: int) -> Found:
    """``Prefill batch``: new tokens of one chunk, and whether a graph served it."""
    tokens = _NEW_TOKENS.search(text, at)
    if tokens is None or text.find("Prefill batch", at + 13) >= 0:
        return CUT
    requests, graph = _NEW_REQUESTS.search(text, at), _GRAPH.search(text, at)
    when, who = _stamped(text[:at])
    return Prefill(
        when,
        who,
        int(requests[1]) if requests else None,
        int(tokens[1]),
        _TRUTH[graph[1]] if graph else None,
    )


def _kind(what: str) -> tuple[Role, CapturePhase]:
    words = what.lower()
    role: Role = "draft" if "draft" in words or "mtp" in words else "target"
    for phase in ("verify", "extend"):
        if phase in words:
            return role, "verify" if phase == "verify" else "extend"
    return role, "prefill" if "prefill" in words or "piecewise" in words else "decode"


def capture(text: str, at: int) -> Found:
    """Begin or end of a capture, in all its wordings."""
    found = _CAPTURE.search(text)
    if found is None:
        return None
    when, who = prefix(text, found.start())
    role, phase = _kind(found[1])
    step = _STEP.search(text, found.start())
    step_number = int(step[1]) if step else None
    rest = text[found.start() :]
    available = gib(rest, "avail mem")
    if found[2].lower() == "end":
        seconds = number(rest, "elapsed") if "elapsed=" in rest else number(rest, "Time elapsed")
        return CaptureEnd(when, who, role, phase, seconds, gib(rest, "mem usage"), available, step_number)
    backend = re.search(r"\bbackend=(\w+)", rest)
    tokens = sizes(rest, "num_tokens=")
    unit: Unit = "tokens" if tokens is not None or phase == "prefill" else "requests"
    width = whole(rest, "num_tokens_per_req=") or whole(rest, "num_tokens_per_bs=")
    listed = tokens if tokens is not None else sizes(rest, "bs=")
    return CaptureBegin(
        when, who, role, phase, backend[1] if backend else None, listed, unit, width, available, step=step_number
    )


def capture_sizes(text: str, at: int) -> Found:
    """The list on a line of its own, as older versions print it."""
    unit: Unit = "tokens" if "num tokens" in text[at : at + 40] else "requests"
    listed = sizes(text, "num tokens" if unit == "tokens" else "graph bs")
    return CUT if listed is None else CaptureSizes(rank(text[:at]), listed, unit)


def progress(text: str, at: int) -> Found:
    """A progress bar over sizes; of several that were drawn over one another the last one counts."""
    last = _PROGRESS.match(text, at)
    if text.find(_BAR, at + 1) >= 0:
        last = next(reversed(list(_PROGRESS.finditer(text))), None)
    if last is None:
        return None
    unit: Unit = "requests" if last[1] == "bs" else "tokens"
    free = round(float(last[3]) * (1 << 30)) if last[3] else None
    done, total = (int(last[4]), int(last[5])) if last[4] else (None, None)
    return CaptureProgress(rank(text[:at]), None, int(last[2]), unit, free, done, total)


def kv_allocated(text: str, at: int) -> Found:
    tokens = whole(text, "#tokens")
    if tokens is None:
        return CUT
    if "upper bound" in text:
        return ()
    parts = [gib(text, key) for key in ("K size", "V size")]
    total = gib(text, "KV size") if None in parts else sum(part for part in parts if part is not None)
    return KVSize(rank(text[:at]), tokens, total)


def limits(text: str, at: int) -> Found:
    """The line with ``max_total_num_tokens``: limits that the server settled on."""
    keys = ("chunked_prefill_size", "max_prefill_tokens", "max_running_requests", "context_len")
    values: dict[str, Any] = {key: whole(text, f"{key}=") for key in keys}
    values = {key: value for key, value in values.items() if value is not None}
    tokens, who = whole(text, "max_total_num_tokens="), rank(text[:at])
    found: list[Event] = []
    if tokens is not None:
        found.append(KVSize(who, tokens))
    if values:
        found.append(Settings(who, values))
    return found or CUT


def memory_pool(text: str, at: int) -> Found:
    available = gib(text[at:], "avail mem")
    return CUT if available is None else Memory(rank(text[:at]), "available_after_kv", available)


def weights(text: str, at: int) -> Found:
    used = gib(text[at:], "mem usage")
    return () if used is None else Memory(rank(text[:at]), "weights", used)


# Settings of a start-up dump that concern graphs; nothing else of it is kept.
_DUMPED = (
    "tp_size",
    "pp_size",
    "dp_size",
    "max_running_requests",
    "chunked_prefill_size",
    "context_length",
    "cuda_graph_max_bs",
    "cuda_graph_max_bs_decode",
    "cuda_graph_max_bs_prefill",
    "speculative_num_draft_tokens",
    "decode_log_interval",
)


def server_args(text: str, at: int) -> Found:
    """The dump of all arguments at start-up."""
    values: dict[str, Any] = {}
    for key in _DUMPED:
        found = re.search(rf"\b{key}=(\d{{1,9}})\b", text)
        if found:
            values[key] = int(found[1])
    for key in ("cuda_graph_bs", "cuda_graph_bs_decode", "cuda_graph_bs_prefill"):
        listed = sizes(text, f"{key}=")
        if listed is not None:
            values[key] = listed
    fraction = re.search(r"\bmem_fraction_static=(0\.\d{1,6})", text)
    if fraction:
        values["mem_fraction_static"] = float(fraction[1])
    when, who = prefix(text, at)
    return Boot(when, who, "sglang", settings=values, restart=True)


def soft_boot(text: str, at: int) -> Found:
    """A worker starts: a new boot only after an earlier one has served or failed."""
    when, who = prefix(text, at)
    return Boot(when, who, "sglang")


def prefill_off(text: str, at: int) -> Found:
    reason = text[at:].split(" capture ", 1)[-1][:200]
    return PrefillGraphsOff(rank(text[:at]), reason)


SHAPES: tuple[Shape, ...] = tuple(
    Shape(anchor, handler, "sglang")
    for anchor, handler in (
        (b"raph begin", capture),
        (b"raph end", capture),
        (b"graph bs [", capture_sizes),
        (b"graph num tokens", capture_sizes),
        (b"Capturing batches", progress),
        (b"Capturing num tokens", progress),
        (b"KV Cache is allocated", kv_allocated),
        (b"KV Cache VA upper bound", kv_allocated),
        (b"KV cache allocated", kv_allocated),
        (b"max_total_num_tokens=", limits),
        (b"Memory pool end", memory_pool),
        (b"Load weight end", weights),
        (b"server_args=ServerArgs(", server_args),
        (b"Init torch distributed begin", soft_boot),
        (b"Disable prefill CUDA graph", prefill_off),
    )
)
HOT: tuple[Shape, ...] = (
    Shape(b"Decode batch", decode_batch, "sglang", usual_decode),
    Shape(b"Prefill batch", prefill_batch, "sglang", usual_prefill),
)
