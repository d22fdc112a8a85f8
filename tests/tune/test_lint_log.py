"""Verdicts by log: each public case, and what a server reports of itself."""

# ruff: noqa: E501 - log lines are as long as servers print them

from __future__ import annotations

import io

import pytest

from graphtune.tune.lint_log import lint_log
from graphtune.tune.log_summary import summarise
from graphtune.tune.verdict import LintReport, Verdict


def lint_lines(*lines: str) -> LintReport:
    return lint_log(summarise(io.BytesIO("\n".join(lines).encode()), "test.log"))


def of(report: LintReport, code: str) -> list[Verdict]:
    return [verdict for verdict in report.verdicts if verdict.code == code]


CAPTURE_32 = "[2026-03-04 05:00:05 TP0] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2, 4, 8, 12, 16, 24, 32], avail mem=7.10 GB"


def decode_line(requests: int, graph: bool, second: int, rank: str = "TP0") -> str:
    return (
        f"[2026-03-04 05:06:{second:02d} {rank}] Decode batch, #running-req: {requests}, #token: 600, token usage: 0.10, "
        f"cuda graph: {graph}, gen throughput (token/s): 1.0, #queue-req: 0"
    )


def test_a25_the_cliff() -> None:
    report = lint_lines(
        CAPTURE_32, *[decode_line(67, False, s) for s in (1, 2, 3)], *[decode_line(23, True, s) for s in (4, 5)]
    )
    (gap,) = of(report, "gap")
    assert "60% of decode iterations run above the largest size 32" in gap.message
    assert "covering p99 takes 67 requests" in gap.message
    assert "inflated" in gap.message
    assert gap.mended is not None
    assert gap.mended.args == ("--cuda-graph-max-bs-decode", "67")
    assert report.exit_code == 1


def test_a27_ranks() -> None:
    report = lint_lines(decode_line(32, True, 7, "DP0"), decode_line(1, False, 7, "DP1"))
    assert any("DP0 True, DP1 False" in verdict.message for verdict in of(report, "risk"))


def test_a28_mode_by_log() -> None:
    report = lint_lines(
        "WARNING 11-24 11:44:17 [compilation.py:1390] CUDAGraphMode.FULL_AND_PIECEWISE is not supported with spec-decode for attention backend "
        "FlashInferBackend (support: AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE); setting cudagraph_mode=PIECEWISE"
    )
    (mode,) = of(report, "mode")
    assert (mode.asked, mode.runs) == ("FULL_AND_PIECEWISE", "PIECEWISE")
    assert mode.mended is not None


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: CUDA error: operation not permitted when stream is capturing",
        "RuntimeError: cudaErrorStreamCaptureUnsupported: operation not permitted",
    ],
)
def test_a30_a_capture_error_is_no_question_of_memory(message: str) -> None:
    report = lint_lines(
        CAPTURE_32,
        "Capturing batches (bs=16 avail_mem=9.00 GB):   0%|   | 2/8 [00:00<?, ?it/s]",
        "    return x.item()",
        message,
    )
    (error,) = of(report, "error")
    assert "not a memory problem" in error.message
    assert "while capturing size 16 (requests)" in error.message
    assert ".item()" in error.message
    assert error.edit == ()


def test_out_of_memory_says_how_much_is_short_and_what_to_lower() -> None:
    report = lint_lines(
        "[2026-03-04 05:00:00] server_args=ServerArgs(model_path='/m', mem_fraction_static=0.88)",
        CAPTURE_32,
        "Capturing batches (bs=32 avail_mem=0.10 GB):   0%|   | 0/8 [00:00<?, ?it/s]",
        "[2026-03-04 05:00:06 TP0] Capture cuda graph failed: CUDA out of memory. Tried to allocate 136.00 MiB. GPU 0 has a total capacity of 22.36 GiB of which 120.88 MiB is free.",
    )
    (error,) = of(report, "error")
    assert "short by 15.12 MiB" in error.message
    assert "while capturing size 32" in error.message
    assert error.mended is not None
    assert error.mended.args == ("--mem-fraction-static", "0.87")


def test_a33_prefill_padding() -> None:
    report = lint_lines(
        "[2026-03-04 05:00:05 TP0] Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[2816, 3072, 8192], avail mem=7.10 GB",
        *[
            f"[2026-03-04 05:06:07 TP0] Prefill batch, #new-seq: 1, #new-token: {n}, #cached-token: 0, #running-req: 0, #queue-req: 0"
            for n in (3208, 3353)
        ],
    )
    (gap,) = of(report, "gap")
    assert "3208 tokens → 8192, 2.55 times" in gap.message
    assert "3353 tokens → 8192, 2.44 times" in gap.message
    assert gap.sizes == (3208, 3353)


def test_lists_utilization_and_estimates_by_log() -> None:
    report = lint_lines(
        "WARNING 11-24 11:44:17 [x.py:1] Truncating max_cudagraph_capture_size to 96",
        "INFO 11-24 11:44:17 [x.py:1] The current --gpu-memory-utilization=0.9500 is equivalent to less. To keep it, increase --gpu-memory-utilization to 0.9700.",
        "INFO 11-24 11:44:17 [x.py:1] CUDA graph pool memory: 0.65 GiB (actual), 0.50 GiB (estimated), difference: 0.15 GiB (23.7%).",
    )
    assert "the largest size is 96" in of(report, "changed")[0].message
    risks = [verdict.message for verdict in of(report, "risk")]
    assert any("suggests a utilization of 0.97" in text for text in risks)
    assert any("graphs took 666 MiB, the engine estimated 512 MiB" in text for text in risks)
    assert report.exit_code == 0


def test_step_tables_by_log() -> None:
    report = lint_lines("| 13 | 16 | 3 | FULL | 120 |", "| 700 | 700 | 0 | NONE | 30 |")
    assert "20% of 150 steps ran eagerly" in of(report, "gap")[0].message


def test_a_log_with_nothing_wrong() -> None:
    report = lint_lines(CAPTURE_32, *[decode_line(20, True, s) for s in range(5)])
    assert report.verdicts == ()
    assert report.exit_code == 0
