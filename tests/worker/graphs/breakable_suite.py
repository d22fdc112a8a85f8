"""What every breakable backend must do on top of what a full one does. Subclass and give ``make`` and ``device``.

``make(**settings)`` makes a backend. Bodies here run on both machines, so they may use torch only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from graphtune.worker.graphs.backend import CaptureError, GraphBackend
from graphtune.worker.graphs.breakable import BreakableBackend
from graphtune.worker.graphs.breaks import eager_break
from graphtune.worker.graphs.shape_key import ShapeKey
from tests.worker.graphs.backend_suite import BackendSuite, Step

WIDTH = 1024
Make = Callable[..., BreakableBackend]


class Layered:
    """``layers`` layers of a product and a break; the body works on the live rows of ``live``, a host number."""

    def __init__(self, device: torch.device, layers: int = 3, rows: int = 8) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(rows, WIDTH, generator=generator).to(device)
        self.weights = [torch.randn(WIDTH, WIDTH, generator=generator).to(device) / 32 for _ in range(layers)]
        self.live = rows
        self.bodies = 0

    @eager_break
    def mix(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out`` with the live rows' running mean and zero the rest."""
        self.bodies += 1
        live = min(self.live, out.shape[0])
        counts = torch.arange(1, live + 1, device=out.device).unsqueeze(1)
        out[:live] = hidden[:live].cumsum(0) / counts
        out[live:] = 0

    def forward(self, size: int) -> torch.Tensor:
        hidden = self.x[:size] * 1.0
        for weight in self.weights:
            mixed = torch.empty_like(hidden)
            self.mix(hidden, mixed)
            hidden = hidden + torch.nn.functional.silu(mixed @ weight)
        return hidden


