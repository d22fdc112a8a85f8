from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.engines import ENGINES
from graphtune.engines.base import DeviceFacts, MemoryRule, Serving
from graphtune.tune.kv_budget import FixedBytes, KvBudget, Round, kv_budget
from graphtune.tune.measurements import model_facts_of
from graphtune.units import GIB, MIB, parse_gpu_memory
from tests.synthetic import model_facts, small_sweep

FIXED = FixedBytes(
    context_bytes=700 * MIB,
    weights_bytes=16_060_522_496,
    workspace_bytes=144 * MIB,
    static_buffer_bytes=3 * MIB,
    bytes_per_kv_token=131072,
    page_size=16,
)


def rule_of(engine: str, nominal: str = "80") -> MemoryRule:
    device = DeviceFacts(parse_gpu_memory(nominal).nvml_total_mib)
    return ENGINES[engine].memory_rule(device, Serving())


def budget(engine: str, graph_bytes: int = 126 * MIB, nominal: str = "80", **settings: int) -> KvBudget:
    gpu = parse_gpu_memory(nominal)
    arguments = {"activation_peak_bytes": 12 * MIB, "context_tokens": 1024, **settings}
    return kv_budget(gpu, FIXED, rule_of(engine, nominal), graph_bytes=graph_bytes, **arguments)


def terms(of: KvBudget) -> int:
    return (
        of.context_bytes
        + of.weights_bytes
        + of.workspace_bytes
        + of.static_buffer_bytes
        + (of.activation_peak_bytes or 0)
        + of.graph_bytes
        + of.reserve_bytes
        + of.kv_bytes
    )


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_the_terms_add_up_to_the_device(engine: str) -> None:
    of = budget(engine)
    assert of.fits and terms(of) == of.cuda_total_bytes


@given(
    st.sampled_from(sorted(ENGINES)),
    st.integers(0, 40 * GIB),
    st.integers(0, 40 * GIB),
    st.sampled_from(["16", "24", "48", "80", "141"]),
)
def test_more_graph_memory_never_leaves_more_kv(engine: str, one: int, other: int, nominal: str) -> None:
    less, more = (budget(engine, graph_bytes=n, nominal=nominal) for n in sorted((one, other)))
    assert less.kv_bytes >= more.kv_bytes
    assert less.kv_tokens >= more.kv_tokens
    assert less.short_by_bytes <= more.short_by_bytes
    assert less.reserve_bytes >= 0 and more.reserve_bytes >= 0


