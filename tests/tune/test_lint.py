"""Verdicts: the right one for each public case, an edit that mends it, and never an exception."""

# ruff: noqa: E501 - log lines are as long as servers print them

from __future__ import annotations

import io
import json
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from graphtune.engines import ENGINES
from graphtune.engines.base import DeviceFacts
from graphtune.engines.launch import Launch, parse_command, split_options
from graphtune.tune.lint import DENSE_SHARE, lint_launch, thinned
from graphtune.tune.lint_log import lint_log
from graphtune.tune.log_summary import summarise
from graphtune.tune.verdict import FAILING, MEANING, LintReport, Verdict, edit_text
from graphtune.yaml_source import parse_yaml

H100 = DeviceFacts(81559)
GB10 = DeviceFacts(None, (12, 1))


def lint(engine: str, flags: str, device: DeviceFacts = H100, yaml: str | None = None) -> LintReport:
    values, source = parse_yaml(yaml, "file.yaml") if yaml else (None, None)
    launch = Launch(options=split_options(shlex.split(flags))[1], settings=values, source=source)
    return lint_launch(ENGINES[engine], launch, device)


def lint_lines(*lines: str) -> LintReport:
    return lint_log(summarise(io.BytesIO("\n".join(lines).encode()), "test.log"))


def of(report: LintReport, code: str) -> list[Verdict]:
    return [verdict for verdict in report.verdicts if verdict.code == code]


TRT_LISTS = "max_batch_size: 128\ncuda_graph_config:\n  enable_padding: {}\n  batch_sizes: {}\n"

