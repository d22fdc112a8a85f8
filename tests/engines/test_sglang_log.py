"""SGLang's log messages, one line per wording. Amounts are this test's own."""

# ruff: noqa: E501 - log lines are as long as servers print them

from __future__ import annotations

import io

import pytest

from graphtune.engines import events as ev
from graphtune.engines.log_reader import LogReader
from tests.engines.log_messages import S, V, gib, only, read


@pytest.mark.parametrize(
    ("line", "requests", "tokens", "graph", "who"),
    [
        (
            "[2025-02-03 04:05:06 TP0] Decode batch. #running-req: 8, #token: 677, token usage: 0.13, "
            "gen throughput (token/s): 183.5, #queue-req: 0",
            8,
            677,
            None,
            "TP0",
        ),
        (
            "[2025-05-03 04:05:06 DP0 TP0] Decode batch. #running-req: 8, #token: 372, token usage: 0.13, "
            "accept len: 2.90, cuda graph: True, gen throughput (token/s): 171.0, #queue-req: 0",
            8,
            372,
            True,
            "DP0 TP0",
        ),
        (
            "[2025-09-03 04:05:06 TP0] Decode batch. #running-req: 3, #token: 9, token usage: 0.01, cuda graph: False, "
            "gen throughput (token/s): 1.0, #queue-req: 0, ",
            3,
            9,
            False,
            "TP0",
        ),
        (
            "[2025-11-03 04:05:06] Decode batch, #running-req: 28, #token: 9, token usage: 0.01, cuda graph: True, "
            "gen throughput (token/s): 1.0, #queue-req: 0,",
            28,
            9,
            True,
            "",
        ),
        (
            "[2026-04-03 04:05:06 TP9 DP9] Decode batch, #running-req: 12, #full token: 768, full token usage: 0.1, "
            "#swa token: 12, swa token usage: 0.1, npu graph: True, gen throughput (token/s): 1.0, #queue-req: 0",
            12,
            768,
            True,
            "DP9 TP9",
        ),
        (
            "[2026-04-03 04:05:06 TP0] Decode batch, cuda graph: False, #queue-req: 1, #running-req: 12, #token: 5,",
            12,
            5,
            False,
            "TP0",
        ),
    ],
)
def test_sglang_decode(line: str, requests: int, tokens: int, graph: bool | None, who: str) -> None:
    event = only(line)
    assert isinstance(event, ev.Running)
    assert (event.requests, event.tokens, event.graph, event.rank) == (requests, tokens, graph, who)
    assert (event.weight, event.weighting) == (40, "iterations")


def test_the_quick_reading_of_a_batch_line_says_what_the_reading_by_key_says() -> None:
    lines = [
        S + "Decode batch, #running-req: 7, #token: 70, token usage: 0.1, cuda graph: False, gen throughput "
        "(token/s): 1.0, #queue-req: 0",
        S + "Decode batch. #running-req: 7, #token: 70, token usage: 0.1, accept len: 2.1, accept rate: 0.7, "
        "cuda graph: True, gen throughput (token/s): 1.0, #queue-req: 0",
        S + "Prefill batch, #new-seq: 2, #new-token: 300, #cached-token: 0, token usage: 0.0, #running-req: 0, "
        "#queue-req: 0, cuda graph: True, input throughput (token/s): 5.0",
    ]
    text = "\n".join(lines).encode()
    quick = list(LogReader().events(io.BytesIO(text)))
    assert quick == read(*lines)
    assert len(quick) == 3
    lines = [
        V + "| 13              | 16            | 3            | FULL         | 120   |",
        "INFO 02-17 18:32:47 [loggers.py:257] | 700 | 700 | 0 | NONE | 5 |",
        "INFO 02-17 18:32:47 [loggers.py:257] Engine 002: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 7.5 tokens/s, Running: 4 reqs, Waiting: 0 reqs",
        V
        + "Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 7.5 tokens/s, Running: 5 reqs, Waiting: 0 reqs",
        V
        + "8 Engines Aggregated: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 7.5 tokens/s, Running: 40 reqs, Waiting: 0 reqs",
    ]
    assert list(LogReader().events(io.BytesIO("\n".join(lines).encode()))) == read(*lines)
    assert len(read(*lines)) == 5


