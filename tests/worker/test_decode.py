"""The decode runner on the tape: replay equals eager, fallback is counted, addresses are checked, padding is safe."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from graphtune.results import CaptureList
from graphtune.worker.addresses import AddressChanged
from graphtune.worker.engine import Engine
from graphtune.worker.gate import check_list
from graphtune.worker.runners.base import CaptureFailure, PaddedReplay
from graphtune.worker.runners.buffers import LiveBatch, StaticBuffers, decode_slots
from graphtune.worker.runners.decode import GraphDecode
from graphtune.worker.runners.series import make_batches
from tests.worker import tiny


@pytest.fixture
def engine() -> Engine:
    return tiny.engine()


def captured(engine: Engine, capture_list: CaptureList | None = None) -> GraphDecode:
    runner = engine.decode_runner(capture_list or tiny.capture_list(1, 2, 4, 8))
    with torch.inference_mode():
        engine.eager.warm_up(runner.list.sizes)
        outcomes = list(runner.capture())
    assert not any(isinstance(outcome, CaptureFailure) for _, outcome in outcomes)
    return runner


def batches(engine: Engine, lengths: np.ndarray, seed: int = 0) -> tuple[np.ndarray, list[LiveBatch]]:
    rows = engine.table.admit(lengths.max(axis=0).tolist())
    made = make_batches(engine.table, rows=rows, lengths=lengths, vocab_size=engine.model.config.vocab_size, seed=seed)
    return rows, made


@pytest.mark.parametrize("settings", [{}, {"output": "per_size"}, {"order": "ascending"}, {"workspace": "per_size"}])
def test_random_steps_agree_with_eager(engine: Engine, settings: dict[str, str]) -> None:
    runner = captured(engine, tiny.capture_list(1, 2, 4, 8, **settings))
    random = np.random.default_rng(5)
    with torch.inference_mode():
        for step in range(24):
            size = int(random.integers(1, 9))
            rows, (live,) = batches(engine, random.integers(1, 60, (1, size), dtype=np.int32), seed=step)
            replayed = runner.run(live).clone()
            assert torch.allclose(replayed, engine.eager.run(live), rtol=1e-4, atol=1e-5)
            engine.table.release(rows)
    assert runner.admitted == {"graph": 24}


@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_step_in_a_larger_bucket_agrees_with_eager(engine: Engine, size: int) -> None:
    runner = captured(engine, tiny.capture_list(1, 3, 4, 8))
    step = PaddedReplay(runner, size)
    with torch.inference_mode():
        _, (live,) = batches(engine, np.random.default_rng(size).integers(1, 60, (1, 3), dtype=np.int32))
        step.fill(live)
        step.plan()
        replayed = step.launch().clone()
        assert replayed.shape[0] == 3
        assert torch.allclose(replayed, engine.eager.run(live), rtol=1e-4, atol=1e-5)
    assert not runner.admitted  # no server chose this bucket


def test_a_batch_above_the_top_runs_eager_and_is_counted(engine: Engine) -> None:
    runner = captured(engine, tiny.capture_list(1, 2))
    with torch.inference_mode():
        _, (live,) = batches(engine, np.full((1, 5), 9, dtype=np.int32))
        assert torch.equal(runner.run(live), engine.eager.run(live))
    assert runner.admitted == {"above_top": 1}


def test_the_gate_is_green_and_complete(engine: Engine) -> None:
    runner = captured(engine)
    with torch.inference_mode():
        checks = check_list(runner, seed=3)
    assert [check.size for check in checks] == [1, 2, 4, 8]
    assert all(check.passed and check.equal_at_padded and check.kv_untouched for check in checks)
    assert checks[-1].raw_sizes == (5, 8)


def with_policy(engine: Engine, **policies: str) -> None:
    """Rebuild the eager runner's buffers with other padding policies, as a careless engine would have them."""
    slots = tuple(dataclasses.replace(slot, policy=policies.get(slot.name, slot.policy)) for slot in decode_slots(1))
    engine.eager.buffers = StaticBuffers(slots, engine.eager.buffers.max_requests, engine.device)


def test_stale_output_slots_damage_another_request_and_the_gate_sees_it(engine: Engine) -> None:
    with_policy(engine, out_slots="copy")
    runner = captured(engine)
    with torch.inference_mode():
        checks = check_list(runner, seed=3)
    damaged = [check for check in checks if not check.kv_untouched]
    assert damaged and all(len(check.raw_sizes) > 1 for check in damaged)
    assert all(check.passed is False and "KV outside" in str(check.reason) for check in damaged)


def test_a_stale_request_row_reads_outside_the_table(engine: Engine) -> None:
    with_policy(engine, req_rows="copy")
    runner = captured(engine, tiny.capture_list(4))
    with torch.inference_mode():
        _, (live,) = batches(engine, np.full((1, 3), 9, dtype=np.int32))
        engine.eager.buffers.tensors["req_rows"][3] = engine.table.max_requests + 5
        with pytest.raises(IndexError):
            runner.run(live)