# case, engine, flags, yaml, device, code, words that the message has
BY_FLAGS = [
    (
        "A19",
        "vllm",
        "-cc.cudagraph_mode=FULL -cc.mode=0 --attention-backend CUTLASS_MLA --max-num-seqs 8",
        None,
        H100,
        "mode",
        "asked FULL, the engine runs FULL_DECODE_ONLY",
    ),
    (
        "A19 compiled",
        "vllm",
        "-cc.cudagraph_mode=FULL --attention-backend CUTLASS_MLA --max-num-seqs 8",
        None,
        H100,
        "mode",
        "asked FULL, the engine runs FULL_AND_PIECEWISE",
    ),
    (
        "A19 refused",
        "vllm",
        "-cc.cudagraph_mode=FULL --attention-backend TRITON_ATTN --max-num-seqs 8",
        None,
        H100,
        "",
        "",
    ),
    (
        "A19 unknown backend",
        "vllm",
        "-cc.cudagraph_mode=FULL --attention-backend VARLEN --max-num-seqs 8",
        None,
        H100,
        "risk",
        "unless the attention backend declares ALWAYS; VARLEN is not known to",
    ),
    ("A21", "vllm", "--max-num-seqs 32 --spec-tokens 16", None, H100, "gap", "covers 30 of 32 requests"),
    (
        "A21 stride",
        "vllm",
        "--max-num-seqs 100 --max-cudagraph-capture-size 100",
        None,
        H100,
        "gap",
        "covers 96 of 100 requests",
    ),
    (
        "A21 stride changed",
        "vllm",
        "--max-num-seqs 100 --max-cudagraph-capture-size 100",
        None,
        H100,
        "changed",
        "100 becomes 96",
    ),
    (
        "A21 peak",
        "vllm",
        "--max-num-batched-tokens 700 --max-num-seqs 64 --max-cudagraph-capture-size 2048",
        None,
        H100,
        "changed",
        "2048 becomes 700",
    ),
    (
        "A21 issue",
        "vllm",
        "--max-num-seqs 6 --spec-tokens 6 --max-cudagraph-capture-size 42",
        None,
        H100,
        "gap",
        "covers 5 of 6 requests",
    ),
    ("A21 sglang", "sglang", "--cuda-graph-max-bs-decode 100 --max-running-requests 100", None, H100, "", ""),
    (
        "A23 crash",
        "tensorrt_llm",
        "",
        "backend: _autodeploy\nmax_batch_size: 4\ncuda_graph_config: {batch_sizes: [1, 17, 113]}\n",
        H100,
        "error",
        "size 113 is too large for buffers of 4 requests",
    ),
    (
        "A23 waste",
        "tensorrt_llm",
        "",
        TRT_LISTS.format("true", "[1, 2, 4, 8, 16, 32, 64, 128, 256, 512]"),
        H100,
        "waste",
        "256, 512 requests",
    ),
    (
        "A23 gap",
        "tensorrt_llm",
        "",
        TRT_LISTS.format("true", "[1, 2, 4, 8, 16, 32, 64]"),
        H100,
        "gap",
        "covers 64 of 128 requests",
    ),
    (
        "A23 exact",
        "tensorrt_llm",
        "",
        TRT_LISTS.format("false", "[1, 2, 4, 8]"),
        H100,
        "gap",
        "covers 4 of 128 batch sizes",
    ),
    (
        "A23 no eager path",
        "tensorrt_llm",
        "",
        "backend: _autodeploy\nmax_batch_size: 128\ncuda_graph_config: {batch_sizes: [1, 64]}\n",
        H100,
        "error",
        "no eager path",
    ),
    (
        "A24 sglang",
        "sglang",
        "--cuda-graph-bs-decode 0 1 --max-running-requests 1",
        None,
        H100,
        "error",
        "capture_bs=[0, 1]",
    ),
    ("A24 vllm", "vllm", "--max-num-seqs 1 --cudagraph-capture-sizes 0 1", None, H100, "error", "size 0"),
    (
        "A24 text",
        "tensorrt_llm",
        "",
        'cuda_graph_config:\n  batch_sizes: [0, 1, 2, 2, "8"]\n',
        H100,
        "error",
        "'8' is not a whole number",
    ),
    (
        "A24 zero beside",
        "tensorrt_llm",
        "",
        'cuda_graph_config:\n  batch_sizes: [0, 1, 2, 2, "8"]\n',
        H100,
        "error",
        "size 0",
    ),
    (
        "A24 overrun",
        "vllm",
        "--max-model-len 256 --max-num-seqs 8 --cudagraph-capture-sizes 8 512",
        None,
        H100,
        "risk",
        "more than max_model_len 256",
    ),
    (
        "A28",
        "vllm",
        "--attention-backend FLASHINFER --spec-tokens 2 --max-num-seqs 8",
        None,
        GB10,
        "mode",
        "the engine runs PIECEWISE",
    ),
    (
        "A28 kernels",
        "vllm",
        "--attention-backend FLASHINFER --spec-tokens 2 --max-num-seqs 8",
        None,
        DeviceFacts(None, (10, 0)),
        "",
        "",
    ),
    (
        "A33",
        "sglang",
        "--cuda-graph-bs-prefill 2816 3072 8192 --chunked-prefill-size 8192",
        None,
        H100,
        "gap",
        "3073 tokens would pad to 8192, 2.67 times",
    ),
]


@pytest.mark.parametrize(("case", "engine", "flags", "yaml", "device", "code", "words"), BY_FLAGS)
def test_public_cases_by_flags(
    case: str, engine: str, flags: str, yaml: str | None, device: DeviceFacts, code: str, words: str
) -> None:
    report = lint(engine, flags, device, yaml)
    if not code:
        assert [verdict for verdict in report.verdicts if verdict.code not in ("risk", "dense")] == []
        return
    assert any(words in verdict.message for verdict in of(report, code)), report.verdicts
    assert report.exit_code == int(any(verdict.code in FAILING for verdict in report.verdicts))


def test_the_issue_case_is_mended_by_the_next_grid_point() -> None:
    report = lint("vllm", "--max-num-seqs 6 --spec-tokens 6 --max-cudagraph-capture-size 42")
    (gap,) = of(report, "gap")
    assert (gap.covered, gap.reachable, gap.unit) == (5, 6, "requests")
    assert gap.edit == ("--max-cudagraph-capture-size 42 → --max-cudagraph-capture-size 48",)
    assert gap.mended is not None
    assert of(lint("vllm", shlex.join(gap.mended.args)), "gap") == []


