"""Summaries of whole logs: captures, memory, batches, graph use, ranks, restarts."""

# ruff: noqa: E501 - log lines are as long as servers print them

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.engines.base import GIB
from graphtune.tune.log_records import BootSummary, LogSummary, percentiles
from graphtune.tune.log_summary import summarise, summarise_file


def gib(amount: float) -> int:
    return round(amount * GIB)


def summary(*lines: str) -> LogSummary:
    return summarise(io.BytesIO("\n".join(lines).encode()), "test.log")


def boot(*lines: str) -> BootSummary:
    return summary(*lines).boots[-1]


def decode(requests: int, graph: bool | None, second: int = 7, rank: str = "TP0") -> str:
    field = "" if graph is None else f" cuda graph: {graph},"
    return (
        f"[2026-03-04 05:06:{second:02d} {rank}] Decode batch, #running-req: {requests}, #token: 600, token usage: 0.10,"
        f"{field} gen throughput (token/s): 1.0, #queue-req: 0"
    )


SGLANG_START = [
    "[2026-03-04 05:00:00] server_args=ServerArgs(model_path='/m', tp_size=2, max_running_requests=4096, mem_fraction_static=0.830)",
    "[2026-03-04 05:00:01 TP0] Init torch distributed begin.",
    "[2026-03-04 05:00:01 TP1] Init torch distributed begin.",
    "[2026-03-04 05:00:02 TP0] Load weight end. elapsed=0.1 s, type=X, avail mem=50.00 GB, mem usage=15.00 GB.",
    "[2026-03-04 05:00:03 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 1000, K size: 2.00 GB, V size: 2.00 GB",
    "[2026-03-04 05:00:03 TP1] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 1000, K size: 2.00 GB, V size: 2.00 GB",
    "[2026-03-04 05:00:04 TP0] Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[128, 256], avail mem=10.00 GB",
    "[2026-03-04 05:00:05 TP0] Capture target prefill CUDA graph end. elapsed=2.00 s, mem usage=0.50 GB, avail mem=9.50 GB.",
    "[2026-03-04 05:00:05 TP0] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2, 4, 8, 32], avail mem=9.50 GB",
    "[2026-03-04 05:00:05 TP1] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2, 4, 8, 32], avail mem=9.00 GB",
    "[2026-03-04 05:00:06 TP0] Capture target decode CUDA graph end. elapsed=1.00 s, mem usage=0.25 GB, avail mem=9.25 GB.",
    "[2026-03-04 05:00:06 TP1] Capture target decode CUDA graph end. elapsed=3.00 s, mem usage=1.00 GB, avail mem=8.00 GB.",
]


def test_captures_are_summed_per_rank_and_the_worst_rank_counts() -> None:
    found = boot(*SGLANG_START)
    assert [(c.rank, c.phase, c.count, c.unit) for c in found.captures] == [
        ("TP0", "prefill", 2, "tokens"),
        ("TP0", "decode", 5, "requests"),
        ("TP1", "decode", 5, "requests"),
    ]
    totals = {total.rank: total for total in found.rank_totals}
    assert (totals["TP0"].used_bytes, totals["TP0"].seconds) == (gib(0.75), 3.0)
    assert (totals["TP1"].used_bytes, totals["TP1"].seconds) == (gib(1), 3.0)
    assert (found.graph_bytes, found.capture_s) == (gib(1), 3.0)
    assert (found.kv_tokens, found.kv_bytes) == (1000, gib(4))
    assert found.memory["weights"] == gib(15)
    assert found.settings["tp_size"] == 2
    assert found.disagreements == ()


def test_draft_time_counts_and_memory_without_a_statement_is_the_difference() -> None:
    found = boot(
        "[2026-03-04 05:00:04 TP0] Capture cuda graph begin. This can take several minutes. avail mem=10.00 GB",
        "Capture cuda graph bs [1, 2]",
        "[2026-03-04 05:00:05 TP0] Capture cuda graph end. Time elapsed: 12.11 s. mem usage=0.54 GB. avail mem=9.46 GB.",
        "[2026-03-04 05:00:06 TP0] Capture draft cuda graph begin. avail mem=9.00 GB",
        "[2026-03-04 05:00:07 TP0] Capture draft cuda graph end. Time elapsed: 62.67 s. avail mem=8.75 GB",
        "[2026-03-04 05:00:07 TP0] Capture draft extend cuda graph end. Time elapsed: 1.00 s",
    )
    target, draft, extend = found.captures
    assert target.sizes == (1, 2)
    assert (target.used_from, draft.used_from, extend.used_from) == ("stated", "difference of free memory", None)
    assert draft.used_bytes == gib(0.25)
    assert found.capture_s == pytest.approx(12.11 + 62.67 + 1.0)
    assert found.rank_totals[0].unknown == 1
    assert found.rank_totals[0].used_bytes == gib(0.54) + gib(0.25)


