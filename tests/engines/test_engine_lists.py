"""Default lists: counts and ends as the engines produce them, and what holds for any input."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.engines import ENGINES, engine_named
from graphtune.engines.base import DeviceFacts, Serving
from graphtune.engines.sglang import lists as sglang
from graphtune.engines.tensorrt_llm import lists as tensorrt_llm
from graphtune.engines.vllm import lists as vllm
from graphtune.errors import InputError

H100 = DeviceFacts(81559)
BLACKWELL = DeviceFacts(183359, (10, 0))

devices = st.builds(
    DeviceFacts,
    st.none() | st.integers(1000, 400_000),
    st.none() | st.sampled_from([(8, 0), (9, 0), (10, 0), (10, 3), (12, 0)]),
    st.none() | st.sampled_from(["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA GB10"]),
)
servings = st.builds(
    Serving,
    tp=st.sampled_from([1, 2, 4, 8]),
    max_running_requests=st.none() | st.integers(1, 5000),
    max_batched_tokens=st.none() | st.integers(1, 40_000),
    chunked_prefill_size=st.none() | st.integers(-1, 40_000),
    context_len=st.none() | st.integers(1, 200_000),
    spec_tokens=st.integers(0, 20),
    padding=st.none() | st.booleans(),
    performance_mode=st.sampled_from(["balanced", "interactivity", "throughput"]),
    dp=st.sampled_from([1, 2, 8]),
)


@pytest.mark.parametrize(
    ("largest", "count"), [(8, 4), (24, 7), (32, 8), (48, 10), (100, 17), (160, 24), (256, 36), (512, 52)]
)
def test_sglang_decode_counts(largest: int, count: int) -> None:
    sizes = sglang.generate_decode(largest)
    assert len(sizes) == count
    assert sizes[-1] == largest


def test_sglang_decode_under_speculation_and_without_padding() -> None:
    assert len(sglang.generate_decode(256, speculative=True)) == 51
    assert sglang.generate_decode(5, padding=False) == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(("largest", "count"), [(2048, 42), (4096, 50), (8192, 58), (16384, 74)])
def test_sglang_prefill_counts(largest: int, count: int) -> None:
    sizes = sglang.generate_prefill(largest)
    assert len(sizes) == count
    assert sizes[-1] == largest


def test_sglang_prefill_does_not_append_its_maximum() -> None:
    assert sglang.generate_prefill(3000)[-1] == 2816
    assert sglang.generate_prefill(-1) == ()


def test_sglang_lists_of_compiled_and_ragged_batches() -> None:
    assert sglang.generate_cpu(5, padding=False) == (1, 2, 3, 4, 5)
    assert sglang.generate_cpu(90)[15:] == (16, 18, 20, 22, 24, 26, 28, 30, *range(32, 81, 4), 84, 90)
    assert sglang.compile_sizes((1, 2, 32, 40)) == (1, 2, 32)
    assert sglang.verify_tiers((1, 2, 4), 3) == (3, 6, 12)


@pytest.mark.parametrize(
    ("mib", "chunk", "decode", "decode_tp4"),
    [
        (20479, 2048, 8, 8),
        (20480, 4096, 48, 160),
        (35839, 4096, 48, 160),
        (35840, 4096, 32, 160),
        (61439, 4096, 32, 160),
        (61440, 8192, 256, 512),
        (163839, 8192, 256, 512),
        (163840, 16384, 512, 512),
        (None, 4096, 160, 160),
    ],
)
def test_sglang_tiers_have_strict_bounds(mib: int | None, chunk: int, decode: int, decode_tp4: int) -> None:
    device = DeviceFacts(mib)
    assert sglang.chunked_prefill_size(device, Serving()) == chunk
    assert sglang.decode_max(device, Serving(tp=2)) == decode
    assert sglang.decode_max(device, Serving(tp=4)) == decode_tp4


def test_sglang_defaults_follow_the_request_limit() -> None:
    engine = ENGINES["sglang"]
    assert engine.default_decode_sizes(H100, Serving(max_running_requests=10)) == (1, 2, 4, 8, 10)
    assert engine.default_decode_sizes(H100, Serving(spec_tokens=3))[-1] == 48
    assert len(engine.default_prefill_sizes(H100, Serving())) == 58


@pytest.mark.parametrize(
    ("device", "serving", "count", "top"),
    [
        (H100, Serving(), 51, 512),
        (DeviceFacts(24564), Serving(), 51, 512),
        (BLACKWELL, Serving(), 83, 1024),
        (H100, Serving(max_running_requests=100), 29, 200),
        (H100, Serving(max_running_requests=8), 5, 16),
        (H100, Serving(performance_mode="interactivity"), 76, 512),
    ],
)
def test_vllm_default_counts(device: DeviceFacts, serving: Serving, count: int, top: int) -> None:
    sizes = vllm.generate(device, serving)
    assert len(sizes) == count
    assert sizes[-1] == top


def test_vllm_default_holds_the_whole_decode_batch() -> None:
    assert 100 in vllm.generate(H100, Serving(max_running_requests=100))
    assert vllm.generate(H100, Serving(max_running_requests=8)) == (1, 2, 4, 8, 16)
    assert 100 not in vllm.generate(H100, Serving(max_running_requests=100), 128)


def test_vllm_maximum_alone_ends_on_the_grid() -> None:
    assert len(vllm.generate(H100, Serving(), 2048)) == 147
    assert vllm.generate(H100, Serving(), 100)[-1] == 96
    # The step's token limit is added whenever it fits, so that the peak is not eager.
    assert 700 in vllm.generate(H100, Serving(max_batched_tokens=700), 2048)


@pytest.mark.parametrize(
    ("device", "serving", "limits"),
    [
        (DeviceFacts(183359), Serving(), (1024, 16384)),
        (H100, Serving(), (1024, 8192)),
        (H100, Serving(offline=True), (1024, 16384)),
        (DeviceFacts(81559, None, "NVIDIA A100-SXM4-80GB"), Serving(), (256, 2048)),
        (DeviceFacts(24564), Serving(), (256, 2048)),
        (DeviceFacts(24564), Serving(performance_mode="throughput"), (512, 4096)),
        (H100, Serving(max_running_requests=4, context_len=1000), (4, 4000)),
        (H100, Serving(max_batched_tokens=512), (512, 512)),
    ],
)
def test_vllm_limits(device: DeviceFacts, serving: Serving, limits: tuple[int, int]) -> None:
    found = vllm.limits(device, serving)
    assert (found.max_num_seqs, found.max_num_batched_tokens) == limits


@pytest.mark.parametrize(
    ("largest", "padding", "count"),
    [(128, True, 19), (256, True, 21), (512, True, 25), (2048, True, 49), (128, False, 34), (2048, False, 38)],
)
def test_tensorrt_llm_counts(largest: int, padding: bool, count: int) -> None:
    sizes = tensorrt_llm.generate_decode(largest, padding=padding)
    assert len(sizes) == count
    assert sizes[-1] == largest


def test_tensorrt_llm_releases_differ_above_128() -> None:
    newer = tensorrt_llm.generate_decode(512, padding=True)
    older = tensorrt_llm.generate_decode(512, padding=True, powers_above_128=True)
    assert [size for size in newer if size > 128] == [192, 256, 320, 384, 448, 512]
    assert [size for size in older if size > 128] == [256, 512]
    assert engine_named("tensorrt-llm").at_version("1.2").older  # type: ignore[attr-defined]


def test_tensorrt_llm_default_is_what_the_engine_can_run() -> None:
    engine = ENGINES["tensorrt_llm"]
    assert len(engine.default_decode_sizes(H100, Serving())) == 34
    assert engine.default_decode_sizes(H100, Serving(padding=True, max_running_requests=20)) == (1, 2, 4, 8, 16, 20)
    assert engine.default_decode_sizes(H100, Serving(max_running_requests=20))[-1] == 20
    assert engine.default_decode_sizes(H100, Serving(max_batched_tokens=3, spec_tokens=4)) == ()
    assert engine.default_prefill_sizes(H100, Serving()) == ()
    assert tensorrt_llm.DEFAULT_PREFILL_SIZES[:9] == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert tensorrt_llm.DEFAULT_PREFILL_SIZES[-1] == 3072


@pytest.mark.parametrize("name", list(ENGINES))
@given(device=devices, serving=servings)
def test_every_default_list_ascends_and_fits(name: str, device: DeviceFacts, serving: Serving) -> None:
    engine = ENGINES[name]
    decode = engine.default_decode_sizes(device, serving)
    prefill = engine.default_prefill_sizes(device, serving)
    for sizes in (decode, prefill):
        assert list(sizes) == sorted(set(sizes))
        assert all(size >= 1 for size in sizes)
    if name != "vllm" and serving.max_running_requests is not None and decode:
        assert decode[-1] <= serving.max_running_requests
    if name == "vllm" and decode:
        assert decode[-1] <= vllm.limits(device, serving).max_num_batched_tokens


@given(largest=st.integers(1, 5000))
def test_generators_append_their_maximum(largest: int) -> None:
    for sizes in (
        sglang.generate_decode(largest),
        sglang.generate_decode(largest, speculative=True),
        sglang.generate_decode(largest, padding=False),
        tensorrt_llm.generate_decode(largest, padding=True),
        tensorrt_llm.generate_decode(largest, padding=False),
        tensorrt_llm.generate_decode(largest, padding=True, powers_above_128=True),
    ):
        assert sizes[-1] == largest
        assert list(sizes) == sorted(set(sizes))


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(InputError, match="unknown engine 'lmdeploy'"):
        engine_named("lmdeploy")