def test_runners_are_told_apart_where_they_differ() -> None:
    report = lint("vllm", "--max-num-seqs 6 --spec-tokens 6 --max-cudagraph-capture-size 42")
    assert [verdict.runner for verdict in of(report, "changed")] == ["V1", "V2"]
    assert {phase.runner for phase in report.phases} == {None, "V1", "V2"}
    _, launch = parse_command(
        "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve m --max-num-seqs 6 --spec-tokens 6 --max-cudagraph-capture-size 42"
    )
    only = lint_launch(ENGINES["vllm"], launch, H100)
    assert {phase.runner for phase in only.phases} == {"V1"}
    refused = lint("vllm", "--max-num-seqs 4 --spec-tokens 6 --cudagraph-capture-sizes 1 2 4")
    assert any("(runner V1)" in verdict.message for verdict in of(refused, "error"))


def test_a_decode_batch_above_the_full_graphs_replays_pieces() -> None:
    report = lint("vllm", "--max-num-seqs 100 --cudagraph-capture-sizes 1 2 4 8 64 128")
    (mode,) = of(report, "mode")
    assert "full graphs cover 64 of 100 requests; 65 to 100 requests replay PIECEWISE graphs" in mode.message
    assert (mode.asked, mode.runs) == ("FULL", "PIECEWISE")
    assert mode.edit == ("--cudagraph-capture-sizes 1 2 4 8 64 128 → --cudagraph-capture-sizes 1 2 4 8 64 100 128",)


def test_defaults_are_a_risk_where_only_the_engine_sets_the_limit() -> None:
    sglang = lint("sglang", "")
    assert sglang.exit_code == 0
    (risk,) = of(sglang, "risk")
    assert "batches above 256 requests run without a graph" in risk.message
    assert risk.edit == ("add --max-running-requests 256",)
    assert "covers 512 of 1024 requests" in of(lint("vllm", ""), "risk")[0].message
    assert lint("tensorrt_llm", "", yaml="enable_chunked_prefill: true\n").exit_code == 0


def test_changed_and_waste_of_a_list_above_the_limit() -> None:
    report = lint("sglang", "--cuda-graph-bs-decode 1 2 4 8 512 --max-running-requests 10")
    assert "append 10" in of(report, "changed")[0].message
    assert of(report, "waste")[0].sizes == (512,)
    assert of(report, "waste")[0].mended is not None
    assert of(report, "waste")[0].mended.args[:6] == ("--cuda-graph-bs-decode", "1", "2", "4", "8", "10")  # type: ignore[union-attr]


def test_prefill_sizes_above_a_chunk_are_waste() -> None:
    report = lint(
        "sglang", "--chunked-prefill-size 2048 --cuda-graph-bs-prefill 4 8 16 32 64 128 256 512 1024 2048 4096"
    )
    (waste,) = of(report, "waste")
    assert (waste.phase, waste.sizes, waste.unit) == ("prefill", (4096,), "tokens")
    assert "captured, never reached" in waste.message


def test_dense_neighbours_by_a_given_share() -> None:
    report = lint("sglang", "--cuda-graph-bs-decode 1 2 4 8 63 64 --max-running-requests 64")
    (dense,) = of(report, "dense")
    assert dense.sizes == (63,)
    assert report.exit_code == 0
    launch = Launch(options=split_options(["--max-running-requests", "256"])[1])
    assert of(lint_launch(ENGINES["sglang"], launch, H100), "dense") == []
    assert of(lint_launch(ENGINES["sglang"], launch, H100, dense_share=0.05), "dense") != []


def test_modes_of_sglang_say_whether_they_were_asked_for() -> None:
    default = of(lint("sglang", "--pp-size 2 --max-running-requests 256"), "mode")[0]
    assert "by default breakable, the engine runs disabled" in default.message
    explicit = of(
        lint("sglang", "--attention-backend torch_native --cuda-graph-backend-decode full --max-running-requests 8"),
        "mode",
    )
    assert any("asked full" in v.message and "overrides an explicit choice" in v.message for v in explicit)
    off = of(lint("sglang", "--chunked-prefill-size -1 --max-running-requests 8"), "mode")[0]
    assert (off.phase, off.runs) == ("prefill", "disabled")