def test_what_a_log_does_not_say_is_unknown() -> None:
    found = boot(decode(8, None), decode(9, None))
    assert found.version is None
    assert found.graph_bytes is None
    assert found.capture_s is None
    assert found.kv_tokens is None
    assert found.decode is not None
    assert found.decode.off_graph is None
    assert found.decode.above_top is None
    assert found.decode.graph_unknown == 1.0
    assert found.steps is None
    assert found.prefill is None


def test_a_cliff_is_a_share_of_iterations() -> None:
    found = boot(*SGLANG_START, *[decode(67, False, s) for s in (1, 2, 3)], *[decode(20, True, s) for s in (4, 5)])
    use = found.decode
    assert use is not None
    assert (use.top, use.readings, use.weighting, use.weight) == (32, 5, "iterations", 200)
    assert (use.above_top, use.off_graph) == (0.6, 0.6)
    assert use.percentiles == {"p50": 67, "p90": 67, "p95": 67, "p99": 67, "max": 67}
    assert use.histogram == ((20, 80), (67, 120))


def test_a_cliff_inside_a_run_of_readings() -> None:
    lines = [decode(size, size <= 32, s) for s, size in enumerate((46, 36, 28, 22, 20, 15, 12, 11))]
    use = boot(*SGLANG_START, *lines).decode
    assert use is not None
    assert use.above_top == 0.25
    assert use.percentiles["p50"] == 20


def test_ranks_that_disagree_are_named() -> None:
    found = boot(decode(12, True, 7, "DP0"), decode(1, False, 7, "DP1"), decode(3, True, 8, "DP0"))
    assert found.disagreements == ("at 2026-03-04 05:06:07 the ranks differ on graphs: DP0 True, DP1 False",)
    assert boot(decode(12, True, 7, "DP0"), decode(1, False, 8, "DP1")).disagreements == ()
    lists = boot(
        *[
            f"[2026-03-04 05:00:05 TP{r}] Capture target decode CUDA graph begin. backend=full, bs=[1, {top}], avail mem=9.50 GB"
            for r, top in ((0, 8), (1, 256))
        ]
    )
    assert "ranks captured different lists" in lists.disagreements[0]
    kv = boot(
        "[2026-03-04 05:00:03 TP0] KV Cache is allocated. #tokens: 1000, KV size: 2.00 GB",
        "[2026-03-04 05:00:03 TP1] KV Cache is allocated. #tokens: 500, KV size: 2.00 GB",
    )
    assert kv.kv_tokens == 500
    assert "TP1 500, TP0 1,000" in kv.disagreements[0]


def test_the_size_of_ranks_that_step_together_is_the_largest() -> None:
    found = boot(*SGLANG_START, decode(8, True, 7, "DP0"), decode(40, True, 7, "DP1"), decode(3, True, 8, "DP0"))
    assert found.over_ranks is not None
    assert (found.over_ranks.readings, found.over_ranks.histogram) == (1, ((40, 1),))
    assert found.over_ranks.above_top == 1.0
    assert boot(decode(8, True, 7), decode(9, True, 8)).over_ranks is None


def test_many_disagreements_are_counted_and_only_some_are_shown() -> None:
    lines = [decode(2, rank == 0, s, f"DP{rank}") for s in range(30) for rank in (0, 1)]
    found = boot(*lines)
    assert len(found.disagreements) == 6
    assert "30 seconds in all" in found.disagreements[-1]


def test_a_restart_starts_a_new_summary() -> None:
    found = summary(*SGLANG_START, decode(3, True), *SGLANG_START[:5])
    assert len(found.boots) == 2
    assert len(found.boots[0].captures) == 3
    assert found.boots[1].captures == ()
    assert found.boots[1].decode is None


def test_a_capture_that_fails_names_operation_and_size() -> None:
    found = boot(
        "[2026-03-04 05:00:05 TP0] Capture target decode CUDA graph begin. backend=full, bs=[1, 2, 8], avail mem=9.50 GB",
        "Capturing batches (bs=8 avail_mem=9.00 GB):   0%|   | 0/3 [00:00<?, ?it/s]",
        "Capturing batches (bs=2 avail_mem=9.00 GB):   0%|   | 1/3 [00:00<00:01, 2.0it/s]",
        "Traceback (most recent call last):",
        '  File "/somewhere/model.py", line 3, in forward',
        "    if x.max().item() > 0:",
        "RuntimeError: CUDA error: operation not permitted when stream is capturing",
        "[2026-03-04 05:00:06 TP0] Capture cuda graph failed: CUDA error: operation not permitted when stream is capturing",
    )
    (failure,) = found.failures
    assert (failure.kind, failure.size, failure.unit) == ("capture", 2, "requests")
    assert failure.operation == ".item() (operation not permitted when stream is capturing)"
    (capture,) = found.captures
    assert (capture.failed, capture.failed_size) == (failure.operation, 2)


