"""One line per shape that servers print, from the oldest wording to the newest. Amounts are this test's own."""

# ruff: noqa: E501 - log lines are as long as servers print them

from __future__ import annotations

import gzip
import io
import json

import pytest

from graphtune.engines import events as ev
from graphtune.engines.base import GIB
from graphtune.engines.log_lines import blocks, pieces, rank, stamp
from graphtune.engines.log_reader import LogReader

S = "[2026-03-04 05:06:07 DP1 TP2] "


def read(*lines: str, engine: str | None = None) -> list[ev.Event]:
    reader = LogReader(engine)
    return [event for line in lines for event in reader.line(line.encode())]


def only(line: str, engine: str | None = None) -> ev.Event:
    (event,) = read(line, engine=engine)
    return event


def gib(amount: float) -> int:
    return round(amount * GIB)


# --- SGLang ---


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


# --- vLLM ---

V = "(EngineCore_DP3 pid=441) INFO 11-24 11:44:17 [file.py:34] "


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (V + "Available KV cache memory: 33.25 GiB", ev.KVSize("DP3", None, gib(33.25))),
        (V + "GPU KV cache size: 1,587,648 tokens", ev.KVSize("DP3", 1587648)),
        (
            V + "GPU KV cache size: 150,745 tokens, Maximum concurrency for 124,000 tokens per request: 1.2x",
            ev.KVSize("DP3", 150745),
        ),
        (V + "GPU + host KV cache size: 10 tokens", ev.KVSize("DP3", 10)),
        ("INFO 12-20 20:25:46 x.py:241] # GPU blocks: 3852, # CPU blocks: 4096", ev.KVSize("", None, blocks=3852)),
        ("INFO 12-20 20:25:46 x.py:241] # cuda blocks: 7299, # CPU blocks: 9", ev.KVSize("", None, blocks=7299)),
        (
            "INFO 02-01 00:00:00 x.py:1] Graph capturing finished in 14 secs.",
            ev.CaptureEnd("02-01 00:00:00", "", "target", None, 14.0, None, None),
        ),
        (
            V + "Graph capturing finished in 14 secs, took 0.25 GiB",
            ev.CaptureEnd("11-24 11:44:17", "DP3", "target", None, 14.0, gib(0.25), None),
        ),
        (
            V + "Profiling CUDA graph memory: PIECEWISE=3 (largest=16), FULL=3 (largest=16), ENCODER=2",
            ev.GraphEstimate("DP3", counts={"PIECEWISE": (3, 16), "FULL": (3, 16), "ENCODER": (2, None)}),
        ),
        (V + "Estimated CUDA graph memory: 0.25 GiB total", ev.GraphEstimate("DP3", gib(0.25))),
        (V + "Estimated CUDA graph memory: -0.50 GiB total", ev.GraphEstimate("DP3", gib(-0.5))),
        (
            V + "CUDA graph pool memory: 0.50 GiB (actual), 0.25 GiB (estimated), difference: 0.25 GiB (50.0%).",
            ev.GraphEstimate("DP3", gib(0.25), gib(0.5)),
        ),
        (V + "Model loading took 15.5 GiB memory and 0.4 seconds", ev.Memory("DP3", "weights", gib(15.5))),
        (
            V + "Truncating max_cudagraph_capture_size to 40",
            ev.ListChange("DP3", "the maximum is cut to the grid", top=40),
        ),
        (
            V + "Capping cudagraph capture sizes from max 512 to 352 to fit Mamba cache blocks (361 blocks available)",
            ev.ListChange("DP3", "sizes are capped to the Mamba cache blocks", top=352),
        ),
        (
            V + "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].",
            ev.Settings("DP3", {"attention_backend": "FLASH_ATTN"}),
        ),
        ("| 13              | 16            | 3            | FULL         | 120   |", ev.Step("", 13, 16, "FULL", 120)),
        (V + "| 700 | 700 | 0 | NONE | 5 |", ev.Step("DP3", 700, 700, "NONE", 5)),
        (V + "- Mode: FULL_AND_PIECEWISE", ev.Settings("DP3", {"cudagraph_mode": "FULL_AND_PIECEWISE"})),
        (V + "- Capture sizes: [4, 1, 2]", ev.Settings("DP3", {"cudagraph_capture_sizes": (1, 2, 4)})),
    ],
)
def test_vllm_messages(line: str, expected: ev.Event) -> None:
    assert only(line, "vllm") == expected


