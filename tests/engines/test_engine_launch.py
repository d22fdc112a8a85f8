"""Launches as people write them, and what each engine's parser takes and refuses."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.engines import ENGINES
from graphtune.engines.base import DeviceFacts, Edit, Engine
from graphtune.engines.launch import Launch, dump_yaml, options_from_mapping, parse_command, split_options
from graphtune.engines.options import sized
from graphtune.engines.resolution import Resolution
from graphtune.engines.sglang import options as sglang_options
from graphtune.engines.vllm import keys as vllm_keys
from graphtune.errors import InputError
from graphtune.yaml_source import parse_yaml

H100 = DeviceFacts(81559)


def resolve(engine: str, text: str) -> Resolution:
    return ENGINES[engine].resolve(Launch(options=split_options(shlex.split(text))[1]), H100)


def refused(engine: str, text: str) -> str:
    return " | ".join(refusal.message for refusal in resolve(engine, text).refusals)


@pytest.mark.parametrize(
    ("command", "engine", "program", "options"),
    [
        ("vllm serve model --max-num-seqs 8", "vllm", ("vllm", "serve", "model"), ["--max-num-seqs"]),
        (
            "python -m sglang.launch_server --model-path m --tp=2",
            "sglang",
            ("python", "-m", "sglang.launch_server"),
            ["--model-path", "--tp"],
        ),
        ("trtllm-serve m --config c.yaml", "tensorrt_llm", ("trtllm-serve", "m"), ["--config"]),
        ("/opt/bin/vllm serve m -O3", "vllm", ("/opt/bin/vllm", "serve", "m"), ["-O3"]),
        ("vllm serve m --max-num-seqs 8 2>&1 | tee log", "vllm", ("vllm", "serve", "m"), ["--max-num-seqs"]),
        (
            "vllm serve m --served-model-name vllm --seed 1",
            "vllm",
            ("vllm", "serve", "m"),
            ["--served-model-name", "--seed"],
        ),
        ("myserver --flag", None, ("myserver",), ["--flag"]),
    ],
)
def test_commands(command: str, engine: str | None, program: tuple[str, ...], options: list[str]) -> None:
    found, launch = parse_command(command)
    assert found == engine
    assert launch.program == program
    assert [option.name for option in launch.options] == options


def test_a_command_over_several_lines_with_variables_and_docker() -> None:
    _, launch = parse_command("A=1 VLLM_USE_V2_MODEL_RUNNER=0 vllm serve m \\\n  --max-num-seqs 8 \\\n --enforce-eager")
    assert launch.environment == {"A": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert [option.values for option in launch.options] == [("8",), ()]
    engine, launch = parse_command(
        "docker run --gpus all -e VLLM_USE_V2_MODEL_RUNNER=1 vllm/vllm-openai:v0.33 --model m --max-num-seqs 4"
    )
    assert engine == "vllm"
    assert launch.environment == {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert [option.name for option in launch.options] == ["--model", "--max-num-seqs"]


def test_unclosed_quotes_are_refused() -> None:
    with pytest.raises(InputError, match="cannot be read"):
        parse_command("vllm serve 'm")


@given(st.text(max_size=200))
def test_any_text_is_a_command_or_refused(text: str) -> None:
    try:
        _, launch = parse_command(text)
    except InputError:
        return
    launch.flags()


def test_options_are_edited_in_place() -> None:
    launch = Launch(options=split_options(["--a", "1", "--b=2", "--a", "3"])[1])
    assert launch.with_option("--a", "9").flags().args == ("--b=2", "--a", "9")
    assert launch.without("--a").flags().args == ("--b=2",)
    assert launch.with_option("--c", "x", "y").flags().args == ("--a", "1", "--b=2", "--a", "3", "--c", "x", "y")


def test_yaml_settings_are_edited_and_written_back() -> None:
    values, source = parse_yaml("a:\n  b: [1, 2]\n  c: null\n", "f.yaml")
    launch = Launch(settings=values, source=source)
    assert launch.where(("a", "b")) == "f.yaml:2: a.b"
    changed = launch.with_setting(("a", "d", "e"), True).with_setting(("a", "b"), [3])
    assert changed.flags().yaml == "a:\n  b: [3]\n  c: null\n  d:\n    e: true\n"
    assert launch.setting(("a", "x", "y")) is None
    assert parse_yaml(dump_yaml({"k": "yes", "n": -1.5, "empty": {}}), "g")[0] == {"k": "yes", "n": -1.5, "empty": {}}


def test_yaml_keys_are_long_flags() -> None:
    values, source = parse_yaml(
        "max_num_seqs: 8\nenforce-eager: true\nx: false\ncudagraph-capture-sizes: [1, 2]\n", "f.yaml"
    )
    options = options_from_mapping(values, source)
    assert [option.tokens() for option in options] == [
        ("--max-num-seqs", "8"),
        ("--enforce-eager",),
        ("--cudagraph-capture-sizes", "1", "2"),
    ]
    assert options[2].where == "f.yaml:4: cudagraph-capture-sizes"
    with pytest.raises(InputError, match="not a mapping"):
        options_from_mapping((1, 2), source)


@pytest.mark.parametrize(
    ("text", "suffixes", "value"),
    [
        ("4k", sglang_options.SUFFIXES, 4000),
        ("4Ki", sglang_options.SUFFIXES, 4096),
        ("1.5M", sglang_options.SUFFIXES, 1_500_000),
        ("4K", vllm_keys.SUFFIXES, 4096),
        ("4k", vllm_keys.SUFFIXES, 4000),
        ("2.5g", vllm_keys.SUFFIXES, 2_500_000_000),
        ("7", vllm_keys.SUFFIXES, 7),
    ],
)
def test_suffixes(text: str, suffixes: dict[str, float], value: int) -> None:
    assert sized(text, suffixes) == value


@pytest.mark.parametrize(
    ("text", "suffixes"),
    [
        ("4K", sglang_options.SUFFIXES),
        ("1.5Ki", sglang_options.SUFFIXES),
        ("1.5K", vllm_keys.SUFFIXES),
        ("-4", vllm_keys.SUFFIXES),
        ("1.5", vllm_keys.SUFFIXES),
        ("4KiB", vllm_keys.SUFFIXES),
        ("", vllm_keys.SUFFIXES),
    ],
)
def test_suffixes_that_are_refused(text: str, suffixes: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        sized(text, suffixes)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--cuda-graph-max-bs 16", "the start of two flags"),
        ("--cuda-graph-bs 1 2", "the start of two flags"),
        ("--enable-breakable-cuda-graph", "the flag is gone"),
        ("--disable-piecewise-cuda-graph", "the flag is gone"),
        ("--cuda-graph-bs-decode 1,2,4", "cannot be read"),
        ("--cuda-graph-bs-decode [1,2]", "cannot be read"),
        ("--cuda-graph-backend-decode tc_piecewise", "cannot be read"),
        ("--cuda-graph-config {", "not JSON"),
        ('--cuda-graph-config \'{"decode":{"backend":"tc_piecewise"}}\'', "is no backend"),
        ('--cuda-graph-config \'{"decode":{"full_prefill_max_req":1}}\'', "unknown key"),
        ("--chunked-prefill-size 4k", "cannot be read"),
        ("--max-total-tokens 4K", "cannot be read"),
        ("--cuda-graph-max-bs-decode 0", "max_bs is 0"),
        ("--max-running-requests 0", "max_running_requests is 0"),
        ("--tp 0", "tp is 0"),
        ("--enable-torch-compile --disable-cuda-graph-padding", "assertion error"),
        ("--cuda-graph-bs-decode 0 1", "capture_bs=[0, 1]"),
        ("--cuda-graph-bs-decode -4 1", "capture_bs=[-4, 1]"),
        ("--cuda-graph-bs-prefill 0 128", "prefill size 0"),
        ("--max-running-requests", "a value is missing"),
    ],
)
def test_sglang_refuses(flags: str, says: str) -> None:
    assert says in refused("sglang", flags)


@pytest.mark.parametrize(
    "flags",
    [
        '--cuda-graph-config \'{"decode":{"backend":"full","max_bs":256},"prefill":{"backend":"breakable"}}\'',
        "--cuda-graph-bs-decode 4 1 2 2",
        "--max-total-tokens 4Ki --mem-fraction-static 0.8 --enable-mixed-chunk",
        "--disable-cuda-graph",
        "--cuda-graph-bs-decode=8",
        "--some-flag-of-the-model x y --port 3000",
    ],
)
def test_sglang_accepts(flags: str) -> None:
    assert refused("sglang", flags) == ""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--cuda-graph-max-bs 16", "--cuda-graph-max-bs-decode 16"),
        ("--cuda-graph-bs 1 2 4", "--cuda-graph-bs-decode 1 2 4"),
        ("--piecewise-cuda-graph-max-tokens 512", "--cuda-graph-max-bs-prefill 512"),
        ("--piecewise-cuda-graph-tokens 64 128", "--cuda-graph-bs-prefill 64 128"),
        ("--enable-breakable-cuda-graph", "--cuda-graph-backend-prefill breakable"),
        ("--disable-piecewise-cuda-graph", "--cuda-graph-backend-prefill disabled"),
    ],
)
def test_sglang_0_5_16_still_takes_the_old_names(old: str, new: str) -> None:
    older = ENGINES["sglang"].at_version("0.5.16")

    def of(text: str) -> Launch:
        return Launch(options=split_options(shlex.split(text))[1])

    before, after = older.resolve(of(old), H100), older.resolve(of(new), H100)
    assert not before.refusals and before.phases == after.phases
    assert ENGINES["sglang"].resolve(of(old), H100).refusals
    edited = older.edit(of(old), Edit("sizes", "decode", sizes=(1, 8)))
    assert edited is not None and "--cuda-graph-bs-decode" in edited.flags().args
    assert old.split()[0] not in edited.flags().args


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("-cc 3", "cannot be read"),
        ("-cc '{\"level\":3}'", "level is not a key"),
        ("-cc '{\"use_cudagraph\":true}'", "use_cudagraph is not a key"),
        ("-cc '{\"full_cuda_graph\":true}'", "full_cuda_graph is not a key"),
        ("-cc.cudagraph_mode=SOMETIMES", "KeyError"),
        ("-cc.mode=[2,1]", "compile mode"),
        ("-cc.mode=9", "compile mode"),
        ('-cc \'{"cudagraph_capture_sizes":[1,"2"]}\'', "is refused"),
        ("--cudagraph-capture-sizes 1,2,4", "cannot be read"),
        ("--cuda-graph-sizes 1 2", "the flag is unknown"),
        ("--gpu-memory-utilization 1.2", "fails the check"),
        ("-O5", "fails the check"),
        ("-Ofast", "no optimisation level"),
        ("--max-cudagraph-capture-size 64 -cc.max_cudagraph_capture_size=64", "both given"),
        ("--spec-tokens 2 --speculative-config '{\"num_speculative_tokens\":2}'", "both given"),
        ("--cudagraph-capture-sizes 1 2 --max-cudagraph-capture-size 4", "should be consistent"),
        ("--cudagraph-capture-sizes 0 1", "size 0"),
        ("--max-num-seqs 0", "max_num_seqs is 0"),
        ("--max-model-len many", "cannot be read"),
        ("-cc.cudagraph_mode=FULL --attention-backend NEVER_HEARD", ""),
        ('-cc \'{"compile_sizes":[3],"cudagraph_capture_sizes":[1,2,4]}\'', "compile size 3"),
        ("--speculative-config nonsense", "cannot be read"),
    ],
)
def test_vllm_refuses(flags: str, says: str) -> None:
    assert says in refused("vllm", flags)
    assert (says == "") == (refused("vllm", flags) == "")


@pytest.mark.parametrize(
    "flags",
    [
        "--max_num_seqs 8",
        "-cc.cudagraph_mode=full_decode_only",
        "-cc.cudagraph_mode 0",
        "-O3",
        "-O 1",
        "--kv-cache-memory 4G",
        "--kv-cache-memory-bytes 2.5g",
        "--max-model-len auto",
        '--compilation-config \'{"cudagraph_mode":"PIECEWISE","cudagraph_capture_sizes":[1,2]}\'',
    ],
)
def test_vllm_accepts(flags: str) -> None:
    assert refused("vllm", flags) == ""


def test_vllm_dotted_keys_join_and_append() -> None:
    runs = resolve("vllm", "-cc.cudagraph_capture_sizes=[1,2] -cc.cudagraph_capture_sizes+ 4,8 --max-num-seqs 8").phases
    assert runs[0].asked == (1, 2, 4, 8)


def test_vllm_levels_choose_the_mode() -> None:
    assert not any(run.graphs for run in resolve("vllm", "-O0").phases)
    assert all(run.graphs for run in resolve("vllm", "-O2").phases)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cuda_graph_config: 3\n", "a mapping, or null"),
        ("cuda_graph_config: {batch_size: 3}\n", "unknown key 'batch_size'"),
        ("cuda_graph_config: {batch_sizes: 3}\n", "a list of whole numbers"),
        ("cuda_graph_config: {batch_sizes: [1, x]}\n", "'x' is not a whole number"),
        ("cuda_graph_config: {max_batch_size: -1}\n", "max_batch_size is -1"),
        ("cuda_graph_config: {enable_padding: 1}\n", "true or false"),
        ("cuda_graph_config: {mode: prefill}\n", "decode or encode"),
        ("cuda_graph_config: {batch_sizes: [1, 2], max_batch_size: 4}\n", "not the largest"),
        ("cuda_graph_config: {batch_sizes: [0, 2]}\n", "size 0"),
        ("max_batch_size: many\n", "max_batch_size is 'many'"),
        ("kv_cache_config: {free_gpu_memory_fraction: 2}\n", "0 to 1"),
        ("prefill_cuda_graph_backend: full\n", "disabled, piecewise, breakable"),
        (
            "prefill_cuda_graph_backend: breakable\ntorch_compile_config: {enable_fullgraph: true}\n",
            "torch_compile_config",
        ),
        (
            "prefill_cuda_graph_backend: breakable\ntorch_compile_config: {enable_piecewise_cuda_graph: true}\n",
            "contradicts",
        ),
        (
            "backend: _autodeploy\nmax_batch_size: 4\ncuda_graph_config: {batch_sizes: [1, 17]}\n",
            "too large for buffers",
        ),
        ("backend: _autodeploy\nmax_batch_size: 8\ncuda_graph_config: {batch_sizes: [1, 4]}\n", "no eager path"),
    ],
)
def test_tensorrt_llm_refuses(text: str, says: str) -> None:
    values, source = parse_yaml(text, "f.yaml")
    found = ENGINES["tensorrt_llm"].resolve(Launch(settings=values, source=source), H100).refusals
    assert says in " | ".join(f"{refusal.message}: {refusal.accepted}" for refusal in found)
    assert all("f.yaml" in refusal.where for refusal in found)


def test_tensorrt_llm_older_release_has_no_prefill_keys() -> None:
    values, source = parse_yaml("prefill_cuda_graph_backend: breakable\n", "f.yaml")
    launch = Launch(settings=values, source=source)
    older: Engine = ENGINES["tensorrt_llm"].at_version("1.2.0")
    assert "does not exist before 1.3" in older.resolve(launch, H100).refusals[0].message
    assert ENGINES["tensorrt_llm"].resolve(launch, H100).refusals == ()


def test_tensorrt_llm_null_turns_graphs_off_and_flags_count_over_the_file() -> None:
    values, source = parse_yaml("cuda_graph_config: null\n", "f.yaml")
    off = ENGINES["tensorrt_llm"].resolve(Launch(settings=values, source=source), H100)
    assert not any(run.graphs for run in off.phases)
    options = split_options(["--max_batch_size", "16"])[1]
    values, source = parse_yaml("max_batch_size: 64\n", "f.yaml")
    limited = ENGINES["tensorrt_llm"].resolve(Launch(options=options, settings=values, source=source), H100)
    assert limited.phases[0].reach.most == 16


@pytest.mark.parametrize("engine", list(ENGINES))
@given(
    words=st.lists(
        st.sampled_from(
            [
                "--max-num-seqs",
                "--cudagraph-capture-sizes",
                "-cc",
                "-cc.cudagraph_mode",
                "--cuda-graph-config",
                "--max-running-requests",
                "--cuda-graph-bs-decode",
                "--cuda-graph-bs-prefill",
                "--max_batch_size",
                "--spec-tokens",
                "-O",
                "--speculative-config",
                "--chunked-prefill-size",
                "{}",
                '{"decode":{"bs":[1]}}',
                '{"cudagraph_capture_sizes":[1,9]}',
                "0",
                "-1",
                "7",
                "4k",
                "FULL",
                "[1,2]",
                "x",
                "--gpu-memory-utilization",
                "0.97",
                "--max-model-len",
                "--tp",
                "--kv-cache-memory-bytes",
            ]
        ),
        max_size=12,
    )
)
def test_any_flags_resolve(engine: str, words: list[str]) -> None:
    launch = Launch(options=split_options(words)[1])
    resolution = ENGINES[engine].resolve(launch, H100)
    for run in resolution.phases:
        assert list(run.effective.sizes) == sorted(set(run.effective.sizes))
    for edit in (
        Edit("sizes", "decode", (1, 2)),
        Edit("largest", number=8),
        Edit("limit", number=2),
        Edit("mode", text="NONE"),
    ):
        changed = ENGINES[engine].edit(launch, edit)
        if changed is not None:
            ENGINES[engine].resolve(changed, H100)
