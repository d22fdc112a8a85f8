"""CUDA graphs pass the suite that every full backend must pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from graphtune.worker.graphs.alias import alias
from graphtune.worker.graphs.backend import GraphBackend
from graphtune.worker.graphs.full import FullBackend
from tests.worker.graphs.backend_suite import BackendSuite

pytestmark = pytest.mark.gpu


class TestFullBackend(BackendSuite):
    @pytest.fixture
    def device(self) -> torch.device:
        torch.cuda.set_stream(torch.cuda.Stream())
        return torch.device("cuda", 0)

    @pytest.fixture(params=["shared", "per_size"])
    def make_backend(self, request: pytest.FixtureRequest, device: torch.device) -> Callable[[], GraphBackend]:
        return partial(FullBackend, output=request.param)


def test_an_alias_reads_the_memory_and_does_not_hold_it() -> None:
    owner = torch.randn(4, 6, device="cuda", dtype=torch.bfloat16)[1:, 2:]
    view = alias(owner)
    assert view.data_ptr() == owner.data_ptr() and view.stride() == owner.stride() and torch.equal(view, owner)
    held = torch.cuda.memory_allocated()
    del owner
    assert torch.cuda.memory_allocated() < held


def test_the_default_stream_is_refused() -> None:
    torch.cuda.set_stream(torch.cuda.default_stream())
    with pytest.raises(RuntimeError, match="stream of your own"):
        FullBackend()