def test_vllm_v0_profile() -> None:
    events = read(
        "INFO 12-20 20:25:46 worker.py:241] model weights take 7.50GiB; non_torch_memory takes 0.39GiB; PyTorch activation "
        "peak memory takes 2.50GiB; the rest of the memory reserved for KV Cache is 3.75GiB."
    )
    assert events == [
        ev.Memory("", "weights", gib(7.5)),
        ev.Memory("", "activation_peak", gib(2.5)),
        ev.KVSize("", None, gib(3.75)),
    ]


@pytest.mark.parametrize(
    ("line", "requests", "who", "aggregated"),
    [
        (
            V
            + "Avg prompt throughput: 2130.8 tokens/s, Avg generation throughput: 7.5 tokens/s, Running: 13 reqs, Waiting: 3 reqs, GPU KV cache usage: 13.3%, Prefix cache hit rate: 0.0%",
            13,
            "DP3",
            False,
        ),
        (
            "INFO 02-17 18:32:47 [loggers.py:257] Engine 002: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 7.5 tokens/s, Running: 4 reqs, Waiting: 0 reqs, Deferred: 1 reqs, Preemptions: 2, GPU KV cache usage: 13.3%",
            4,
            "DP2",
            False,
        ),
        (
            "INFO 02-17 18:32:47 [loggers.py:257] 8 Engines Aggregated: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 7.5 tokens/s, Running: 40 reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%",
            40,
            "",
            True,
        ),
        (
            "INFO 02-17 18:32:47 metrics.py:455] Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 1.0 tokens/s, Running: 92 reqs, Swapped: 0 reqs, Pending: 323 reqs, GPU KV cache usage: 98.9%, CPU KV cache usage: 0.0%",
            92,
            "",
            False,
        ),
    ],
)
def test_vllm_running(line: str, requests: int, who: str, aggregated: bool) -> None:
    event = only(line)
    assert isinstance(event, ev.Running)
    assert (event.requests, event.rank, event.aggregated) == (requests, who, aggregated)
    assert (event.graph, event.tokens, event.weighting) == (None, None, "seconds")


@pytest.mark.parametrize(
    ("line", "asked", "runs", "reason"),
    [
        (
            "CUDAGraphMode.FULL_AND_PIECEWISE is not supported with spec-decode for attention backend FlashInferBackend (support: AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE); setting cudagraph_mode=PIECEWISE",
            "FULL_AND_PIECEWISE",
            "PIECEWISE",
            "attention backend FlashInferBackend supports UNIFORM_SINGLE_TOKEN_DECODE",
        ),
        (
            "CUDAGraphMode.FULL is not supported with XBackend backend; setting cudagraph_mode=FULL_DECODE_ONLY",
            "FULL",
            "FULL_DECODE_ONLY",
            None,
        ),
        (
            "CUDAGraphMode.FULL_AND_PIECEWISE is not supported; setting cudagraph_mode=NONE because attention is not compiled piecewise",
            "FULL_AND_PIECEWISE",
            "NONE",
            "attention is not compiled piecewise",
        ),
    ],
)
def test_vllm_mode_changes(line: str, asked: str, runs: str, reason: str | None) -> None:
    assert only(V + line) == ev.ModeChange("DP3", asked, runs, reason)


