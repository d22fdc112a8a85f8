"""The reader as a whole: every line counted once, nothing raised, restarts told apart, flat memory."""

# ruff: noqa: E501 - log lines are as long as servers print them

from __future__ import annotations

import io
import random
import string
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.engines import events as ev
from graphtune.engines.log_reader import REASONS, LogReader

STAMP = "[2026-03-04 05:06:07 TP0] "
DECODE = STAMP + (
    "Decode batch, #running-req: 5, #token: 600, token usage: 0.10, cuda graph: True, gen throughput (token/s): 1.0, "
    "#queue-req: 0"
)
KINDS = [
    DECODE,
    STAMP + "Prefill batch, #new-seq: 1, #new-token: 158, #cached-token: 0, #queue-req: 0, cuda graph: True,",
    STAMP
    + "Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2, 4], avail mem=7.10 GB",
    STAMP + "Capture target decode CUDA graph end. elapsed=0.89 s, mem usage=0.15 GB, avail mem=6.95 GB.",
    STAMP + "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 879872, K size: 1.50 GB, V size: 1.50 GB",
    "Capturing batches (bs=10 avail_mem=11.99 GB):   0%|   | 0/5 [00:00<?, ?it/s]\r" + DECODE,
    "max_total_num_tokens=2980168, chunked_prefill_size=4096, max_running_requests=4096, context_len=32768",
    "(EngineCore_DP0 pid=44) INFO 11-24 11:44:17 [a.py:3] GPU KV cache size: 1,587,648 tokens",
    "INFO 02-17 18:32:47 [l.py:7] Engine 000: Avg prompt throughput: 1.0 tokens/s, Running: 4 reqs, Waiting: 0 reqs",
    "INFO 02-17 18:32:47 [c.py:7] CUDAGraphMode.FULL is not supported with X backend; setting cudagraph_mode=NONE because y",
    "INFO 02-17 18:32:47 [c.py:7] non-default args: {'max_num_seqs': 512, 'model': 'x'}",
    "INFO 02-17 18:32:47 [c.py:7] Initializing a V1 LLM engine (v0.22.1) with config: x='cudagraph_capture_sizes': [1, 2]",
    "Capturing CUDA graphs (decode, FULL):  35%|###      | 18/51 [00:00<00:01, 25.23it/s]",
    "| 1 | 1 | 0 | FULL | 120 |",
    "[07/24/2025-08:18:47] [TRT-LLM] [I] Run generation only CUDA graph warmup for batch size=4096",
    "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 52.51 GiB for max tokens in paged KV cache (860320).",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB. 12.00 MiB is free.",
    "RuntimeError: CUDA error: operation not permitted when stream is capturing",
    '{"log":"' + "x" * 20 + '","time":"2026-01-01T00:00:00Z"}',
    'INFO:     192.0.2.1:42 - "POST /v1/completions HTTP/1.1" 200 OK',
    "    value = x.item()",
    "",
]


def mangled(rng: random.Random) -> bytes:
    """A line of some kind: whole, cut, spliced with another, shuffled, or noise."""
    line = rng.choice(KINDS)
    how = rng.randrange(6)
    if how == 1:
        line = line[: rng.randrange(len(line) + 1)]
    elif how == 2:
        line = line[rng.randrange(len(line) + 1) :]
    elif how == 3:
        other = rng.choice(KINDS)
        line = line[: rng.randrange(len(line) + 1)] + other[rng.randrange(len(other) + 1) :]
    elif how == 4:
        words = line.split(" ")
        rng.shuffle(words)
        line = " ".join(words)
    elif how == 5:
        line = "".join(rng.choices(string.printable.replace("\n", ""), k=rng.randrange(60)))
    data = line.encode()
    return bytes(rng.choices(range(256), k=9)).replace(b"\n", b"") + data if rng.random() < 0.05 else data


def test_a_hundred_thousand_mangled_lines_raise_nothing_and_count_once() -> None:
    rng = random.Random(20260304)
    lines = [mangled(rng) for _ in range(100_000)]
    reader = LogReader()
    events = list(reader.events(io.BytesIO(b"\n".join(lines) + b"\n")))
    assert reader.lines == len(lines)
    assert reader.read + sum(reader.skipped.values()) == len(lines)
    assert set(reader.skipped) <= set(REASONS)
    assert reader.read > 1000
    assert len(events) > 1000


