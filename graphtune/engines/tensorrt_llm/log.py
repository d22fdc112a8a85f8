"""TensorRT-LLM's log messages. Its C++ lines carry no time; ranks stand in brackets."""

from __future__ import annotations

import re
from typing import Any

from graphtune.engines.events import Boot, CaptureBegin, CaptureProgress, KVSize, Running, Settings
from graphtune.engines.log_fields import gib, whole
from graphtune.engines.log_lines import rank
from graphtune.engines.log_shapes import CUT, Found, Shape, prefix

_WARMUP = re.compile(r"generation[- ]only CUDA graph warmup for batch size ?= ?(\d{1,7})\b")
_CONTEXT = re.compile(r"'num_ctx_tokens': (\d{1,9})")
_VERSION = re.compile(r"TensorRT[- ]LLM version: ?(\d[\w.+-]{0,40})")


def boot(text: str, at: int) -> Found:
    found = _VERSION.search(text)
    when, who = prefix(text, at)
    return Boot(when, who, "tensorrt_llm", found[1], restart=True) if found else None


def creating(text: str, at: int) -> Found:
    count = whole(text[at:], "instances for")
    when, who = prefix(text, at)
    return CUT if count is None else CaptureBegin(when, who, "target", "decode", "full", count=count)


def warmup(text: str, at: int) -> Found:
    """One captured size, largest first; newer lines add the draft length."""
    found = _WARMUP.search(text)
    if found is None:
        return CUT
    return CaptureProgress(rank(text[:at]), None, int(found[1]), "requests", None, None, None)


def kv_allocated(text: str, at: int) -> Found:
    """The KV cache. The first such line is a dry run that sizes it; a later one replaces it."""
    if "KV cache" not in text:
        return None
    size = gib(text[at:], "Allocated")
    tokens = re.search(r"paged KV cache \((\d{1,12})\)", text)
    if size is None or tokens is None:
        return CUT
    return KVSize(rank(text[:at]), int(tokens[1]), size)


def limits(text: str, at: int) -> Found:
    values: dict[str, Any] = {}
    for key in ("max_seq_len", "max_num_requests", "max_num_tokens", "max_batch_size"):
        value = whole(text, f"{key}=")
        if value is not None:
            values[key] = value
    return Settings(rank(text[:at]), values) if values else CUT


def iteration(text: str, at: int) -> Found:
    """One line per step. A step with prompt tokens in it is no decode step."""
    requests = whole(text[at:], "num_scheduled_requests")
    context = _CONTEXT.search(text)
    if requests is None or context is None:
        return CUT
    if int(context[1]) > 0 or requests == 0:
        return ()
    when, who = prefix(text, at)
    return Running(when, who, requests, None, None, 1, "iterations")


SHAPES: tuple[Shape, ...] = tuple(
    Shape(anchor, handler, "tensorrt_llm")
    for anchor, handler in (
        (b"LLM version:", boot),
        (b"Creating CUDA graph instances", creating),
        (b"only CUDA graph warmup", warmup),
        (b"[MemUsageChange] Allocated", kv_allocated),
        (b"max_num_requests=", limits),
    )
)
HOT: tuple[Shape, ...] = (Shape(b"num_scheduled_requests", iteration, "tensorrt_llm"),)