@given(
    st.sampled_from(sorted(ENGINES)),
    st.integers(0, 4 * GIB),
    st.none() | st.integers(0, 4 * GIB),
    st.floats(1, 1e5),
    st.integers(0, 10**6),
    st.sampled_from(["16", "24", "80"]),
)
def test_tokens_are_whole_pages_inside_the_bytes(
    engine: str, graphs: int, peak: int | None, context: float, least: int, nominal: str
) -> None:
    of = kv_budget(
        parse_gpu_memory(nominal),
        FIXED,
        rule_of(engine, nominal),
        graph_bytes=graphs,
        activation_peak_bytes=peak,
        context_tokens=context,
        min_kv_tokens=least,
    )
    assert of.kv_tokens % FIXED.page_size == 0
    assert of.kv_tokens * of.bytes_per_kv_token <= of.kv_bytes
    assert of.max_running_requests == int(of.kv_tokens // context)
    assert of.fits == (of.kv_tokens >= max(least, math.ceil(context)))
    assert 0 < of.fraction <= 1
    if not of.fits:
        assert of.short_by_bytes > 0


def test_graph_memory_saved_with_sglang_becomes_kv_byte_for_byte() -> None:
    small, large = budget("sglang", 126 * MIB), budget("sglang", 1086 * MIB)
    assert small.kv_bytes - large.kv_bytes == 960 * MIB
    assert small.fraction > large.fraction


@pytest.mark.parametrize(
    ("nominal", "with_guess", "guess_mib"), [("80", 0.830, 512), ("48", 0.843, 64), ("24", 0.704, 96)]
)
def test_sglangs_rule_is_its_own_without_the_guess_at_decode_graphs(
    nominal: str, with_guess: float, guess_mib: int
) -> None:
    total_mib = parse_gpu_memory(nominal).nvml_total_mib
    rule = rule_of("sglang", nominal)
    assert rule.base == "free_before_load"
    assert rule.fraction == pytest.approx(with_guess + guess_mib / total_mib, abs=0.0011)


def test_sglangs_fraction_gives_back_the_kv_bytes() -> None:
    of = budget("sglang")
    free = of.cuda_total_bytes - of.context_bytes
    slack = free * (1 - of.fraction)
    by_the_engine = free - of.weights_bytes - slack
    assert 0 <= of.kv_bytes - by_the_engine <= free * 1e-4
    assert of.fraction_setting == "--mem-fraction-static" and of.fraction_changed


def test_vllm_takes_graphs_out_of_its_share_of_the_whole_device() -> None:
    of = budget("vllm")
    share = math.floor(of.cuda_total_bytes * 0.92)
    inside = of.weights_bytes + of.workspace_bytes + of.static_buffer_bytes + 12 * MIB + of.graph_bytes
    assert abs(of.kv_bytes - (share - inside)) <= 1
    assert not of.fraction_changed


def test_tensorrt_llm_keeps_a_tenth_of_what_is_free_after_loading() -> None:
    of = budget("tensorrt_llm")
    free = of.cuda_total_bytes - of.context_bytes - of.weights_bytes - of.workspace_bytes - of.static_buffer_bytes
    assert of.kv_bytes == pytest.approx(0.9 * free, abs=2)
    assert not of.fraction_changed
    large = budget("tensorrt_llm", graph_bytes=free // 5)
    assert large.reserve_bytes == 0
    assert large.fraction < 0.9 and large.fraction_changed


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    of = budget("sglang", nominal="16")
    assert not of.fits and of.kv_tokens == 0
    assert terms(of) > of.cuda_total_bytes
    assert of.short_by_bytes == terms(of) - of.cuda_total_bytes + 1024 * of.bytes_per_kv_token
    asked = budget("sglang", min_kv_tokens=10**6)
    assert asked.short_by_bytes == 10**6 * of.bytes_per_kv_token - asked.kv_bytes


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_a_card_smaller_than_the_context_leaves_no_negative_bytes(engine: str) -> None:
    of = budget(engine, nominal="1GiB")
    assert not of.fits and of.kv_bytes == 0
    assert min(of.fraction_base_bytes, of.reserve_bytes, of.own_reserve_bytes) >= 0


def test_the_largest_prefill_or_the_sampled_step_is_the_activation_peak() -> None:
    shapes = {"activation_bytes_per_token": 102_400, "logits_bytes_per_row": 1_282_560}
    fixed = replace(FIXED, **shapes)
    rule = rule_of("vllm")
    assert (rule.chunk_tokens, rule.rows) == (8192, 1024)
    assert fixed.activation_peak_bytes(rule) == 1024 * (102_400 + 1_282_560)
    assert fixed.activation_peak_bytes(replace(rule, rows=256)) == 8192 * 102_400
    gpu = parse_gpu_memory("80")
    of = kv_budget(gpu, fixed, rule, graph_bytes=0, activation_peak_bytes=12 * MIB, context_tokens=1024)
    assert of.activation_peak_bytes == 1024 * (102_400 + 1_282_560)
    large = kv_budget(gpu, fixed, rule, graph_bytes=0, activation_peak_bytes=9 * GIB, context_tokens=1024)
    assert large.activation_peak_bytes == 9 * GIB


def test_sglangs_own_guess_at_graphs_costs_kv_tokens_that_measured_bytes_give_back() -> None:
    """512 MiB are kept for decode graphs up to 256 on an 80 GB card; the measured list takes 126."""
    of = budget("sglang")
    assert of.own_fraction == 0.830 and of.own_kv_tokens < of.kv_tokens
    free = of.cuda_total_bytes - of.context_bytes
    by_its_rule = math.floor(free * 0.830) - of.weights_bytes
    assert abs(of.own_kv_tokens * of.bytes_per_kv_token - by_its_rule) <= 16 * of.bytes_per_kv_token
    assert of.kv_tokens_gained == of.kv_tokens - of.own_kv_tokens


def test_engines_that_measure_for_themselves_arrive_at_the_same() -> None:
    assert budget("vllm").kv_tokens_gained == 0
    assert budget("vllm").kv_bytes_setting == "--kv-cache-memory-bytes"
    assert budget("tensorrt_llm").kv_tokens_gained == 0


@pytest.mark.parametrize(
    ("tokens", "serving", "pool"),
    [
        (1_000_000, Serving(), 4096),
        (1_000_000, Serving(context_len=131072), 3906),
        (100_000, Serving(context_len=131072), 2048),
        (3000, Serving(), 1500),
        (1_000_000, Serving(max_running_requests=300), 300),
        (1_000_000, Serving(max_running_requests=300, dp=4), 75),
        (100, Serving(max_running_requests=300), 50),
    ],
)
def test_sglangs_request_pool(tokens: int, serving: Serving, pool: int) -> None:
    assert ENGINES["sglang"].request_pool(tokens, serving) == pool
    assert ENGINES["vllm"].request_pool(tokens, serving) is None


def test_a_round_is_settled_when_the_pool_does_not_cut_the_list() -> None:
    assert Round(3, 64, 0, 128, 64).settled and Round(3, 64, 0, 10, None).settled
    assert not Round(3, 64, 0, 100, 50).settled


def test_workspace_and_buffers_are_those_of_a_process_that_holds_both_phases() -> None:
    of = small_sweep((1, 2))
    (cell,) = of.cells
    both = replace(model_facts(), workspace_bytes=500 * MIB, static_buffer_bytes=7 * MIB)
    joint = replace(cell, points=(), model=both)
    assert model_facts_of((cell, joint, replace(cell, model=None))) == both
    assert model_facts_of((replace(cell, model=None),)) is None
