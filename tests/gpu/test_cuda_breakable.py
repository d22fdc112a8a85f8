"""Breakable CUDA graphs pass the suite that every breakable backend must pass."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch

from graphtune.worker.graphs.backend import CaptureError
from graphtune.worker.graphs.breaks import eager_break
from graphtune.worker.graphs.cuda_breakable import CudaBreakable
from graphtune.worker.graphs.shape_key import ShapeKey
from tests.worker.graphs.breakable_suite import BreakableSuite, Layered, Make

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def stream() -> None:
    torch.cuda.set_stream(torch.cuda.Stream())


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


class TestCudaBreakable(BreakableSuite):
    @pytest.fixture
    def device(self) -> torch.device:
        torch.cuda.set_stream(torch.cuda.Stream())
        return torch.device("cuda", 0)

    @pytest.fixture
    def make(self, device: torch.device) -> Make:
        return CudaBreakable


def test_the_default_stream_is_refused() -> None:
    torch.cuda.set_stream(torch.cuda.default_stream())
    with pytest.raises(RuntimeError, match="stream of your own"):
        CudaBreakable()


def test_an_empty_segment_is_silent_and_not_launched(device: torch.device) -> None:
    @eager_break
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x, backend = torch.ones(4, 8, device=device), CudaBreakable(output="per_size")
    with torch.no_grad(), warnings.catch_warnings(), backend.capture_session():
        warnings.simplefilter("error")
        backend.capture_one(ShapeKey(4), lambda: double(double(x)))
    x.fill_(3.0)
    assert torch.equal(backend.replay(ShapeKey(4)), x * 4)
    backend.cleanup()


def test_a_side_stream_is_joined_before_a_segment_ends(device: torch.device) -> None:
    side, x = torch.cuda.Stream(), torch.ones(4, 8, device=device)

    @eager_break
    def body(y: torch.Tensor) -> torch.Tensor:
        return y * 2

    def forward() -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
        return body(x) + y

    backend = CudaBreakable(output="per_size")
    with torch.no_grad(), backend.capture_session():
        backend.capture_one(ShapeKey(4), forward)
    x.fill_(5.0)
    assert torch.equal(backend.replay(ShapeKey(4)), torch.full((4, 8), 16.0, device=device))
    backend.cleanup()


def test_a_fork_by_events_that_is_not_joined_fails_by_name(device: torch.device) -> None:
    side, x = torch.cuda.Stream(), torch.ones(4, 8, device=device)

    @eager_break
    def body(y: torch.Tensor) -> torch.Tensor:
        return y * 2

    def forward() -> torch.Tensor:
        side.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(side):
            y = x + 1
        return body(x) + y

    backend = CudaBreakable()
    with torch.no_grad(), backend.capture_session(), pytest.raises(CaptureError, match="segment"):
        backend.capture_one(ShapeKey(4), forward)


def test_more_sizes_and_layers_take_no_more_eager_memory(device: torch.device) -> None:
    """A body that fills given memory leaves nothing held between segments: only rows and pool stay."""
    held = []
    # The first product on a stream makes cuBLAS take its workspace, which stays.
    torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
    for layers in (2, 24):
        model, backend = Layered(device, layers=layers, rows=2048), CudaBreakable()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with torch.no_grad(), backend.capture_session():
            for size in (2048, 1024):
                backend.capture_one(ShapeKey(size), partial(model.forward, size))
        held.append(torch.cuda.memory_allocated() - before)
        backend.cleanup()
    assert held[0] == held[1]


@pytest.mark.first
def test_shared_rows_get_a_segment_of_their_own(device: torch.device) -> None:
    """12 MiB of output beside a pool: torch gives as much a segment to itself when none is free."""
    x = torch.ones(1024, 3072, device=device)
    backend = CudaBreakable(output_rows=1024)
    with torch.no_grad(), backend.capture_session():
        backend.capture_one(ShapeKey(1024), lambda: (torch.cat([x, x], dim=1) * 2)[:, :3072].contiguous())
    at = backend.owned(ShapeKey(1024))["output_rows"].data_ptr()
    segments = torch.cuda.memory_snapshot()
    (segment,) = [one for one in segments if one["address"] <= at < one["address"] + one["total_size"]]
    assert segment["total_size"] == x.numel() * x.element_size()
    backend.cleanup()