@given(st.lists(st.binary(max_size=80).map(lambda line: line.replace(b"\n", b"")), max_size=30))
def test_any_bytes_are_counted_once_by_line_and_by_stream(lines: list[bytes]) -> None:
    one, other = LogReader(), LogReader()
    by_line = [event for line in lines for event in one.line(line)]
    by_stream = list(other.events(io.BytesIO(b"".join(line + b"\n" for line in lines))))
    assert by_line == by_stream
    assert one.lines == other.lines == len(lines)
    assert one.read + sum(one.skipped.values()) == len(lines)
    assert one.skipped == other.skipped


@pytest.mark.parametrize("seed", range(5))
def test_reading_by_block_and_by_line_agree_on_mangled_lines(seed: int) -> None:
    rng = random.Random(seed)
    lines = [mangled(rng) for _ in range(2000)]
    one, other = LogReader("sglang"), LogReader("sglang")
    by_line = [event for line in lines for event in one.line(line)]
    assert list(other.events(io.BytesIO(b"\n".join(lines) + b"\n"))) == by_line
    assert (one.read, one.skipped) == (other.read, other.skipped)


def test_memory_does_not_grow_with_the_log() -> None:
    def peak(count: int) -> int:
        stream = io.BytesIO((DECODE + "\n").encode() * count)
        tracemalloc.start()
        for _ in LogReader().events(stream):
            pass
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(40_000) < peak(10_000) + (2 << 20)


def boots(*lines: str) -> list[ev.Boot]:
    reader = LogReader()
    return [event for line in lines for event in reader.line(line.encode()) if isinstance(event, ev.Boot)]


def test_a_restart_is_told_from_the_workers_of_one_start() -> None:
    worker = "[2026-03-04 05:06:07 TP{}] Init torch distributed begin."
    end = "[2026-03-04 05:06:07 TP0] Capture target decode CUDA graph end. elapsed=0.89 s, mem usage=0.15 GB, avail mem=6.95 GB"
    first = [worker.format(0), worker.format(1), end]
    # A draft model's workers start after the target's capture.
    assert [boot.restart for boot in boots(*first, worker.format(0))] == [False, False, False]
    served = boots(*first, DECODE, worker.format(0), worker.format(1))
    assert [boot.restart for boot in served] == [False, False, True, False]
    failed = boots(*first, STAMP + "CUDA out of memory. Tried to allocate 1.00 GiB", worker.format(0))
    assert [boot.restart for boot in failed] == [False, False, True]
    dump = "[2026-03-04 05:06:00] server_args=ServerArgs(model_path='/x', tp_size=2, decode_log_interval=10)"
    assert [boot.restart for boot in boots(dump, *first, dump)] == [False, False, False, True]


def test_vllm_processes_of_one_start_are_one() -> None:
    def start(rank: int) -> str:
        return f"(EngineCore_DP{rank} pid=4) INFO 11-30 01:21:46 [core.py:1] Initializing a V1 LLM engine (v0.22.1) with config: x=1"

    args = "INFO 11-30 01:21:43 [utils.py:278] non-default args: {'max_num_seqs': 512}"
    done = "(EngineCore_DP0 pid=4) INFO 11-30 01:22:27 [r.py:1] Graph capturing finished in 5 secs, took 0.65 GiB"
    found = boots(args, start(0), start(1), done, args, start(0))
    assert [boot.restart for boot in found] == [False, False, False, True, False]


def test_the_interval_of_decode_lines_is_the_one_that_was_set() -> None:
    reader = LogReader()
    reader.line(b"server_args=ServerArgs(decode_log_interval=10, port=1)")
    (event,) = reader.line(DECODE.encode())
    assert isinstance(event, ev.Running)
    assert event.weight == 10


def test_an_engine_that_is_named_limits_what_is_read() -> None:
    reader = LogReader("vllm")
    assert reader.line(DECODE.encode()) == []
    assert LogReader("sglang").line(DECODE.encode()) != []
