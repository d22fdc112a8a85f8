"""The prefill runner on the tape: replay equals eager, fallback is counted, padding is safe, the gate sees faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from graphtune.worker.addresses import AddressChanged
from graphtune.worker.attention.sdpa import SdpaPrefill
from graphtune.worker.graphs.eager import EagerBackend
from graphtune.worker.graphs.shape_key import ShapeKey
from graphtune.worker.graphs.tape_backend import TapeBackend
from graphtune.worker.graphs.tape_breakable import TapeBreakable
from graphtune.worker.prefill_gate import check_prefill, raw_tokens
from graphtune.worker.runners.base import CaptureFailure
from graphtune.worker.runners.prefill import EagerPrefill, GraphPrefill, shape_of
from graphtune.worker.runners.prefill_buffers import PrefillBatch, PrefillBuffers
from tests.worker import tiny_prefill as tiny

SIZES = (4, 8, 16, 32, 64)


@pytest.fixture
def eager() -> EagerPrefill:
    return tiny.eager()


@pytest.mark.parametrize("settings", [{}, {"output": "per_size"}, {"debug_eager": True}])
@pytest.mark.parametrize("order", ["descending", "ascending"])
def test_random_prefills_agree_with_eager(eager: EagerPrefill, settings: dict[str, Any], order: str) -> None:
    backend = TapeBreakable(output_rows=max(SIZES), **settings)
    runner = tiny.captured(eager, *SIZES, backend=backend, order=order)
    random = np.random.default_rng(5)
    with torch.inference_mode():
        for step in range(16):
            count = int(random.integers(1, 6))
            lengths = random.integers(1, 64 // count, count).tolist()
            live = tiny.live(eager, lengths, [int(random.integers(0, 65 - n)) for n in lengths], seed=step)
            logits = runner.run(live).clone()
            assert logits.shape == (count, eager.model.config.vocab_size)
            torch.testing.assert_close(logits, eager.run(live), rtol=1e-4, atol=1e-5)
            tiny.release(eager, live)
    assert set(runner.admitted) <= {"graph", "too_much_padding"} and runner.admitted["graph"] > 10


def test_a_recording_has_a_break_per_layer(eager: EagerPrefill) -> None:
    runner = GraphPrefill(eager, TapeBreakable(), tiny.capture_list(8))
    with torch.inference_mode():
        [(size, timing)] = list(runner.capture())
    assert size == 8 and not isinstance(timing, CaptureFailure)
    assert timing.segments == eager.model.config.num_layers + 1


@pytest.mark.parametrize(
    ("lengths", "prefixes", "settings", "reason"),
    [
        ([40, 30], [0, 0], {}, "above_top"),
        ([1], [9], {}, "too_much_padding"),
        ([7], [0], {"padding": False}, "no_exact_size"),
    ],
)
def test_what_is_not_admitted_runs_eager_and_is_counted(
    lengths: list[int], prefixes: list[int], settings: dict[str, Any], reason: str
) -> None:
    eager = tiny.eager(max_tokens=128)
    runner = tiny.captured(eager, *SIZES, **settings)
    with torch.inference_mode():
        live = tiny.live(eager, lengths, prefixes)
        assert torch.equal(runner.run(live), eager.run(live))
    assert runner.admitted == {reason: 1}


def test_what_only_the_scheduler_knows_is_refused_by_name(eager: EagerPrefill) -> None:
    runner = tiny.captured(eager, 8)
    with torch.inference_mode():
        live = tiny.live(eager, [4, 3], [5, 0])
        shape = shape_of(live)
        wanted = eager.run(live).clone()
        assert torch.equal(runner.run(live, replace(shape, decode_requests=1)), wanted)
        assert torch.equal(runner.run(live, replace(shape, longest=None)), wanted)
        assert torch.equal(runner.run(live, replace(shape, width=3)), wanted)
        assert torch.equal(runner.run(live, others_admit=False), wanted)
        torch.testing.assert_close(runner.run(live), wanted, rtol=1e-4, atol=1e-5)
    assert runner.admitted == {
        "mixed_batch": 1,
        "context_unknown": 1,
        "width_mismatch": 1,
        "other_rank": 1,
        "graph": 1,
    }


def test_the_waste_cap_is_a_setting(eager: EagerPrefill) -> None:
    with torch.inference_mode():
        live = tiny.live(eager, [1], [3])
        for waste_cap, reason in (
            (2.0, "too_much_padding"),
            (None, "graph"),
            (8.0, "graph"),
            (7.9, "too_much_padding"),
        ):
            runner = tiny.captured(eager, 8, waste_cap=waste_cap)
            runner.run(live)
            assert runner.admitted == {reason: 1}


def test_the_gate_is_green_and_complete(eager: EagerPrefill) -> None:
    runner = tiny.captured(eager, *SIZES)
    with torch.inference_mode():
        checks = check_prefill(runner, seed=3)
    assert [check.size for check in checks] == list(SIZES)
    assert [check.raw_sizes for check in checks] == [(2, 4), (5, 8), (9, 16), (17, 32), (33, 64)]
    assert all(check.passed and check.equal_at_padded and check.kv_untouched for check in checks), checks
    assert len(eager.table._held) == 0, "the gate returns its pages"


def test_the_gate_leaves_the_pool_as_it_was(eager: EagerPrefill) -> None:
    runner = tiny.captured(eager, 8, 16)
    with torch.inference_mode():
        before = eager.cache.pool[:, :, 1:].clone()
        check_prefill(runner, seed=3)
        assert torch.equal(eager.cache.pool[:, :, 1:], before)


def test_raw_sizes_of_the_gate_are_admitted() -> None:
    assert raw_tokens(64, 32, 2.0, True) == (33, 64)
    assert raw_tokens(64, 8, 2.0, True) == (32, 64)
    assert raw_tokens(64, 8, None, True) == (9, 64)
    assert raw_tokens(64, 8, 1.5, True) == (43, 64)
    assert raw_tokens(64, 8, 2.0, False) == (64,)


class ForgetsTails(PrefillBuffers):
    def clear_tail(self, raw: int, padded_tokens: int) -> None:
        return None


class WritesEveryRow(SdpaPrefill):
    """Writes KV of all padded rows, as kernels over the whole bucket would: the sink takes what is padding."""

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        assert self._batch is not None
        slots = self._batch.out_slots.long()
        self._cache.keys[layer].flatten(0, 1).index_copy_(0, slots, k)
        self._cache.values[layer].flatten(0, 1).index_copy_(0, slots, v)
        super().forward(layer, q, k, v, out)


def test_padded_rows_write_to_the_sink_and_a_stale_tail_damages_another_request() -> None:
    eager = tiny.eager(attention=WritesEveryRow)
    with torch.inference_mode():
        assert all(check.passed for check in check_prefill(tiny.captured(eager, 8, 16), seed=3))
        eager.buffers = ForgetsTails(64, 6, tiny.CPU)
        checks = check_prefill(tiny.captured(eager, 8, 16), seed=3)
    assert all(check.passed is False and "KV outside" in str(check.reason) for check in checks), checks


class FreezesTheFirstBatch(SdpaPrefill):
    """Keeps to the batch it was first planned for, as an attention whose metadata is recorded would."""

    def plan(self, batch: PrefillBatch) -> None:
        if self._batch is None or self._batch.raw_tokens != batch.raw_tokens:
            super().plan(batch)


class LeavesRows(SdpaPrefill):
    """Leaves the last real row of its output as it was."""

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        assert self._batch is not None
        real = int(self._batch.extend_lens.sum())
        kept = out[real - 1].clone()
        super().forward(layer, q, k, v, out)
        out[real - 1] = kept


@pytest.mark.parametrize("attention", [FreezesTheFirstBatch, LeavesRows])
def test_the_gate_sees_a_wrong_body(attention: type[SdpaPrefill]) -> None:
    eager = tiny.eager(attention=attention)
    with torch.inference_mode():
        checks = check_prefill(tiny.captured(eager, 8, 16), seed=3)
    assert not all(check.passed for check in checks)


def test_a_temporary_that_nobody_keeps_fails_the_gate_with_its_line(eager: EagerPrefill) -> None:
    body, stray = eager.body, torch.ones(1)
    eager.body = lambda batch: body(batch) * stray  # type: ignore[method-assign]
    with torch.inference_mode():
        (check,) = check_prefill(tiny.captured(eager, 8), seed=3)
    assert not check.passed and "test_prefill.py" in str(check.reason) and "nobody keeps" in str(check.reason)


def test_padding_rows_of_the_output_follow_from_the_padding_alone(eager: EagerPrefill) -> None:
    """Bodies zero the rows beyond the real tokens, so nothing of an earlier batch reaches a later one."""
    runner = tiny.captured(eager, 8)
    tails = []
    with torch.inference_mode():
        for seed in (1, 2):
            first, live = tiny.live(eager, [8], [0], seed=seed), tiny.live(eager, [5], [2], seed=9)
            runner.run(first)
            runner.run(live)
            assert runner.backend.replay(ShapeKey(8))[5:].isfinite().all()
            tails.append(runner.backend.replay(ShapeKey(8))[5:].clone())
            tiny.release(eager, live)
            tiny.release(eager, first)
    assert torch.equal(*tails)


def test_a_rebound_buffer_is_named_before_the_replay(eager: EagerPrefill) -> None:
    runner = tiny.captured(eager, 8)
    with torch.inference_mode():
        live = tiny.live(eager, [7], [0])
        eager.buffers.tensors["out_slots"] = eager.buffers.tensors["out_slots"].clone()
        with pytest.raises(AddressChanged, match="out_slots"):
            runner.run(live)


def test_capturing_changes_no_live_kv_and_leaves_a_finite_sink(eager: EagerPrefill) -> None:
    with torch.inference_mode():
        before = eager.cache.page_checksums()[1:].clone()
        tiny.captured(eager, *SIZES)
        assert torch.equal(eager.cache.page_checksums()[1:], before)
        assert eager.cache.pool[:, :, 0].isfinite().all()


def test_a_size_that_needs_more_requests_than_there_may_be_is_named() -> None:
    eager = tiny.eager(max_tokens=128, max_requests=1)
    runner = GraphPrefill(eager, TapeBreakable(), tiny.capture_list(64, 128))
    with torch.inference_mode():
        outcomes = dict(runner.capture())
    failure = outcomes[128]
    assert isinstance(failure, CaptureFailure) and "2 requests of 64 tokens" in failure.reason
    assert runner.sizes == (64,)


def test_sizes_above_the_buffers_are_refused(eager: EagerPrefill) -> None:
    with pytest.raises(ValueError, match="65 tokens do not fit buffers of 64"):
        GraphPrefill(eager, TapeBreakable(), tiny.capture_list(65))


def test_a_full_recording_has_fixed_request_slots_and_passes_the_gate(eager: EagerPrefill) -> None:
    """The whole body in one recording, attention included: the request axis ends in requests without tokens."""
    runner = tiny.captured(eager, *SIZES, backend=TapeBackend(), request_slots=4)
    with torch.inference_mode():
        checks = check_prefill(runner, seed=3)
        assert all(check.passed and check.equal_at_padded and check.kv_untouched for check in checks), checks
        live = tiny.live(eager, [2] * 5, [3] * 5)
        assert torch.equal(runner.run(live).clone(), eager.run(live))
    assert runner.admitted["too_many_requests"] == 1


def test_without_fixed_slots_a_full_recording_would_forget_requests(eager: EagerPrefill) -> None:
    """It was recorded with as few requests as hold the tokens; the gate's batches of several requests show it."""
    runner = tiny.captured(eager, 16, backend=TapeBackend())
    with torch.inference_mode():
        (check,) = check_prefill(runner, seed=3)
    assert not check.passed


def test_eager_is_a_backend_as_well(eager: EagerPrefill) -> None:
    runner = tiny.captured(eager, 8, 16, backend=EagerBackend())
    with torch.inference_mode():
        live = tiny.live(eager, [4, 3], [5, 0])
        torch.testing.assert_close(runner.run(live).clone(), eager.run(live), rtol=1e-4, atol=1e-5)


def test_pool_bytes_do_not_grow_with_the_layers() -> None:
    pools = []
    for layers in (2, 24):
        backend = TapeBreakable(output_rows=64, segment_bytes=64 * 1024)
        tiny.captured(tiny.eager(num_hidden_layers=layers), 64, backend=backend)
        pools.append(backend.pool_bytes())
    assert abs(pools[1] - pools[0]) <= 64 * 1024


def test_tear_down_drops_the_graphs(eager: EagerPrefill) -> None:
    runner = tiny.captured(eager, 8)
    runner.tear_down()
    assert runner.backend.pool_bytes() == 0 and runner.sizes == ()
    with torch.inference_mode():
        live = tiny.live(eager, [7], [0])
        assert torch.equal(runner.run(live), eager.run(live))
    assert runner.admitted == {"above_top": 1}
