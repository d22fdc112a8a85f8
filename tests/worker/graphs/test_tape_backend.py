"""The tape as a full backend."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch

from graphtune.results import Sharing
from graphtune.worker.graphs.backend import CaptureError, GraphBackend
from graphtune.worker.graphs.eager import EagerBackend
from graphtune.worker.graphs.shape_key import ShapeKey
from graphtune.worker.graphs.tape_backend import TapeBackend
from tests.worker.graphs.backend_suite import BackendSuite, Step

CPU = torch.device("cpu")


class TestTapeBackend(BackendSuite):
    @pytest.fixture
    def device(self) -> torch.device:
        return CPU

    @pytest.fixture(params=["shared", "per_size"])
    def make_backend(self, request: pytest.FixtureRequest) -> Callable[[], GraphBackend]:
        return partial(TapeBackend, output=request.param)


def test_stray_and_escaped_tensors_by_key() -> None:
    step, backend = Step(CPU), TapeBackend()
    stray = torch.ones(64)
    cache: dict[int, torch.Tensor] = {}

    def forward() -> torch.Tensor:
        if len(cache) < 3:
            cache[len(cache)] = stray * 3
        return step.forward(4) + stray + cache[2 if 2 in cache else 0]

    with torch.no_grad(), backend.capture_session():
        backend.capture_one(ShapeKey(4), forward)
        backend.capture_one(ShapeKey(2), lambda: step.forward(2))
    owners = {"x": step.x, "w": step.w, "state": step.state, "count": step.count}
    [found, escaped] = backend.strays(ShapeKey(4), owners)
    assert "cache[len(cache)] = stray * 3" in escaped
    assert "stray * 3" in str(found)
    assert backend.strays(ShapeKey(2), owners) == ()


def test_garbage_collection_is_frozen_during_a_session_only() -> None:
    backend = TapeBackend()
    assert gc.get_freeze_count() == 0
    with pytest.raises(CaptureError, match="item"), torch.no_grad(), backend.capture_session():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        step, warmups = Step(CPU), []

        def forward() -> torch.Tensor:
            warmups.append(0)
            return step.x * step.count.item() if len(warmups) == 3 else step.x

        backend.capture_one(ShapeKey(4), forward)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_cycles_from_before_a_session_do_not_hold_its_pool() -> None:
    backend = TapeBackend(segment_bytes=64)
    x = torch.ones(256)

    def cyclic() -> torch.Tensor:
        holder: list[object] = [x + 1]
        holder.append(holder)
        return x * 2

    with torch.no_grad():
        for size in (1, 2, 3):
            with backend.capture_session():
                backend.capture_one(ShapeKey(size), cyclic)
            # One block for the output, one for the cycle; the next session finds both free.
            assert backend.pool_bytes() == 2048


def test_segment_bytes_set_the_granularity() -> None:
    for segment_bytes, expected in ((64, 2048), (1 << 16, 1 << 16), (1 << 20, 1 << 20)):
        backend = TapeBackend(segment_bytes=segment_bytes)
        with torch.no_grad(), backend.capture_session():
            backend.capture_one(ShapeKey(1), lambda: torch.ones(256) * 1)
        assert backend.pool_bytes() == expected


def test_shared_outputs_are_used_again_by_later_captures() -> None:
    x, given = torch.ones(1024), {}

    def pool_bytes(output: Sharing) -> int:
        backend = TapeBackend(output=output, segment_bytes=64)
        with torch.no_grad(), backend.capture_session():
            for size in (4, 3, 2):
                backend.capture_one(ShapeKey(size), lambda size=size: x[: size * 256] * size)  # type: ignore[misc]
        for size in (4, 2, 3):
            given[size] = backend.replay(ShapeKey(size))
            assert given[size].tolist() == [size] * size * 256
        return backend.pool_bytes()

    assert pool_bytes("shared") == 4096
    assert given[2].data_ptr() == given[4].data_ptr()
    assert pool_bytes("per_size") == 4096 + 3072 + 2048
    assert given[4].tolist() == [4] * 1024, "still valid after other replays"


def test_a_failing_warmup_passes_through() -> None:
    backend = TapeBackend()
    with pytest.raises(ZeroDivisionError), backend.capture_session():
        backend.capture_one(ShapeKey(1), lambda: torch.ones(1) * (1 // 0))
    assert not backend.can_run(ShapeKey(1))


def test_eager_runs_the_forward_at_replay() -> None:
    backend, step, hooks = EagerBackend(), Step(CPU), []
    with torch.no_grad():
        with backend.capture_session():
            timing = backend.capture_one(ShapeKey(4), lambda: step.forward(4), (), lambda: hooks.append(step.calls))
        assert (step.calls, hooks, backend.pool_bytes()) == (2, [1, 2], 0)
        assert (timing.nodes, timing.segments) == (None, None)
        expected, state, _ = step.expected(4)
        assert torch.equal(backend.replay(ShapeKey(4)), expected)
        assert torch.equal(step.state, state)
    assert step.calls == 3
    assert backend.can_run(ShapeKey(4)) and not backend.can_run(ShapeKey(5))
    backend.cleanup()
    assert not backend.can_run(ShapeKey(4))