@pytest.mark.parametrize(
    ("line", "current", "suggested"),
    [
        (
            "In v0.19, CUDA graph memory profiling will be enabled by default. The current --gpu-memory-utilization=0.9000 would be equivalent to --gpu-memory-utilization=0.8900.",
            0.9,
            None,
        ),
        (
            "CUDA graph memory profiling is enabled (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1). This will become the default in v0.19. The current --gpu-memory-utilization=0.9000 is equivalent to --gpu-memory-utilization=0.8900. To keep it, increase --gpu-memory-utilization to 0.9100.",
            0.9,
            0.91,
        ),
        (
            "CUDA graph memory profiling is enabled (default since v0.21.0). The current --gpu-memory-utilization=0.9500 is equivalent. To keep it, increase --gpu-memory-utilization to 0.9700.",
            0.95,
            0.97,
        ),
    ],
)
def test_vllm_utilization_notices(line: str, current: float, suggested: float | None) -> None:
    assert only(V + line) == ev.Utilization("DP3", current, suggested)


def test_vllm_configuration_keeps_only_what_concerns_graphs() -> None:
    line = (
        "INFO 11-30 01:21:46 [core.py:112] Initializing a V1 LLM engine (v0.22.1) with config: model='/secret/model', "
        "speculative_config=SpeculativeConfig(method='mtp', num_spec_tokens=2), max_seq_len=4096, tensor_parallel_size=2, "
        "enforce_eager=False, served_model_name=secret, compilation_config={'cudagraph_mode': <CUDAGraphMode.FULL_AND_PIECEWISE: "
        "(2, 1)>, 'cudagraph_capture_sizes': [4, 1, 2], 'max_cudagraph_capture_size': 4}"
    )
    event = only(line)
    assert isinstance(event, ev.Boot)
    assert event.version == "0.22.1"
    assert event.settings == {
        "tp_size": 2,
        "max_model_len": 4096,
        "spec_tokens": 2,
        "max_cudagraph_capture_size": 4,
        "cudagraph_capture_sizes": (1, 2, 4),
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "enforce_eager": False,
    }
    assert "secret" not in repr(event)
    args = only(
        "INFO 11-30 01:21:43 [utils.py:278] non-default args: {'model': '/secret', 'max_num_seqs': 512, 'gpu_memory_utilization': 0.9}"
    )
    assert isinstance(args, ev.Boot)
    assert args.settings == {"max_num_seqs": 512, "gpu_memory_utilization": 0.9}


def test_vllm_overridden_list() -> None:
    event = only(
        V + "cudagraph_capture_sizes specified in compilation_config [1, 2, 4, 9000] is overridden by config [1, 2, 4]"
    )
    assert isinstance(event, ev.ListChange)
    assert (event.before, event.after, event.top) == ((1, 2, 4, 9000), (1, 2, 4), 4)


# --- TensorRT-LLM ---


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


# --- failures ---


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


# --- what carries a line ---

DECODE = "Decode batch, #running-req: 5, #token: 6, token usage: 0.1, cuda graph: True, gen throughput (token/s): 1.0, #queue-req: 0"


@pytest.mark.parametrize(
    ("prefix", "at", "who"),
    [
        ("sglang-1  | [2026-03-04 05:06:07 TP0] ", "2026-03-04 05:06:07", "TP0"),
        ("2026-07-08T22:40:04.437601673Z [2026-03-04 05:06:07 TP0] ", "2026-03-04 05:06:07", "TP0"),
        ("2026-07-08T22:40:04.437Z stdout F ", "2026-07-08 22:40:04", ""),
        ("Nov 30 02:24:29 node7 sglang[812]: [2026-03-04 05:06:07 PP1 TP0] ", "2026-03-04 05:06:07", "PP1 TP0"),
        (
            "\x1b[36m(RayWorkerWrapper pid=12, ip=10.0.0.9)\x1b[0m [2026-03-04 05:06:07 DP0 TP3 EP1] ",
            "2026-03-04 05:06:07",
            "DP0 TP3 EP1",
        ),
        ("\x1b[32m[2026-03-04 05:06:07 TP0]\x1b[0m ", "2026-03-04 05:06:07", "TP0"),
        ("", None, ""),
    ],
)
def test_prefixes(prefix: str, at: str | None, who: str) -> None:
    event = only(prefix + DECODE)
    assert isinstance(event, ev.Running)
    assert (event.at, event.rank, event.requests) == (at, who, 5)