def test_the_memory_saver_with_breakable_graphs_is_an_error_only_with_its_variable() -> None:
    command = (
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH=1 python -m sglang.launch_server --enable-memory-saver --max-running-requests 8"
    )
    _, launch = parse_command(command)
    assert "memory saver" in of(lint_launch(ENGINES["sglang"], launch, H100), "error")[0].message
    assert of(lint("sglang", "--enable-memory-saver --max-running-requests 8"), "error") == []


@pytest.mark.parametrize(
    ("engine", "flags", "yaml", "where", "value"),
    [
        ("vllm", "--gpu-memory-utilization 0.98 --max-num-seqs 8", None, "--gpu-memory-utilization", "0.95"),
        ("sglang", "--mem-fraction-static 0.97 --max-running-requests 8", None, "--mem-fraction-static", "0.95"),
        (
            "tensorrt_llm",
            "",
            "max_batch_size: 8\nkv_cache_config: {free_gpu_memory_fraction: 0.99}\n",
            "free_gpu_memory_fraction",
            "0.9",
        ),
    ],
)
def test_high_fractions_are_a_risk_with_a_lower_one_to_write(
    engine: str, flags: str, yaml: str | None, where: str, value: str
) -> None:
    (risk,) = [verdict for verdict in of(lint(engine, flags, yaml=yaml), "risk") if where in str(verdict.where)]
    assert risk.mended is not None
    assert value in " ".join(risk.mended.args) + (risk.mended.yaml or "")


def test_a_fraction_outside_its_range() -> None:
    assert (
        "without a check" in of(lint("sglang", "--mem-fraction-static 1.5 --max-running-requests 8"), "risk")[0].message
    )
    assert lint("vllm", "--gpu-memory-utilization 1.2").exit_code == 1


def test_kv_bytes_beside_a_utilization() -> None:
    report = lint("vllm", "--gpu-memory-utilization 0.98 --kv-cache-memory-bytes 4G --max-num-seqs 8")
    assert "bypasses" in of(report, "risk")[0].message


def test_a_parser_stop_gives_errors_only_and_the_flag_to_write() -> None:
    report = lint("vllm", "--cudagraph-capture-sizes 1,2,4 --max-num-seqs 4096")
    (error,) = report.verdicts
    assert error.mended is not None
    assert error.mended.args == ("--cudagraph-capture-sizes", "1", "2", "4", "--max-num-seqs", "4096")
    renamed = lint("sglang", "--cuda-graph-max-bs 16 --max-running-requests 16")
    assert renamed.verdicts[0].mended is not None
    assert renamed.verdicts[0].mended.args[:2] == ("--cuda-graph-max-bs-decode", "16")


def test_errors_name_file_line_and_key() -> None:
    report = lint("tensorrt_llm", "", yaml='cuda_graph_config:\n  batch_sizes: [0, 1, 2, 2, "8"]\n')
    assert {verdict.where for verdict in of(report, "error")} == {
        "file.yaml:2: cuda_graph_config.batch_sizes[4]",
        "file.yaml:2: cuda_graph_config.batch_sizes[0]",
    }


def test_json_settings_are_edited_where_they_are() -> None:
    flags = """--cuda-graph-config '{"decode":{"bs":[1,2]}}' --max-running-requests 8"""
    (gap,) = of(lint("sglang", flags), "gap")
    assert gap.mended is not None
    assert json.loads(gap.mended.args[1]) == {"decode": {"bs": [1, 2, 8]}}
    flags = """-cc '{"cudagraph_capture_sizes":[1,2],"cudagraph_mode":"FULL_DECODE_ONLY"}' --max-num-seqs 8"""
    (gap,) = of(lint("vllm", flags), "gap")
    assert gap.mended is not None
    assert json.loads(gap.mended.args[1])["cudagraph_capture_sizes"] == [1, 2, 8]


def test_graph_counts_are_spelt_out() -> None:
    report = lint("vllm", '--enable-lora --max-num-seqs 8 -sc \'{"method":"eagle","num_speculative_tokens":1}\'')
    decode = next(phase for phase in report.phases if phase.phase == "decode")
    assert "2 adapter variants × 2 models (target and draft)" in decode.graphs
    assert decode.graph_count == len(decode.sizes) * 4