class BreakableSuite(BackendSuite):
    """The inherited tests see outputs held per key; shared rows have tests of their own."""

    @pytest.fixture
    def make(self) -> Make:
        raise NotImplementedError

    @pytest.fixture
    def make_backend(self, make: Make) -> Callable[[], GraphBackend]:
        return lambda: make(output="per_size")

    @pytest.fixture
    def model(self, device: torch.device) -> Layered:
        return Layered(device)

    def test_two_warmups_each_followed_by_the_hook_then_one_recording(self, backend: GraphBackend, step: Step) -> None:
        events: list[str] = []

        def forward() -> torch.Tensor:
            events.append("forward")
            return step.forward(4)

        with backend.capture_session():
            timing = backend.capture_one(ShapeKey(4), forward, [step.x], lambda: events.append("hook"))
        assert events == ["hook", "forward", "hook", "forward", "hook", "forward"]
        assert min(timing.warmup_s, timing.record_s, timing.instantiate_s) > 0
        assert timing.segments == 1

    @pytest.mark.parametrize("output", ["shared", "per_size"])
    def test_replay_equals_eager_with_live_rows_that_change(self, make: Make, model: Layered, output: str) -> None:
        backend = make(output=output)
        with backend.capture_session():
            timings = [backend.capture_one(ShapeKey(n), partial(model.forward, n)) for n in (8, 4)]
        assert [timing.segments for timing in timings] == [4, 4]
        for size, live in ((8, 8), (4, 3), (8, 5), (4, 1), (8, 8)):
            model.live = live
            model.x.copy_(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(live)))
            assert torch.equal(backend.replay(ShapeKey(size)), model.forward(size))

    def test_a_replay_runs_bodies_and_nothing_else_of_the_model(self, make: Make, model: Layered) -> None:
        calls = []
        backend = make()

        def forward() -> torch.Tensor:
            calls.append(0)
            return model.forward(8)

        with backend.capture_session():
            backend.capture_one(ShapeKey(8), forward)
        assert (len(calls), model.bodies) == (3, 9)
        backend.replay(ShapeKey(8))
        assert (len(calls), model.bodies) == (3, 12)

    def test_the_barrier_is_called_between_segment_and_body_at_capture_only(self, make: Make, device: Any) -> None:
        events: list[str] = []

        @eager_break
        def body(x: torch.Tensor) -> torch.Tensor:
            events.append("body")
            return x * 2

        x = torch.ones(4, 8, device=device)
        backend = make(barrier=lambda: events.append("barrier"))
        with backend.capture_session():
            backend.capture_one(ShapeKey(4), lambda: body(body(x) + 1))
        assert events == ["body"] * 4 + ["barrier", "body"] * 2
        backend.replay(ShapeKey(4))
        assert events.count("barrier") == 2

    def test_adjacent_breaks_leave_empty_segments(self, make: Make, device: torch.device) -> None:
        @eager_break
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        x = torch.ones(4, 8, device=device)
        backend = make(output="per_size")
        with backend.capture_session():
            timing = backend.capture_one(ShapeKey(4), lambda: double(double(double(x))))
        assert timing.segments == 4 and not timing.nodes
        x.fill_(3.0)
        assert torch.equal(backend.replay(ShapeKey(4)), x * 8)

    def test_results_of_every_kind_are_renewed_in_place(self, make: Make, device: torch.device) -> None:
        """A new tensor, a nested tuple, None, the given output, a view of an argument."""
        x = torch.ones(4, 8, device=device)

        @eager_break
        def nested(y: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
            return y + 1, [y * 2, None]

        @eager_break
        def given(y: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
            return torch.mul(y, 3, out=out)

        @eager_break
        def part(y: torch.Tensor) -> torch.Tensor:
            return y[:, 4:]

        @eager_break
        def nothing(y: torch.Tensor) -> None:
            y.add_(1)

        def forward() -> torch.Tensor:
            y = x * 1
            a, (b, none) = nested(y)
            assert none is None and b is not None
            c = given(a + b, out=torch.empty_like(y))
            nothing(c)
            return part(c * 2) + part(y)

        backend = make()
        with backend.capture_session():
            timing = backend.capture_one(ShapeKey(4), forward)
        assert timing.segments == 6
        for seed in range(3):
            x.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)))
            assert torch.equal(backend.replay(ShapeKey(4)), forward())

    @pytest.mark.parametrize("result", [1, True, "text", {"a": 1}])
    def test_a_result_that_would_be_frozen_is_refused(self, make: Make, device: torch.device, result: Any) -> None:
        x = torch.ones(4, 8, device=device)

        @eager_break
        def body(y: torch.Tensor) -> Any:
            return result

        def forward() -> torch.Tensor:
            body(x * 1)
            return x * 2

        backend = make()
        with backend.capture_session(), pytest.raises(CaptureError, match=f"returned {type(result).__name__}"):
            backend.capture_one(ShapeKey(4), forward)
        assert not backend.can_run(ShapeKey(4))

    @pytest.mark.parametrize("change", ["shape", "kind", "length"])
    def test_a_result_that_changes_between_capture_and_replay_is_named(
        self, make: Make, device: torch.device, change: str
    ) -> None:
        x = torch.ones(4, 8, device=device)
        changed: list[bool] = []

        @eager_break
        def body(y: torch.Tensor) -> Any:
            if not changed:
                return (y + 1, y)
            return {"shape": (y[:2], y), "kind": None, "length": (y + 1,)}[change]

        backend = make()
        with backend.capture_session():
            backend.capture_one(ShapeKey(4), lambda: body(x)[0] * 2)
        changed.append(True)
        with pytest.raises(RuntimeError, match=r"body returned .* at capture"):
            backend.replay(ShapeKey(4))

    def test_at_capture_a_body_sees_unwritten_inputs(self, make: Make, device: torch.device) -> None:
        """What the segment before would have computed is not there yet, so a body must not branch on it."""
        x, seen = torch.full((4, WIDTH), 2.0, device=device), []

        @eager_break
        def body(y: torch.Tensor) -> torch.Tensor:
            seen.append(bool((y == 6.0).all()))
            return y + 1

        backend = make()
        with backend.capture_session():
            backend.capture_one(ShapeKey(4), lambda: body(x * 3))
        assert seen == [True, True, False]
        assert bool((backend.replay(ShapeKey(4)) == 7.0).all())
        assert seen[-1]

    def test_a_stub_stands_in_at_capture(self, make: Make, device: torch.device) -> None:
        """A body that refuses what it cannot use works at replay, given a stub for the capture."""
        x, stubs = torch.full((4, WIDTH), 2.0, device=device), []

        def body(y: torch.Tensor) -> torch.Tensor:
            if not bool((y == 6.0).all()):
                raise ValueError("not what a peer sends")
            return y + 1

        def stub(y: torch.Tensor) -> torch.Tensor:
            stubs.append(True)
            return torch.empty_like(y)

        plain, stubbed = eager_break(body), eager_break(capture_stub=stub)(body)
        backend = make()
        with backend.capture_session():
            with pytest.raises(CaptureError, match=r"not what a peer sends — at .*breakable_suite\.py"):
                backend.capture_one(ShapeKey(4), lambda: plain(x * 3))
            backend.capture_one(ShapeKey(2), lambda: stubbed(x * 3))
        assert len(stubs) == 1, "warm-ups run the body"
        assert bool((backend.replay(ShapeKey(2)) == 7.0).all())

    def test_the_switch_and_the_eager_entry_do_not_cut(self, make: Make, device: torch.device) -> None:
        x = torch.ones(4, 8, device=device)

        @eager_break(enabled=False)
        def off(y: torch.Tensor) -> torch.Tensor:
            return y * 2

        @eager_break
        def on(y: torch.Tensor) -> torch.Tensor:
            return off(y) * 2

        backend = make()
        with backend.capture_session():
            segments = [
                backend.capture_one(ShapeKey(n), f).segments
                for n, f in ((4, lambda: off(x)), (3, lambda: on.run_eager(x)), (2, lambda: on(x)))
            ]
        assert segments == [1, 1, 2]
        x.fill_(5.0)
        assert [backend.replay(ShapeKey(n))[0, 0].item() for n in (4,)] == [10.0]
        assert [backend.replay(ShapeKey(n))[0, 0].item() for n in (3, 2)] == [20.0, 20.0]

    def test_debug_eager_makes_the_whole_forward_one_break(self, make: Make, model: Layered) -> None:
        calls = []

        def forward() -> torch.Tensor:
            calls.append(0)
            return model.forward(8)

        backend = make(debug_eager=True)
        with backend.capture_session():
            timing = backend.capture_one(ShapeKey(8), forward)
        assert timing.segments == 2
        model.live = 5
        assert torch.equal(backend.replay(ShapeKey(8)), model.forward(8))
        assert len(calls) == 4, "the model's Python runs at replay"

    def test_outputs_are_rows_of_one_buffer(self, make: Make, model: Layered) -> None:
        backend = make()
        with backend.capture_session():
            for size in (8, 4, 2):
                backend.capture_one(ShapeKey(size), partial(model.forward, size))
        outputs = {size: backend.replay(ShapeKey(size)) for size in (8, 4, 2)}
        assert len({output.data_ptr() for output in outputs.values()}) == 1
        assert [output.shape[0] for output in outputs.values()] == [8, 4, 2]

    def test_a_size_above_the_shared_rows_is_refused_unless_rows_are_declared(self, make: Make, model: Layered) -> None:
        backend = make()
        with backend.capture_session():
            backend.capture_one(ShapeKey(4), lambda: model.forward(4))
            with pytest.raises(CaptureError, match="8 rows does not fit the shared 4"):
                backend.capture_one(ShapeKey(8), lambda: model.forward(8))
        declared = make(output_rows=8)
        with declared.capture_session():
            for size in (4, 8):
                declared.capture_one(ShapeKey(size), partial(model.forward, size))
        for size in (8, 4):
            assert torch.equal(declared.replay(ShapeKey(size)), model.forward(size))

    def test_outputs_whose_structure_changes_between_sizes_are_refused(self, make: Make, device: Any) -> None:
        x = torch.ones(4, 8, device=device)
        backend = make()
        with backend.capture_session():
            backend.capture_one(ShapeKey(4), lambda: x * 2)
            for other in (lambda: x[:2, :4] * 2, lambda: (x[:2] * 2).double()):
                with pytest.raises(CaptureError, match="share one buffer"):
                    backend.capture_one(ShapeKey(2), other)

    def test_the_hook_runs_before_the_first_warmup_because_state_is_dirty(self, make: Make, device: Any) -> None:
        """A recurrent layer fixes its scale at its first call; the state slot still holds an earlier request's."""

        class Recurrent:
            def __init__(self) -> None:
                self.slot = torch.full((WIDTH,), float("inf"), device=device)
                self.scale: torch.Tensor | None = None
                self.x = torch.ones(4, WIDTH, device=device)

            @eager_break
            def scan(self, x: torch.Tensor) -> torch.Tensor:
                steps = torch.cat((self.slot.unsqueeze(0), x)).cumsum(0)
                if self.scale is None:
                    self.scale = 1.0 / steps.abs().max()
                self.slot.copy_(steps[-1])
                return steps[1:] * self.scale

            def clear(self) -> None:
                self.slot.zero_()

        layer = Recurrent()
        backend = make()
        with backend.capture_session():
            backend.capture_one(ShapeKey(4), lambda: layer.scan(layer.x * 1.0), (), layer.clear)
        assert layer.scale is not None and layer.scale.item() == 0.25
        layer.clear()
        outputs = [backend.replay(ShapeKey(4))[-1, 0].item() for _ in range(2)]
        assert outputs == [1.0, 2.0], "the state goes on from replay to replay"

    def test_nothing_is_recorded_for_autograd(self, make: Make, device: torch.device) -> None:
        weight = torch.ones(WIDTH, WIDTH, device=device, requires_grad=True)
        x = torch.ones(4, WIDTH, device=device)
        grads = []

        @eager_break
        def body(y: torch.Tensor) -> torch.Tensor:
            grads.append(y.requires_grad or torch.is_grad_enabled())
            return y @ weight

        backend = make()
        with torch.enable_grad(), backend.capture_session():
            backend.capture_one(ShapeKey(4), lambda: body(x @ weight) @ weight)
            output = backend.replay(ShapeKey(4))
        assert not output.requires_grad and not any(grads)

    def test_a_layers_memory_is_used_again_by_the_next(self, make: Make, device: torch.device) -> None:
        """Strong references to the arguments of breaks would make the pool grow with the number of layers."""
        grown = []
        for layers in (2, 24):
            rows = self.segment_bytes() // (4 * WIDTH)  # one tensor of a layer fills a segment
            model, backend = Layered(device, layers=layers, rows=rows), make()
            with backend.capture_session():
                timing = backend.capture_one(ShapeKey(rows), partial(model.forward, rows))
            assert timing.segments == layers + 1
            assert torch.equal(backend.replay(ShapeKey(rows)), model.forward(rows))
            grown.append(backend.pool_bytes())
            backend.cleanup()
        assert grown[0] > 0 and abs(grown[1] - grown[0]) <= self.segment_bytes()

    def segment_bytes(self) -> int:
        """The allocator's segment, within which pools may differ."""
        return 2 << 20