def test_a_padded_row_without_a_legal_length_has_no_position(engine: Engine) -> None:
    """Length 0 puts the padded row's token at position −1, which no rope table has."""
    slots = tuple(
        dataclasses.replace(slot, pad_value=0) if slot.policy == "sentinel" else slot for slot in decode_slots(1)
    )
    runner = captured(engine, tiny.capture_list(4))
    with torch.inference_mode():
        _, (live,) = batches(engine, np.full((1, 3), 9, dtype=np.int32))
        careless = StaticBuffers(slots, engine.eager.buffers.max_requests, engine.device)
        batch = careless.fill(live, 4)
        assert batch.positions.tolist() == [8, 8, 8, -1]
        with pytest.raises(IndexError):
            engine.eager.forward(batch)
        assert torch.isfinite(runner.run(live)).all()


def test_a_stale_token_id_changes_nothing_that_is_read(engine: Engine) -> None:
    """The proof of the ``copy`` policy of input_ids: any tail gives the same live rows and the same KV."""
    runner = captured(engine, tiny.capture_list(4))
    with torch.inference_mode():
        _, (live,) = batches(engine, np.full((1, 3), 9, dtype=np.int32))
        outputs = []
        for stale in (0, 7, engine.model.config.vocab_size - 1):
            engine.eager.buffers.tensors["input_ids"][3:] = stale
            outputs.append((runner.run(live).clone(), engine.cache.page_checksums()[1:].clone()))
    assert all(torch.equal(logits, outputs[0][0]) and torch.equal(kv, outputs[0][1]) for logits, kv in outputs)


def test_a_temporary_that_nobody_keeps_fails_the_gate_with_its_line(engine: Engine) -> None:
    runner = engine.decode_runner(tiny.capture_list(2))
    forward = engine.eager.forward
    stray = torch.ones(1)
    engine.eager.forward = lambda batch: forward(batch) * stray  # type: ignore[method-assign]
    with torch.inference_mode():
        list(runner.capture())
        (check,) = check_list(runner, seed=3)
    assert not check.passed and "test_decode.py" in str(check.reason) and "nobody keeps" in str(check.reason)


def test_a_rebound_buffer_is_named_before_the_replay(engine: Engine) -> None:
    runner = captured(engine)
    with torch.inference_mode():
        _, (live,) = batches(engine, np.full((1, 2), 9, dtype=np.int32))
        engine.eager.buffers.tensors["out_slots"] = engine.eager.buffers.tensors["out_slots"].clone()
        with pytest.raises(AddressChanged, match="out_slots"):
            runner.run(live)


def test_capturing_again_changes_no_live_kv(engine: Engine) -> None:
    runner = captured(engine)
    with torch.inference_mode():
        _, (live,) = batches(engine, np.full((1, 8), 30, dtype=np.int32))
        runner.run(live)
        before = engine.cache.page_checksums()[1:].clone()
    again = captured(engine)
    assert torch.equal(engine.cache.page_checksums()[1:], before)
    with torch.inference_mode():
        assert torch.equal(again.run(live).clone(), engine.eager.run(live))


def test_one_size_that_cannot_be_recorded_is_named_and_the_others_work(engine: Engine) -> None:
    runner = engine.decode_runner(tiny.capture_list(1, 2, 4))
    forward = engine.eager.forward

    def reads_the_host(batch):  # type: ignore[no-untyped-def]
        logits = forward(batch)
        return logits * float(logits.sum().item()) if batch.padded_size == 2 else logits

    engine.eager.forward = reads_the_host  # type: ignore[method-assign]
    with torch.inference_mode():
        outcomes = dict(runner.capture())
    failure = outcomes[2]
    assert isinstance(failure, CaptureFailure) and "item" in failure.reason and "test_decode.py" in failure.reason
    assert runner.sizes == (1, 4)


@pytest.mark.parametrize("order", ["descending", "ascending"])
def test_breakable_decode_passes_the_gate_and_agrees_with_eager(engine: Engine, order: str) -> None:
    """Attention runs between the segments, planned for the padded size as an eager step is."""
    runner = captured(engine, tiny.capture_list(1, 2, 4, 8, backend="breakable", order=order))
    with torch.inference_mode():
        checks = check_list(runner, seed=5)
        assert all(check.passed and check.equal_at_padded for check in checks), [check.reason for check in checks]
        rows, steps = batches(engine, np.asarray([[3, 17, 40], [4, 18, 41], [5, 19, 42]], dtype=np.int32))
        for step in steps:
            torch.testing.assert_close(runner.run(step).clone(), engine.eager.run(step), rtol=1e-4, atol=1e-5)
        engine.table.release(rows)
    assert runner.admitted["graph"] >= 3