def test_memory_that_is_short() -> None:
    found = boot(
        "[2026-03-04 05:00:05 TP0] Capture target decode CUDA graph begin. backend=full, bs=[1, 2, 8], avail mem=9.50 GB",
        "Capturing batches (bs=8 avail_mem=0.50 GB):   0%|   | 0/3 [00:00<?, ?it/s]",
        "[2026-03-04 05:00:06 TP0] Capture cuda graph failed: CUDA out of memory. Tried to allocate 136.00 MiB. GPU 0 has a "
        "total capacity of 22.36 GiB of which 120.88 MiB is free.",
    )
    (failure,) = found.failures
    assert failure.short_bytes is not None
    assert failure.short_bytes / (1 << 20) == pytest.approx(15.12)
    assert failure.size == 8


VLLM_START = [
    "INFO 11-30 01:21:43 [utils.py:278] non-default args: {'max_num_seqs': 512, 'gpu_memory_utilization': 0.9, 'model': 'm'}",
    "INFO 11-30 01:21:43 [scheduler.py:239] Chunked prefill is enabled with max_num_batched_tokens=16384.",
    "INFO 11-30 01:21:46 [core.py:112] Initializing a V1 LLM engine (v0.22.1) with config: model='m', max_seq_len=4096, enforce_eager=False, "
    "compilation_config={'cudagraph_mode': <CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>, 'cudagraph_capture_sizes': [1, 2, 4, 8, 16], 'max_cudagraph_capture_size': 16}",
    "INFO 11-30 01:21:49 [gpu_model_runner.py:5132] Model loading took 15.0 GiB memory and 0.47 seconds",
    "INFO 11-30 01:22:20 [gpu_model_runner.py:6279] Profiling CUDA graph memory: PIECEWISE=5 (largest=16), FULL=5 (largest=16)",
    "INFO 11-30 01:22:21 [gpu_model_runner.py:6365] Estimated CUDA graph memory: 0.50 GiB total",
    "INFO 11-30 01:22:22 [gpu_worker.py:466] Available KV cache memory: 108.25 GiB",
    "INFO 11-30 01:22:22 [kv_cache_utils.py:1733] GPU KV cache size: 887,264 tokens",
    "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):   0%|   | 0/5 [00:00<?, ?it/s]\rCapturing CUDA graphs (mixed prefill-decode, PIECEWISE): 100%|###| 5/5 [00:00<00:00, 20.7it/s]",
    "Capturing CUDA graphs (decode, FULL): 100%|###| 5/5 [00:00<00:00, 20.7it/s]",
    "INFO 11-30 01:22:27 [gpu_model_runner.py:6456] Graph capturing finished in 5 secs, took 0.65 GiB",
    "INFO 11-30 01:22:27 [gpu_worker.py:619] CUDA graph pool memory: 0.65 GiB (actual), 0.5 GiB (estimated), difference: 0.15 GiB (23.7%).",
]


def test_vllm_start() -> None:
    found = boot(*VLLM_START)
    assert (found.engine, found.version) == ("vllm", "0.22.1")
    assert (found.estimated_bytes, found.actual_bytes) == (gib(0.5), gib(0.65))
    assert found.graphs_by_mode == {"PIECEWISE": 5, "FULL": 5}
    assert (found.kv_tokens, found.kv_bytes) == (887264, gib(108.25))
    (capture,) = found.captures
    assert (capture.count, capture.sizes, capture.unit) == (10, (1, 2, 4, 8, 16), "tokens")
    assert (capture.seconds, capture.used_bytes) == (5.0, gib(0.65))
    assert found.settings["max_num_seqs"] == 512


def test_vllm_counts_graphs_from_the_bars_when_nothing_else_says() -> None:
    assert boot(*VLLM_START[8:11]).graphs_by_mode == {"PIECEWISE": 5, "FULL": 5}