# --- by log ---

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


# --- what holds for any input ---

numbers = st.integers(-1, 700).map(str)
lists = st.lists(numbers, min_size=1, max_size=8)
vllm_flags = st.fixed_dictionaries(
    {},
    optional={
        "--max-num-seqs": numbers.map(lambda n: [n]),
        "--spec-tokens": st.integers(0, 8).map(lambda n: [str(n)]),
        "--max-cudagraph-capture-size": numbers.map(lambda n: [n]),
        "--cudagraph-capture-sizes": lists,
        "--max-num-batched-tokens": numbers.map(lambda n: [n]),
        "-cc.cudagraph_mode": st.sampled_from([["FULL"], ["NONE"], ["PIECEWISE"], ["FULL_DECODE_ONLY"]]),
        "--attention-backend": st.sampled_from([["FLASHINFER"], ["CUTLASS_MLA"], ["TRITON_ATTN"]]),
        "--enforce-eager": st.just([]),
    },
)
sglang_flags = st.fixed_dictionaries(
    {},
    optional={
        "--max-running-requests": numbers.map(lambda n: [n]),
        "--cuda-graph-max-bs-decode": numbers.map(lambda n: [n]),
        "--cuda-graph-bs-decode": lists,
        "--cuda-graph-bs-prefill": lists,
        "--chunked-prefill-size": numbers.map(lambda n: [n]),
        "--speculative-algorithm": st.just(["EAGLE"]),
        "--disable-cuda-graph-padding": st.just([]),
        "--pp-size": st.just(["2"]),
    },
)
launches = st.one_of(st.tuples(st.just("vllm"), vllm_flags), st.tuples(st.just("sglang"), sglang_flags))


@settings(max_examples=60, deadline=None)
@given(launches)
def test_an_edit_mends_what_it_says_it_mends(case: tuple[str, dict[str, list[str]]]) -> None:
    engine, flags = case
    text = shlex.join([token for name, values in flags.items() for token in (name, *values)])
    report = lint(engine, text)
    order = [list(MEANING).index(verdict.code) for verdict in report.verdicts]
    assert order == sorted(order)
    assert report.exit_code == int(any(verdict.code in FAILING for verdict in report.verdicts))
    for verdict in report.verdicts:
        assert verdict.message
        if verdict.mended is None:
            assert verdict.edit == ()
            continue
        assert verdict.edit
        after = lint(engine, shlex.join(verdict.mended.args))
        alike = [
            v
            for v in of(after, verdict.code)
            if (v.phase, v.message, v.runner) == (verdict.phase, verdict.message, verdict.runner)
        ]
        assert alike == []


@given(st.lists(st.integers(1, 600), max_size=40), st.floats(0.001, 0.5))
def test_thinning_leaves_no_dense_neighbours_and_keeps_the_top(sizes: list[int], share: float) -> None:
    given_sizes = tuple(sorted(set(sizes)))
    kept = thinned(given_sizes, share)
    assert set(kept) <= set(given_sizes)
    assert kept[-1:] == given_sizes[-1:]
    assert all((b - a) / b >= share for a, b in pairwise(kept))


def test_edits_are_described_option_by_option() -> None:
    before = Launch(options=split_options(["--a", "1", "--b"])[1], settings={"k": {"x": 1}})
    after = Launch(options=split_options(["--a", "2", "--c"])[1], settings={"k": {"x": 2}, "n": 3})
    assert edit_text(before, after) == ("drop --b", "--a 1 → --a 2", "add --c", "k.x: 1 → 2", "add n: 3")


def test_the_default_share_is_a_share() -> None:
    assert 0 < DENSE_SHARE < 1


# --- the command ---


def run(*args: str, text: str | None = None) -> tuple[int, str]:
    from graphtune.cli.app import app

    result = CliRunner().invoke(app, ["lint", *args], input=text)
    return result.exit_code, result.output