@pytest.mark.parametrize(
    ("line", "at", "requests", "tokens", "graph"),
    [
        (
            "[16:43:29 TP0] Prefill batch. #new-seq: 4, #new-token: 8192, #cached-token: 291, cache hit rate: 2.76%, "
            "token usage: 0.04, #running-req: 1, #queue-req: 38",
            "16:43:29",
            4,
            8192,
            None,
        ),
        (
            "[2026-04-01 02:03:04] Prefill batch, #new-seq: 1, #new-token: 158, #cached-token: 0, #running-req: 31, "
            "#queue-req: 0, cuda graph: True, input throughput (token/s): 559.5",
            "2026-04-01 02:03:04",
            1,
            158,
            True,
        ),
        (
            "[2026-07-01 02:03:04] Prefill batch, #new-seq: 1, #new-token: 15, #pending-token: 3, #replay-token: 0, "
            "#queue-req: 0, input throughput (token/s): 1.8, cuda graph: False",
            "2026-07-01 02:03:04",
            1,
            15,
            False,
        ),
    ],
)
def test_sglang_prefill(line: str, at: str, requests: int, tokens: int, graph: bool | None) -> None:
    event = only(line)
    assert isinstance(event, ev.Prefill)
    assert (event.at, event.requests, event.tokens, event.graph) == (at, requests, tokens, graph)


@pytest.mark.parametrize(
    ("line", "role", "phase", "available"),
    [
        ("Capture cuda graph begin. This can take up to several minutes.", "target", "decode", None),
        ("Capture cuda graph begin. This can take several minutes. avail mem=12.00 GB", "target", "decode", gib(12)),
        ("Capture draft cuda graph begin. avail mem=2.50 GB", "draft", "decode", gib(2.5)),
        ("Capture piecewise CUDA graph begin. avail mem=10.00 GB", "target", "prefill", gib(10)),
        ("Capture draft extend CUDA graph begin. step=2, avail mem=1.00 GB", "draft", "extend", gib(1)),
        (
            "Capture target verify CUDA graph begin. num_tokens_per_bs=6, bs=[1, 2], avail mem=1.00 GB",
            "target",
            "verify",
            gib(1),
        ),
        ("Capture UNO tree draft NPU graph begin. avail mem=1.00 GB", "draft", "decode", gib(1)),
        ("Frozen-KV MTP draft cuda graph begin.", "draft", "decode", None),
        ("Capture target decode XPU graph begin. backend=full, bs=[1], avail mem=1.00 GB", "target", "decode", gib(1)),
    ],
)
def test_sglang_capture_begins(line: str, role: str, phase: str, available: int | None) -> None:
    event = only(S + line)
    assert isinstance(event, ev.CaptureBegin)
    assert (event.role, event.phase, event.available_bytes, event.rank) == (role, phase, available, "DP1 TP2")


def test_sglang_capture_begin_of_today() -> None:
    event = only(
        S
        + "Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=3, bs=[1, 2, 4], avail mem=7.10 GB"
    )
    assert isinstance(event, ev.CaptureBegin)
    assert (event.backend, event.sizes, event.unit, event.width) == ("full", (1, 2, 4), "requests", 3)
    event = only(S + "Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4, 8], avail mem=7.10 GB")
    assert isinstance(event, ev.CaptureBegin)
    assert (event.backend, event.sizes, event.unit) == ("breakable", (4, 8), "tokens")


@pytest.mark.parametrize(
    ("line", "seconds", "used", "available"),
    [
        ("Capture cuda graph end. Time elapsed: 7.00 s", 7.0, None, None),
        ("Capture cuda graph end. Time elapsed: 7.00 s. avail mem=5.24 GB", 7.0, None, gib(5.24)),
        (
            "Capture cuda graph end. Time elapsed: 11.35 s. mem usage=1.04 GB. avail mem=11.22 GB.",
            11.35,
            gib(1.04),
            gib(11.22),
        ),
        ("Capture cuda graph end. Time elapsed: 2.00 s. avail mem=5.00 GB. mem usage=0.50 GB.", 2.0, gib(0.5), gib(5)),
        (
            "Capture target decode CUDA graph end. elapsed=0.89 s, mem usage=0.15 GB, avail mem=6.95 GB.",
            0.89,
            gib(0.15),
            gib(6.95),
        ),
        ("Capture cuda graph end. Time elapsed: 7.00 s. mem usage=1.0", 7.0, None, None),
    ],
)
def test_sglang_capture_ends(line: str, seconds: float, used: int | None, available: int | None) -> None:
    event = only(S + line)
    assert isinstance(event, ev.CaptureEnd)
    assert (event.seconds, event.used_bytes, event.available_bytes) == (seconds, used, available)


