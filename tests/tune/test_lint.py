"""Verdicts: the right one for each public case, an edit that mends it, and never an exception."""

from __future__ import annotations

import json
import shlex

import pytest

from graphtune.engines import ENGINES
from graphtune.engines.base import DeviceFacts
from graphtune.engines.launch import Launch, parse_command, split_options
from graphtune.tune.lint import lint_launch
from graphtune.tune.verdict import FAILING, LintReport, Verdict
from graphtune.yaml_source import parse_yaml

H100 = DeviceFacts(81559)
GB10 = DeviceFacts(None, (12, 1))


def lint(engine: str, flags: str, device: DeviceFacts = H100, yaml: str | None = None) -> LintReport:
    values, source = parse_yaml(yaml, "file.yaml") if yaml else (None, None)
    launch = Launch(options=split_options(shlex.split(flags))[1], settings=values, source=source)
    return lint_launch(ENGINES[engine], launch, device)


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
        "A21 speculation",
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


def test_that_case_is_mended_by_the_next_grid_point() -> None:
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