def test_the_command_says_five_of_six() -> None:
    args = ["--engine", "vllm", "--max-num-seqs", "6", "--spec-tokens", "6", "--max-cudagraph-capture-size", "42"]
    code, text = run(*args)
    assert code == 1
    assert "covers 5 of 6 requests" in text
    assert "mend: --max-cudagraph-capture-size 42 → --max-cudagraph-capture-size 48" in text
    code, text = run(*args, "--json")
    data = json.loads(text)
    assert (code, data["exit_code"], data["schema"]) == (1, 1, 1)
    assert data["verdicts"][0]["code"] == "gap"


def test_the_command_takes_a_launch_command_in_quotes() -> None:
    code, text = run(
        "vllm serve some/model --max-num-seqs 8 -cc.cudagraph_mode=FULL_DECODE_ONLY -O3", "--gpu-mem", "80"
    )
    assert code == 0
    assert "vllm 0.33, from command" in text


def test_short_flags_of_an_engine_are_not_taken_for_help() -> None:
    code, text = run("--engine", "vllm", "-cc.cudagraph_mode=FULL_DECODE_ONLY", "--max-num-seqs", "8", "-tp", "2")
    assert code == 0
    assert "Usage" not in text


def test_the_command_takes_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seqs: 6\nspec-tokens: 6\nmax-cudagraph-capture-size: 42\n")
    code, text = run("--engine", "vllm", "--config", str(file))
    assert code == 1
    assert "covers 5 of 6" in text
    # A flag beside the file counts over it.
    assert run("--engine", "vllm", "--config", str(file), "--max-num-seqs", "5")[0] == 0
    yaml = tmp_path / "trt.yaml"
    yaml.write_text("cuda_graph_config:\n  enable_padding: true\n  batch_sizes: [1, 2, 4]\n")
    code, text = run(f"trtllm-serve model --max_batch_size 8 --extra_llm_api_options {yaml}")
    assert code == 1
    assert "covers 4 of 8 requests" in text
    json_file = tmp_path / "sglang.json"
    json_file.write_text(json.dumps({"cuda-graph-config": {"decode": {"bs": [1, 2]}}, "max-running-requests": 4}))
    code, text = run("--engine", "sglang", "--config", str(json_file))
    assert code == 1
    assert "covers 2 of 4 requests" in text


def test_the_command_takes_a_log(tmp_path: Path) -> None:
    code, text = run("--log", "-", text="\n".join([CAPTURE_32, decode_line(67, False, 1)]))
    assert code == 1
    assert "above the largest size 32" in text


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "no engine is named"),
        (["--engine", "lmdeploy"], "unknown engine 'lmdeploy'"),
        (["--engine", "vllm", "serve"], "neither a flag nor a launch command"),
        (["echo hello world"], "does not say which engine"),
        (["--engine", "sglang", "vllm serve m"], "the command starts vllm, not sglang"),
        (["vllm serve 'm"], "cannot be read"),
        (["--engine", "vllm", "--config", "/nowhere/x.yaml"], "no such file"),
        (["--log", "/nowhere/x.log"], "no such file"),
        (["--log", "x", "--max-num-seqs", "3"], "a log is checked alone"),
        (["--engine", "vllm", "--gpu-mem", "big"], "not a memory size"),
        (["--engine", "vllm", "--compute-capability", "nine"], "no compute capability"),
        (["--engine", "vllm", "--dense-share", "2"], "no share"),
        (["--engine", "vllm", "--engine-version", "new"], "is not a version"),
    ],
)
def test_bad_input_gets_one_message_and_exit_2(args: list[str], says: str) -> None:
    code, text = run(*args)
    assert code == 2
    assert says in text


@pytest.mark.parametrize("content", ["a: [1", "- 1\n- 2\n", "a: 1\na: 2\n", "\x00"])
def test_a_bad_file_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    for engine in ENGINES:
        code, text = run("--engine", engine, "--config", str(file))
        assert code == 2
        assert "bad.yaml" in text


@pytest.mark.field_data
def test_field_logs_by_lint(field_data: Path) -> None:
    code, text = run("--log", str(field_data / "logs" / "vllm-0.22.1-default.log"))
    assert code == 0
    assert "graphs took 666 MiB, the engine estimated 512 MiB" in text
    assert run("--log", str(field_data / "logs" / "sglang-0.5.16-default.log"))[0] == 0
