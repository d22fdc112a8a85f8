"""Flags out: what the engine's own parser reads as the same list, in the spelling of its version."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.engines import ENGINES
from graphtune.engines.base import DeviceFacts, Engine, Flags, GraphPlan, Serving
from graphtune.engines.launch import Launch, split_options
from graphtune.engines.resolution import Resolution
from graphtune.errors import InputError
from graphtune.yaml_source import parse_yaml

H100 = DeviceFacts(81559)
sizes = st.lists(st.integers(1, 2048), min_size=1, max_size=20).map(tuple)


def read(engine: Engine, flags: Flags, device: DeviceFacts = H100) -> Resolution:
    """What the engine makes of the flags."""
    settings = parse_yaml(flags.yaml, "out.yaml")[0] if flags.yaml else None
    return engine.resolve(Launch(options=split_options(flags.args)[1], settings=settings), device)


def test_sglang_writes_only_what_was_decided() -> None:
    flags = ENGINES["sglang"].flags(GraphPlan(decode=(4, 1, 2), prefill=()), Serving(max_running_requests=4))
    assert flags.args[0] == "--cuda-graph-config"
    assert json.loads(flags.args[1]) == {"decode": {"bs": [1, 2, 4]}, "prefill": {"backend": "disabled"}}
    assert flags.args[2:] == ("--max-running-requests", "4")
    # The default backend is not written: it would be locked.
    same = ENGINES["sglang"].flags(GraphPlan(decode=(1,), decode_backend="full"), Serving())
    assert json.loads(same.args[1]) == {"decode": {"bs": [1]}}
    nothing = ENGINES["sglang"].flags(GraphPlan(mem_fraction=0.85), Serving())
    assert nothing.args == ("--mem-fraction-static", "0.85")


def test_vllm_writes_one_list_in_tokens_and_one_memory_flag() -> None:
    vllm = ENGINES["vllm"]
    flags = vllm.flags(GraphPlan(decode=(1, 2), prefill=(2, 256), mem_fraction=0.9, kv_cache_bytes=1 << 30), Serving())
    assert json.loads(flags.args[1]) == {
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": [1, 2, 256],
    }
    assert "--kv-cache-memory-bytes" in flags.args
    assert "--gpu-memory-utilization" not in flags.args


@pytest.mark.parametrize(
    ("plan", "mode"),
    [
        (GraphPlan(decode=(1,)), "FULL_AND_PIECEWISE"),
        (GraphPlan(decode=(1,), prefill=()), "FULL_DECODE_ONLY"),
        (GraphPlan(decode=()), "NONE"),
        (GraphPlan(decode=(), prefill=(8,)), "PIECEWISE"),
        (GraphPlan(decode=(1,), prefill=(8,), prefill_backend="full"), "FULL"),
        (GraphPlan(decode=(1,), decode_backend="piecewise"), "PIECEWISE"),
    ],
)
def test_vllm_mode_of_a_plan(plan: GraphPlan, mode: str) -> None:
    flags = ENGINES["vllm"].flags(plan, Serving())
    assert json.loads(flags.args[1])["cudagraph_mode"] == mode


def test_tensorrt_llm_writes_padding_and_plain_yaml() -> None:
    plan = GraphPlan(decode=(2, 1), prefill=(256, 512), mem_fraction=0.8)
    flags = ENGINES["tensorrt_llm"].flags(plan, Serving(max_running_requests=2))
    assert flags.yaml == (
        "cuda_graph_config:\n  enable_padding: true\n  batch_sizes: [1, 2]\n"
        "prefill_cuda_graph_backend: breakable\nprefill_capture_num_tokens: [256, 512]\n"
        "max_batch_size: 2\nkv_cache_config:\n  free_gpu_memory_fraction: 0.8\n"
    )
    assert ENGINES["tensorrt_llm"].decode_flags((), Serving()).yaml == "cuda_graph_config: null\n"


@pytest.mark.parametrize("name", list(ENGINES))
@given(decode=sizes)
def test_a_list_within_the_limits_is_read_back_as_it_was_written(name: str, decode: tuple[int, ...]) -> None:
    engine = ENGINES[name]
    serving = Serving(max_running_requests=2048, max_batched_tokens=4096)
    flags = engine.decode_flags(decode, serving)
    assert flags.warnings == ()
    run = read(engine, flags).phases[0]
    assert run.graphs
    assert run.effective.sizes == tuple(sorted(set(decode)))
    assert read(engine, flags).refusals == ()


@pytest.mark.parametrize("name", list(ENGINES))
@given(
    decode=st.none() | st.just(()) | sizes,
    prefill=st.none() | st.just(()) | sizes,
    running=st.none() | st.integers(1, 600),
    batched=st.none() | st.integers(1, 4096),
    spec=st.integers(0, 6),
)
def test_whatever_the_engine_would_change_is_a_warning(
    name: str,
    decode: tuple[int, ...] | None,
    prefill: tuple[int, ...] | None,
    running: int | None,
    batched: int | None,
    spec: int,
) -> None:
    engine = ENGINES[name]
    serving = Serving(max_running_requests=running, max_batched_tokens=batched, spec_tokens=spec)
    flags = engine.flags(GraphPlan(decode=decode, prefill=prefill), serving)
    if flags.warnings:
        return
    resolution = read(engine, flags)
    assert resolution.refusals == ()
    for run in resolution.phases:
        asked = decode if run.phase == "decode" else prefill
        if asked == () and not (name == "vllm" and run.phase == "decode" and prefill):
            assert not run.graphs
        elif asked and not run.shared:
            assert set(asked) <= set(run.effective.sizes)


def test_a_lost_size_is_said_in_requests() -> None:
    flags = ENGINES["vllm"].flags(
        GraphPlan(decode=(7, 14, 21, 28, 35, 40)), Serving(max_running_requests=6, spec_tokens=6)
    )
    assert any("40 dropped or moved" in warning for warning in flags.warnings)
    short = ENGINES["vllm"].flags(
        GraphPlan(decode=(7, 14, 21, 28, 35, 42)),
        Serving(max_running_requests=6, spec_tokens=6, max_batched_tokens=41),
    )
    assert any("covers 5 of 6 requests, 1 left without a graph" in warning for warning in short.warnings)
    sglang = ENGINES["sglang"].decode_flags((1, 2, 512), Serving(max_running_requests=10))
    assert any("512 dropped or moved, 10 captured instead" in warning for warning in sglang.warnings)


@pytest.mark.parametrize("name", list(ENGINES))
@pytest.mark.parametrize("bad", [(0,), (-1, 2), (True,), ("8",), (2.0,)])
def test_sizes_are_checked_because_engines_do_not(name: str, bad: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="no decode capture size"):
        ENGINES[name].decode_flags(bad, Serving())


def test_older_versions_get_their_spelling_or_a_refusal() -> None:
    older = ENGINES["sglang"].at_version("0.5.9")
    assert older.decode_flags((1, 2), Serving()).args == ("--cuda-graph-bs", "1", "2")
    assert older.decode_flags((), Serving()).args == ("--disable-cuda-graph",)
    with pytest.raises(InputError, match="no list of prefill graphs"):
        older.flags(GraphPlan(prefill=(128,)), Serving())
    with pytest.raises(InputError, match="is not known here"):
        ENGINES["sglang"].at_version("0.5.13").decode_flags((1,), Serving())
    with pytest.raises(InputError, match="no cudagraph_mode"):
        ENGINES["vllm"].at_version("0.9.2").decode_flags((1,), Serving())
    trt = ENGINES["tensorrt_llm"].at_version("1.2")
    with pytest.raises(InputError, match="no prefill_cuda_graph_backend"):
        trt.flags(GraphPlan(prefill=(128,)), Serving())
    assert "prefill" not in str(trt.flags(GraphPlan(decode=(1,), prefill=()), Serving()).yaml)
    with pytest.raises(InputError, match="is not a version"):
        ENGINES["vllm"].at_version("latest")


def test_what_an_engine_cannot_do_is_refused() -> None:
    with pytest.raises(InputError, match="'piecewise' graphs"):
        ENGINES["sglang"].flags(GraphPlan(prefill=(8,), prefill_backend="piecewise"), Serving())
    with pytest.raises(InputError, match="'breakable' decode graphs"):
        ENGINES["tensorrt_llm"].flags(GraphPlan(decode=(8,), decode_backend="breakable"), Serving())
    for name in ("sglang", "tensorrt_llm"):
        with pytest.raises(InputError, match="in bytes"):
            ENGINES[name].flags(GraphPlan(kv_cache_bytes=1), Serving())