def test_vllm_readings_are_seconds_and_sums_over_engines_are_left_out() -> None:
    def running(prefix: str, requests: int) -> str:
        return (
            f"INFO 02-17 18:32:47 [loggers.py:257] {prefix}Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: "
            f"1.0 tokens/s, Running: {requests} reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%"
        )

    found = boot(
        *VLLM_START, running("Engine 000: ", 4), running("Engine 001: ", 20), running("8 Engines Aggregated: ", 99)
    )
    use = found.decode
    assert use is not None
    assert (use.readings, use.aggregated_readings, use.weighting, use.weight) == (2, 1, "seconds", 20.0)
    assert use.top == 16
    assert use.above_top == 0.5
    assert use.off_graph is None


def test_vllm_step_tables_are_exact() -> None:
    found = boot(
        *VLLM_START,
        "INFO 02-17 18:32:47 [x.py:1] | Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |",
        "INFO 02-17 18:32:47 [x.py:1] |-----------------|---------------|--------------|--------------|-------|",
        "INFO 02-17 18:32:47 [x.py:1] | 13 | 16 | 3 | FULL | 120 |",
        "INFO 02-17 18:32:47 [x.py:1] | 700 | 700 | 0 | NONE | 30 |",
        "INFO 02-17 18:32:57 [x.py:1] | 13 | 16 | 3 | FULL | 50 |",
    )
    steps = found.steps
    assert steps is not None
    assert (steps.steps, steps.by_mode) == (200, {"FULL": 170, "NONE": 30})
    assert steps.eager == 0.15
    assert steps.padding_waste == pytest.approx(3 / 16)
    assert (steps.top, steps.above_top) == (16, 0.15)


def test_a_capped_list_counts_over_the_dump() -> None:
    found = boot(
        *VLLM_START[:3],
        "WARNING 11-30 01:21:50 [x.py:1] Capping cudagraph capture sizes from max 16 to 4 to fit Mamba cache blocks (5 blocks available)",
        *VLLM_START[10:],
    )
    assert found.captures[0].sizes == (1, 2, 4)
    assert "capped" in found.list_changes[0]


def test_tensorrt_llm_keeps_the_last_kv_size_and_collects_sizes() -> None:
    found = boot(
        "[TensorRT-LLM] TensorRT LLM version: 1.2.0",
        "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 1.00 GiB for max tokens in paged KV cache (100).",
        "[07/24/2025-08:18:47] [TRT-LLM] [I] Creating CUDA graph instances for 3 batch sizes.",
        *[f"[TRT-LLM] [I] Run generation-only CUDA graph warmup for batch size={n}, draft_len=3" for n in (4, 2, 1)],
        "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 52.50 GiB for max tokens in paged KV cache (860320).",
    )
    assert (found.engine, found.version, found.kv_tokens, found.kv_bytes) == (
        "tensorrt_llm",
        "1.2.0",
        860320,
        gib(52.5),
    )
    (capture,) = found.captures
    assert (capture.sizes, capture.count, capture.used_bytes, capture.seconds) == ((1, 2, 4), 3, None, None)


# --- arithmetic ---


@given(st.dictionaries(st.integers(1, 500), st.integers(1, 50), min_size=1))
def test_percentiles_are_those_of_the_expanded_list(weights: dict[int, int]) -> None:
    expanded = sorted(Counter(weights).elements())
    found = percentiles(weights)
    for quantile in (50, 90, 95, 99):
        place = -(-len(expanded) * quantile // 100) - 1
        assert found[f"p{quantile}"] == expanded[place]
    assert found["max"] == expanded[-1]


# --- field data ---


@pytest.mark.field_data
def test_field_vllm_default(field_data: Path) -> None:
    found = summarise_file(str(field_data / "logs" / "vllm-0.22.1-default.log"))
    last = found.boots[-1]
    assert (last.estimated_bytes, last.actual_bytes) == (gib(0.5), gib(0.65))
    assert last.graphs_by_mode == {"PIECEWISE": 51, "FULL": 51}
    assert last.kv_tokens == 887_264
    assert last.captures[0].seconds == 5.0
    assert len(last.captures[0].sizes or ()) == 51
    assert found.read + sum(found.skipped.values()) == found.lines == 48


@pytest.mark.field_data
def test_field_sglang_default(field_data: Path) -> None:
    found = summarise_file(str(field_data / "logs" / "sglang-0.5.16-default.log"))
    (last,) = found.boots
    prefill, decode_capture = last.captures
    assert (prefill.count, prefill.seconds, prefill.used_bytes, prefill.backend) == (58, 8.47, gib(1.47), "breakable")
    assert (decode_capture.count, decode_capture.seconds, decode_capture.used_bytes) == (36, 3.28, gib(0.69))
    assert last.kv_tokens == 788_608
    assert last.graph_bytes == gib(1.47) + gib(0.69)