@pytest.mark.parametrize(
    ("prefix", "who"),
    [
        ("(VllmWorkerProcess pid=90) INFO 01-02 03:04:05 [x.py:1] ", ""),
        ("(VllmWorker rank=0 pid=401) INFO 01-02 03:04:05 [x.py:1] ", "RANK0"),
        ("(EngineCore_0 pid=4) INFO 01-02 03:04:05 [x.py:1] ", ""),
        ("(EngineCore_DP0 pid=4) (Worker_TP0 pid=5) WARNING 01-02 03:04:05 [x.py:1] ", "DP0 TP0"),
        ("(Worker_DP1_TP1_EP3 pid=4) INFO 01-02 03:04:05 [x.py:1] ", "DP1 TP1 EP3"),
    ],
)
def test_vllm_prefixes(prefix: str, who: str) -> None:
    event = only(prefix + "Available KV cache memory: 1.00 GiB")
    assert isinstance(event, ev.KVSize)
    assert event.rank == who


def test_stamps_without_a_year_take_the_container_stamp() -> None:
    assert stamp("2026-07-08T22:40:04.43Z (EngineCore pid=542) INFO 07-08 22:40:04 [x.py:1] ") == "2026-07-08 22:40:04"
    assert stamp("INFO 07-08 22:40:04 [x.py:1] ") == "07-08 22:40:04"
    assert stamp("nothing") is None
    assert rank("TP3 DP1 ") == "DP1 TP3"


def test_a_runtime_that_wraps_lines_in_json() -> None:
    wrapped = json.dumps({"log": S + DECODE + "\n", "stream": "stderr", "time": "2026-01-01T00:00:00Z"})
    event = only(wrapped)
    assert isinstance(event, ev.Running)
    assert event.rank == "DP1 TP2"


def test_clients_and_prompts_are_not_stored() -> None:
    reader = LogReader()
    lines = [
        'INFO:     192.0.2.7:4242 - "POST /v1/completions HTTP/1.1" 200 OK',
        "INFO 01-02 03:04:05 [x.py:1] Received request: prompt: 'Decode batch, #running-req: 9, #token: 9, #queue-req: 0'",
        '[2026-03-04 05:06:07] Receive: obj=GenerateReqInput(text="Prefill batch, #new-seq: 1, #new-token: 5, ")',
    ]
    assert [event for line in lines for event in reader.line(line.encode())] == []
    assert reader.skipped == {"http": 1, "other": 2}


def test_gzip_and_very_long_lines() -> None:
    text = (S + DECODE + "\n") * 3
    packed = gzip.compress(text.encode())
    reader = LogReader()
    assert len(list(reader.events(gzip.GzipFile(fileobj=io.BytesIO(packed))))) == 3
    early = LogReader()
    list(early.events(gzip.GzipFile(fileobj=io.BytesIO(packed[:-12]))))
    assert early.lines <= 3
    long = b"x" * (5 << 20) + b"\n" + (S + DECODE).encode()
    reader = LogReader()
    assert len(list(reader.events(io.BytesIO(long)))) == 1
    assert reader.lines == 2
    assert max(len(line) for _, lines in blocks(io.BytesIO(long)) for line in lines) <= 1 << 20


def test_pieces_of_a_line() -> None:
    assert pieces(b"a\rb\r\n") == [b"a", b"b"]
    assert pieces(b"\x1b[31mred\x1b[0m") == [b"red"]
    assert pieces(b"{not json") == [b"{not json"]
