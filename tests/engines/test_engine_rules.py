"""What engines do to a list, each change with its reason; the worked cases exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.engines.base import DeviceFacts, Serving
from graphtune.engines.rules import EffectiveList, GraphCount
from graphtune.engines.sglang import rules as sglang
from graphtune.engines.tensorrt_llm import rules as tensorrt_llm
from graphtune.engines.vllm import rules as vllm
from graphtune.engines.vllm.rules import Asked

UNKNOWN = DeviceFacts(None)
TOKENS_8192 = Serving(max_batched_tokens=8192)
size_lists = st.lists(st.integers(-3, 3000), max_size=30)


def vllm_v1(asked: Asked, width: int) -> EffectiveList:
    serving = Serving(max_batched_tokens=8192, spec_tokens=width - 1)
    return vllm.round_for_speculation(vllm.resolve(asked, UNKNOWN, serving))


@pytest.mark.parametrize(
    ("given_sizes", "expected"),
    [
        ((8, 1, 4, 4, 2), (1, 2, 4, 8)),
        ((1, 2, 512, 9000), (1, 2, 512)),
        ((9000,), ()),
        ((0, 1, 2), (0, 1, 2)),
    ],
)
def test_vllm_user_list(given_sizes: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert vllm.resolve(Asked(given_sizes), UNKNOWN, TOKENS_8192).sizes == expected


@pytest.mark.parametrize(("largest", "top"), [(500, 496), (300, 288), (257, 256), (100, 96)])
def test_vllm_maximum_is_cut_to_the_grid_and_says_so(largest: int, top: int) -> None:
    found = vllm.resolve(Asked(None, largest), UNKNOWN, TOKENS_8192)
    assert found.sizes[-1] == top
    assert [change.kind for change in found.changes] == ["truncate"]


@pytest.mark.parametrize(
    ("asked", "width", "expected", "requests"),
    [
        (Asked(None, 42), 7, (7, 14, 21, 28, 35), 5),
        (Asked(None, 6), 4, (4,), 1),
        (Asked((1, 2, 3, 4, 5, 6)), 4, (4,), 1),
    ],
)
def test_vllm_rounds_to_the_speculation_width(
    asked: Asked, width: int, expected: tuple[int, ...], requests: int
) -> None:
    found = vllm_v1(asked, width)
    assert found.sizes == expected
    assert found.top_requests == requests


def test_vllm_refuses_a_list_with_nothing_left_and_a_maximum_that_disagrees() -> None:
    assert "No valid cudagraph sizes after rounding to multiple of 7" in str(vllm_v1(Asked((1, 2, 4)), 7).error)
    both = vllm.resolve(Asked((1, 2, 4), 8), UNKNOWN, TOKENS_8192)
    assert "(=8)" in str(both.error)
    assert "(=4)" in str(both.error)
    assert vllm.resolve(Asked((1, 2, 4), 4), UNKNOWN, TOKENS_8192).error is None
    assert vllm.resolve(Asked(()), UNKNOWN, TOKENS_8192).error is not None


def test_vllm_rounding_falls_back_to_one_request() -> None:
    found = vllm_v1(Asked((5, 7)), 7)
    assert found.sizes == (7,)
    alone = vllm.round_for_speculation(EffectiveList("tokens", (6,), width=5))
    assert alone.sizes == (5,)
    assert alone.changes[-1].kind == "append"


def test_vllm_full_decode_graphs_end_at_the_request_limit() -> None:
    listed = vllm.resolve(Asked((1, 2, 4, 8, 16)), UNKNOWN, TOKENS_8192)
    assert vllm.full_decode(listed, "V1", 10).sizes == (1, 2, 4, 8)
    assert vllm.full_decode(listed, "V2", 16).sizes == (1, 2, 4, 8, 16)


def test_vllm_runner_v2_has_nothing_to_refuse() -> None:
    serving = Serving(max_batched_tokens=8192, spec_tokens=6)
    listed = vllm.resolve(Asked((1, 2, 4)), UNKNOWN, serving)
    assert vllm.full_decode(listed, "V1", 4).error is not None
    assert vllm.full_decode(listed, "V2", 4) == EffectiveList("tokens", (), listed.changes, None, 7)


def test_vllm_compile_sizes_must_be_capture_sizes() -> None:
    assert vllm.misplaced_compile_sizes((1, 3, 100), (1, 2, 4)) == (3,)


@pytest.mark.parametrize(
    ("sizes", "serving", "layout", "expected"),
    [
        ((8, 1, 4, 4, 2), Serving(), sglang.Layout(), (1, 2, 4, 8)),
        ((1, 2, 4, 8, 512), Serving(max_running_requests=10), sglang.Layout(), (1, 2, 4, 8, 10)),
        ((1, 2, 4, 8), Serving(spec_tokens=3), sglang.Layout(gathered_attention_tp=8), (2, 4, 8)),
    ],
)
def test_sglang_decode_list(
    sizes: tuple[int, ...], serving: Serving, layout: sglang.Layout, expected: tuple[int, ...]
) -> None:
    found = sglang.effective_decode(sizes, serving, layout)
    assert found.error is None
    assert found.sizes == expected


@pytest.mark.parametrize(
    ("sizes", "layout", "error"),
    [
        ((0, 1, 2), sglang.Layout(), "AssertionError: capture_bs=[0, 1, 2]"),
        ((1, 2, 4), sglang.Layout(gathered_attention_tp=8), "AssertionError: capture_bs=[]"),
    ],
)
def test_sglang_asserts_at_the_end_of_start_up(sizes: tuple[int, ...], layout: sglang.Layout, error: str) -> None:
    assert sglang.effective_decode(sizes, Serving(), layout).error == error


def test_sglang_alignment_is_a_product_that_context_parallelism_joins_once() -> None:
    assert sglang.Layout(two_batch_overlap=True, gathered_attention_tp=4).alignment == 8
    assert sglang.Layout(gathered_attention_tp=4, attention_cp=2).alignment == 4
    assert sglang.Layout(gathered_attention_tp=2, attention_cp=3).alignment == 6
    assert sglang.Layout(attention_cp=3, hip=True).alignment == 1
    # Under two-batch overlap the width does not count, and the pool is aligned up before it caps.
    found = sglang.effective_decode(
        (1, 2, 3, 4, 9), Serving(max_running_requests=5, spec_tokens=1), sglang.Layout(two_batch_overlap=True)
    )
    assert found.sizes == (2, 4, 6)


def test_sglang_prefill_list_is_filtered_aligned_and_may_become_empty() -> None:
    serving = Serving(max_running_requests=2, context_len=100)
    assert sglang.effective_prefill((4, 200, 201), serving).sizes == (4, 200)
    assert sglang.effective_prefill((4, 5, 12), serving, sglang.Layout(gathered_attention_tp=8)).sizes == (8, 16)
    assert sglang.effective_prefill((4, 12), serving, sglang.Layout(deepep=True)).sizes == (8, 16)
    empty = sglang.effective_prefill((500,), serving)
    assert empty.error is None
    assert empty.changes[-1].kind == "empty"


def test_sglang_full_prefill_slots_and_prefix_variants() -> None:
    assert sglang.full_prefill_slots(Serving(), 8192) == 16
    assert sglang.full_prefill_slots(Serving(max_running_requests=4), 8192) == 4
    assert sglang.full_prefill_slots(Serving(), 100) == 1
    assert sglang.chunked_prefix_variants(max_prefix=4096, capacity=8192) == (1,)
    assert sglang.chunked_prefix_variants(max_prefix=100_000, capacity=8192) == (1, 2, 4, 8, 16)


def test_tensorrt_llm_list_and_maximum_must_agree() -> None:
    assert tensorrt_llm.configured_decode((2, 1, 4), 4, padding=True).sizes == (1, 2, 4)
    assert "ValueError" in str(tensorrt_llm.configured_decode((1, 2, 4), 8, padding=True).error)
    # An empty list and a maximum of zero count as not given.
    assert tensorrt_llm.configured_decode((), 0, padding=False).sizes[-1] == 128


def test_tensorrt_llm_caps_by_padding() -> None:
    listed = tensorrt_llm.configured_decode((1, 2, 256, 512), None, padding=True)
    serving = Serving(max_running_requests=128)
    assert tensorrt_llm.effective_decode(listed, serving, padding=True).sizes == (1, 2, 128)
    assert tensorrt_llm.effective_decode(listed, serving, padding=False).sizes == (1, 2)
    draft = Serving(max_running_requests=128, max_batched_tokens=100, spec_tokens=4)
    assert tensorrt_llm.effective_decode(listed, draft, padding=True).sizes == (1, 2, 20)


def test_tensorrt_llm_prefill_list() -> None:
    found = tensorrt_llm.effective_prefill((0, 128, 9000), Serving(), max_num_tokens=8192, max_seq_len=None)
    assert found.sizes == (128,)
    short = tensorrt_llm.effective_prefill(
        (64, 8192), Serving(max_running_requests=2), max_num_tokens=8192, max_seq_len=101
    )
    assert short.sizes == (64, 200)


def test_graph_count_is_a_product_that_is_spelt_out() -> None:
    count = GraphCount(36, stream_groups=2, adapter_variants=2, models=2)
    assert count.total == 288
    assert str(count) == "36 sizes × 2 stream groups × 2 adapter variants × 2 models (target and draft) = 288 graphs"
    assert str(GraphCount(36)) == "36 graphs"


@given(size_lists, st.integers(0, 8), st.none() | st.integers(1, 300), st.sampled_from([1, 2, 4, 8]))
def test_sglang_result_obeys_its_own_rules(sizes: list[int], spec: int, running: int | None, align: int) -> None:
    serving = Serving(spec_tokens=spec, max_running_requests=running)
    found = sglang.effective_decode(sizes, serving, sglang.Layout(gathered_attention_tp=align))
    pool = sglang.request_pool(serving)
    assert list(found.sizes) == sorted(set(found.sizes))
    assert all(size * serving.width % align == 0 for size in found.sizes)
    assert pool is None or all(size <= pool + align for size in found.sizes)
    assert (found.error is not None) == (not found.sizes or found.sizes[0] <= 0)
    if found.error is None:
        again = sglang.effective_decode(found.sizes, serving, sglang.Layout(gathered_attention_tp=align))
        assert again.sizes == found.sizes


@given(size_lists, st.integers(0, 8), st.integers(1, 9000))
def test_vllm_result_is_sorted_rounded_and_below_the_limits(sizes: list[int], spec: int, batched: int) -> None:
    serving = Serving(spec_tokens=spec, max_batched_tokens=batched)
    listed = vllm.resolve(Asked(tuple(sizes)), UNKNOWN, serving)
    assert list(listed.sizes) == sorted(set(listed.sizes))
    assert all(size <= batched for size in listed.sizes)
    rounded = vllm.round_for_speculation(listed)
    if rounded.error is None and rounded.sizes and spec:
        assert all(size % serving.width == 0 for size in rounded.sizes)
        assert rounded.sizes[-1] <= max(listed.sizes[-1], 0) or rounded.sizes == (serving.width,)
    full = vllm.full_decode(listed, "V2", 16)
    assert all(serving.width <= size <= 16 * serving.width for size in full.sizes)


@given(size_lists, st.booleans(), st.integers(1, 300))
def test_tensorrt_llm_result_is_below_the_cap(sizes: list[int], padding: bool, running: int) -> None:
    serving = Serving(max_running_requests=running)
    listed = tensorrt_llm.configured_decode(sizes, None, padding=padding)
    found = tensorrt_llm.effective_decode(listed, serving, padding=padding)
    assert all(size <= running for size in found.sizes)
    assert list(found.sizes) == sorted(set(found.sizes))
    if padding and any(size > running for size in listed.sizes):
        assert found.sizes[-1] == running