def test_sglang_lists_on_their_own_line_and_progress() -> None:
    assert only(S + "Capture cuda graph bs [1, 2, 4]") == ev.CaptureSizes("DP1 TP2", (1, 2, 4), "requests")
    assert only("Capture cuda graph num tokens [4, 8]") == ev.CaptureSizes("", (4, 8), "tokens")
    bar = "Capturing batches (bs=10 avail_mem=11.50 GB):  20%|##   | 1/5 [00:00<00:01,  9.1it/s]"
    assert only(bar) == ev.CaptureProgress("", None, 10, "requests", gib(11.5), 1, 5)
    bar = "Capturing num tokens (num_tokens=8192 avail_mem=9.00 GB):   0%|     | 0/58 [00:00<?, ?it/s]"
    assert only(bar) == ev.CaptureProgress("", None, 8192, "tokens", gib(9), 0, 58)


@pytest.mark.parametrize(
    ("line", "tokens", "size"),
    [
        ("KV Cache is allocated. #tokens: 2795207, K size: 53.00 GB, V size: 53.00 GB", 2795207, gib(106)),
        (
            "KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 879872, K size: 1.50 GB, V size: 0.50 GB",
            879872,
            gib(2),
        ),
        ("KV Cache is allocated. #tokens: 100, KV size: 2.00 GB", 100, gib(2)),
        (
            "Post-capture KV sizing: KV cache allocated. dtype: torch.bfloat16, #tokens: 7, KV size: 1.00 GB, avail mem=3.00 GB",
            7,
            gib(1),
        ),
    ],
)
def test_sglang_kv_cache(line: str, tokens: int, size: int) -> None:
    assert only(S + line) == ev.KVSize("DP1 TP2", tokens, size)


def test_sglang_two_messages_on_one_physical_line() -> None:
    events = read(
        S + "Capture target decode CUDA graph end. elapsed=0.89 s, mem usage=0.15 GB, avail mem=6.95 GB."
        "max_total_num_tokens=2980168, chunked_prefill_size=4096, max_prefill_tokens=16384, max_running_requests=4096, "
        "context_len=32768, available_gpu_mem=6.95 GB"
    )
    assert [type(event).__name__ for event in events] == ["CaptureEnd", "KVSize", "Settings"]
    assert events[2].values["max_running_requests"] == 4096  # type: ignore[union-attr]


def test_sglang_bars_glued_to_a_message() -> None:
    events = read(
        "Capturing batches (bs=10 avail_mem=11.99 GB):   0%|   | 0/5 [00:00<?, ?it/s]"
        "[2026-06-08 07:21:05 TP1] Capture cuda graph end. Time elapsed: 1.00 s"
    )
    assert [type(event).__name__ for event in events] == ["CaptureProgress", "CaptureEnd"]
    assert events[1].rank == "TP1"  # type: ignore[union-attr]
    many = "\r".join(
        f"Capturing batches (bs={size} avail_mem=9.00 GB):  1%|   | 1/3 [00:00<00:01, 2.0it/s]" for size in (8, 4)
    )
    assert [event.size for event in read(many)] == [8, 4]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "line",
    [
        "token usaccept rate: 0.32, npu graph: False, gen throughput (token/s): 863.65, #queue-req",
        S + "Decode batch, #runn",
        S + "Decode batch, #running-req: 4",
        S + "Decode batch, #running-req: 4, #token: 67",
        S + "Decode batch, #running-req: 4, #tokenDecode batch, #running-req: 4, #token: 5, #queue-req: 0",
        S + "Prefill batch, #new-seq: 1, #new-tok",
        S + "Prefill batch, #new-seq: 1, #new-token: 81",
        S + "KV Cache is allocated. dtype: tor",
        S + "Capture cuda graph bs [1, 2, 4",
        "Available KV cache memory: 1",
    ],
)
def test_cut_lines_are_counted_and_not_guessed(line: str) -> None:
    reader = LogReader()
    assert [
        event for event in reader.line(line.encode()) if isinstance(event, ev.Running | ev.Prefill | ev.KVSize)
    ] == []
    assert reader.skipped["cut"] == 1
    assert reader.lines == 1
