"""Breakable tapes, and what only a tape can tell."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch

from graphtune.worker.graphs.breakable import Segmented
from graphtune.worker.graphs.breaks import Break, EagerBreak, eager_break
from graphtune.worker.graphs.shape_key import ShapeKey
from graphtune.worker.graphs.tape_backend import TapeBackend
from graphtune.worker.graphs.tape_breakable import TapeBreakable
from tests.worker.graphs.breakable_suite import BreakableSuite, Layered, Make

CPU = torch.device("cpu")


class TestTapeBreakable(BreakableSuite):
    @pytest.fixture
    def device(self) -> torch.device:
        return CPU

    @pytest.fixture
    def make(self) -> Make:
        return partial(TapeBreakable, segment_bytes=self.segment_bytes())

    def segment_bytes(self) -> int:
        return 64 * 1024


def capture(backend: TapeBreakable, model: Layered, *sizes: int) -> None:
    with torch.no_grad(), backend.capture_session():
        for size in sizes:
            backend.capture_one(ShapeKey(size), partial(model.forward, size))


def owners(model: Layered) -> dict[str, torch.Tensor]:
    return {"x": model.x, **{f"w{i}": weight for i, weight in enumerate(model.weights)}}


def test_strong_arguments_would_make_the_pool_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counterpart of the suite's test: without aliases a deep model's pool is many segments larger."""
    monkeypatch.setattr("graphtune.worker.graphs.tape_breakable._TapeCutter.alias", lambda self, tensor: tensor)
    grown = []
    for layers in (2, 24):
        backend = TapeBreakable()
        capture(backend, Layered(CPU, layers=layers, rows=16), 16)
        grown.append(backend.pool_bytes())
    assert grown[1] > 5 * grown[0]


def test_a_recording_depends_on_its_owners_bridges_and_rows_only() -> None:
    model, backend = Layered(CPU), TapeBreakable()
    capture(backend, model, 8)
    assert backend.strays(ShapeKey(8), owners(model)) == ()
    [named] = [stray for stray in backend.strays(ShapeKey(8), {k: v for k, v in owners(model).items() if k != "w1"})]
    assert "breakable_suite.py" in named


def test_an_argument_that_nobody_keeps_is_named() -> None:
    """The body reads it at every replay, though no segment does."""
    stray, x = torch.ones(4, 8), torch.ones(4, 8)

    @eager_break
    def body(y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return y * scale

    backend = TapeBreakable()
    with torch.no_grad(), backend.capture_session():
        backend.capture_one(ShapeKey(4), lambda: body(x * 2, stray) + 1)
    [named] = backend.strays(ShapeKey(4), {"x": x})
    assert "argument of a break" in named and "test_breakable_tape.py" in named


def test_a_tensor_that_a_body_puts_aside_is_named() -> None:
    aside, x = [], torch.ones(4, 8)

    @eager_break
    def body(y: torch.Tensor) -> None:
        aside.append(y)

    def forward() -> torch.Tensor:
        y = x * 2
        body(y)
        return y + 1

    backend = TapeBreakable()
    with torch.no_grad(), backend.capture_session():
        backend.capture_one(ShapeKey(4), forward)
    [named] = backend.strays(ShapeKey(4), {"x": x})
    assert "outlives its recording" in named


def test_a_full_recording_runs_through_breaks() -> None:
    """Only a breakable backend cuts; elsewhere the body is a part of the recording, and may not read the host."""
    model, backend = Layered(CPU), TapeBackend()
    with torch.no_grad(), backend.capture_session():
        assert backend.capture_one(ShapeKey(8), partial(model.forward, 8)).segments == 1
    bodies = model.bodies
    assert torch.equal(backend.replay(ShapeKey(8)), model.forward(8))
    assert model.bodies == bodies + 3, "the eager forward's; none by the replay"


def test_a_container_has_one_segment_more_than_breaks() -> None:
    cut = Break("b", lambda: None, (), {}, None)
    with pytest.raises(ValueError, match="1 segments cannot have 1 breaks"):
        Segmented((TapeSegment(),), (cut,), torch.ones(1), None)


class TapeSegment:
    def replay(self) -> None:
        return None


def test_a_marked_method_is_bound_to_its_object() -> None:
    model = Layered(CPU)
    out = torch.empty(8, model.x.shape[1])
    model.mix(model.x, out)
    other = torch.empty_like(out)
    Layered.mix.run_eager(model, model.x, other)
    assert isinstance(Layered.mix, EagerBreak) and torch.equal(out, other) and model.bodies == 2


def test_shared_rows_are_made_when_no_warm_up_holds_memory_any_more() -> None:
    """Else they would lie beside the last output, in a segment that is then twice as large as they are."""
    outputs: list[weakref.ref[torch.Tensor]] = []
    alive: list[list[bool]] = []

    class Watched(TapeBreakable):
        def drop_free_memory(self) -> None:
            alive.append([made() is not None for made in outputs])

    model = Layered(CPU)

    def forward() -> torch.Tensor:
        output = model.forward(8)
        outputs.append(weakref.ref(output))
        return output

    backend = Watched()
    with torch.no_grad(), backend.capture_session():
        backend.capture_one(ShapeKey(8), forward)
    assert alive == [[False, False]]
