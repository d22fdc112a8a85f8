"""vLLM's log messages, one line per wording. Amounts are this test's own."""

# ruff: noqa: E501 - log lines are as long as servers print them

from __future__ import annotations

import pytest

from graphtune.engines import events as ev
from tests.engines.log_messages import V, gib, only, read


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
