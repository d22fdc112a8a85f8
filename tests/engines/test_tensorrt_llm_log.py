"""TensorRT-LLM's log messages, and failures that any engine prints."""

# ruff: noqa: E501 - log lines are as long as servers print them

from __future__ import annotations

import pytest

from graphtune.engines import events as ev
from tests.engines.log_messages import S, gib, only


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "[07/24/2025-08:18:47] [TRT-LLM] [I] Creating CUDA graph instances for 24 batch sizes.",
            ev.CaptureBegin("2025-07-24 08:18:47", "", "target", "decode", "full", count=24),
        ),
        (
            "[07/24/2025-08:18:47] [TRT-LLM] [RANK 1] [I] Run generation only CUDA graph warmup for batch size=4096",
            ev.CaptureProgress("RANK1", None, 4096, "requests", None, None, None),
        ),
        (
            "[TRT-LLM] [I] Run generation-only CUDA graph warmup for batch size=8, draft_len=3",
            ev.CaptureProgress("", None, 8, "requests", None, None, None),
        ),
        (
            "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 52.50 GiB for max tokens in paged KV cache (860320).",
            ev.KVSize("", 860320, gib(52.5)),
        ),
        (
            "[TRT-LLM] [I] [batchmgr][RANK 0] max_seq_len=8193, max_num_requests=32, max_num_tokens=8192, max_batch_size=32",
            ev.Settings(
                "RANK0", {"max_seq_len": 8193, "max_num_requests": 32, "max_num_tokens": 8192, "max_batch_size": 32}
            ),
        ),
        (
            "max_seq_len=8193, max_num_requests=32, max_num_tokens=8192",
            ev.Settings("", {"max_seq_len": 8193, "max_num_requests": 32, "max_num_tokens": 8192}),
        ),
        ("[TensorRT-LLM] TensorRT LLM version: 1.2.0rc3", ev.Boot(None, "", "tensorrt_llm", "1.2.0rc3")),
        (
            "[01/02/2026-03:04:05] [TRT-LLM] [RANK 0] [I] iter = 7, num_scheduled_requests: 5, states = {'num_ctx_requests': 0, 'num_ctx_tokens': 0, 'num_generation_tokens': 5}",
            ev.Running("2026-01-02 03:04:05", "RANK0", 5, None, None, 1, "iterations"),
        ),
    ],
)
def test_tensorrt_llm_messages(line: str, expected: ev.Event) -> None:
    assert only(line) == expected


def test_out_of_memory_amounts() -> None:
    event = only(
        S
        + "Capture cuda graph failed: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 7 has a total capacity of "
        "95.00 GiB of which 120.50 MiB is free."
    )
    assert isinstance(event, ev.OutOfMemory)
    assert (event.asked_bytes, event.free_bytes) == (448 << 20, round(120.5 * (1 << 20)))
    assert event.total_bytes == gib(95)
    bare = only("torch.OutOfMemoryError: CUDA out of memory.")
    assert bare == ev.OutOfMemory(None, "", None, None, None)


@pytest.mark.parametrize(
    ("line", "operation"),
    [
        (
            "RuntimeError: CUDA error: operation not permitted when stream is capturing",
            "operation not permitted when stream is capturing",
        ),
        (S + "error: cudaErrorStreamCaptureUnsupported: operation not permitted", "cudaErrorStreamCaptureUnsupported"),
        ("AssertionError: capture_bs=[0, 1, 2]", "AssertionError: capture_bs=[0, 1, 2]"),
        (
            "ValueError: No valid cudagraph sizes after rounding to multiple of 7",
            "No valid cudagraph sizes after rounding to multiple of 7",
        ),
    ],
)
def test_capture_errors_name_the_operation(line: str, operation: str) -> None:
    event = only(line)
    assert isinstance(event, ev.CaptureError)
    assert event.operation == operation
