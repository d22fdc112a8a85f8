"""What every full backend must do, whatever it records with. Subclass it and give ``make_backend`` and ``device``.

The tape passes it on the CPU, CUDA graphs on a GPU. Known differences stay out of it: the tape runs operations within
its pool while recording, returns the memory of a failed recording, keeps outside tensors alive, and does not see other
threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from graphtune.worker.graphs.backend import CaptureError, GraphBackend
from graphtune.worker.graphs.shape_key import ShapeKey

WIDTH = 4096
"""Elements per row, so that a row is a block of its own in any allocator."""


class Step:
    """A small model over static buffers: a matrix, an input of ``rows`` rows, a counter and a state that it writes."""

    def __init__(self, device: torch.device, rows: int = 8) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(rows, WIDTH, generator=generator).to(device)
        self.w = torch.randn(64, WIDTH, generator=generator).to(device) / 64
        self.state = torch.zeros(rows, 64, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        self.calls = 0

    def forward(self, size: int) -> torch.Tensor:
        """(size, 64): state += silu(x w'), then the new state twice over plus the number of calls so far."""
        self.calls += 1
        hidden = torch.nn.functional.silu(torch.nn.functional.linear(self.x[:size], self.w))
        self.state[:size].add_(hidden)
        self.count.add_(1)
        return self.state[:size] * 2 + self.count

    def expected(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output, state and count that a call would leave; nothing is changed."""
        hidden = torch.nn.functional.silu(torch.nn.functional.linear(self.x[:size], self.w))
        state, count = self.state.clone(), self.count + 1
        state[:size] += hidden
        return state[:size] * 2 + count, state, count


class BackendSuite:
    """Fixtures to override: ``make_backend`` (a function that makes one) and ``device``."""

    @pytest.fixture
    def device(self) -> torch.device:
        raise NotImplementedError

    @pytest.fixture
    def make_backend(self) -> Callable[[], GraphBackend]:
        raise NotImplementedError

    @pytest.fixture
    def backend(self, make_backend: Callable[[], GraphBackend]) -> Iterator[GraphBackend]:
        backend = make_backend()
        yield backend
        backend.cleanup()

    @pytest.fixture
    def step(self, device: torch.device) -> Step:
        return Step(device)

    @pytest.fixture(autouse=True)
    def no_grad(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    def capture(self, backend: GraphBackend, *steps: tuple[int, Callable[[], torch.Tensor]]) -> None:
        with backend.capture_session():
            for size, forward in steps:
                backend.capture_one(ShapeKey(size), forward)

    def test_two_warmups_each_followed_by_the_hook_then_one_recording(self, backend: GraphBackend, step: Step) -> None:
        events: list[str] = []

        def forward() -> torch.Tensor:
            events.append("forward")
            return step.forward(4)

        with backend.capture_session():
            timing = backend.capture_one(ShapeKey(4), forward, [step.x], lambda: events.append("hook"))
        assert events == ["forward", "hook", "forward", "hook", "forward"]
        assert min(timing.warmup_s, timing.record_s, timing.instantiate_s) > 0
        assert timing.segments == 1
        assert timing.nodes is None or timing.nodes > 0

    def test_recording_executes_nothing(self, backend: GraphBackend, step: Step) -> None:
        """State is as the two warm-ups left it: had the recording run too, the counter would say 3."""
        _, after_one, _ = step.expected(4)
        self.capture(backend, (4, lambda: step.forward(4)))
        assert step.calls == 3
        assert step.count.item() == 2
        torch.testing.assert_close(step.state, after_one * 2)

    def test_output_is_garbage_before_the_first_replay_and_right_after_it(
        self, backend: GraphBackend, step: Step
    ) -> None:
        recorded: list[torch.Tensor] = []

        def forward() -> torch.Tensor:
            recorded.append(step.forward(4))
            return recorded[-1]

        self.capture(backend, (4, forward))
        expected, state, count = step.expected(4)
        assert not torch.equal(recorded[-1], expected)
        output = backend.replay(ShapeKey(4))
        assert output.data_ptr() == recorded[-1].data_ptr()
        assert torch.equal(output, expected)
        assert torch.equal(step.state, state)
        assert torch.equal(step.count, count)

    def test_replay_follows_changed_inputs(self, backend: GraphBackend, step: Step) -> None:
        self.capture(backend, (4, lambda: step.forward(4)))
        calls = step.calls
        for seed in range(3):
            step.x.copy_(torch.randn(step.x.shape, generator=torch.Generator().manual_seed(seed)))
            expected, state, _ = step.expected(4)
            with backend.replay_session():
                output = backend.replay(ShapeKey(4))
            assert output.shape == (4, 64)
            assert torch.equal(output, expected)
            assert torch.equal(step.state, state)
        assert step.calls == calls, "a replay runs none of the model's Python"

    def test_two_keys_in_one_pool(self, backend: GraphBackend, step: Step) -> None:
        with backend.capture_session():
            backend.capture_one(ShapeKey(8), lambda: step.forward(8))
            after_one = backend.pool_bytes()
            backend.capture_one(ShapeKey(2), lambda: step.forward(2))
        assert 0 < after_one == backend.pool_bytes(), "the smaller size fits into what the larger one left"
        for size in (2, 8, 8, 2):
            expected, state, _ = step.expected(size)
            assert torch.equal(backend.replay(ShapeKey(size)), expected)
            assert torch.equal(step.state, state)

    def test_output_is_valid_until_the_next_replay_from_the_pool(self, backend: GraphBackend, step: Step) -> None:
        """The second graph's output lies where the first one's intermediate was; replaying the first overwrites it."""
        places: dict[str, int] = {}

        def first() -> torch.Tensor:
            intermediate = step.x * 2
            places["intermediate"] = intermediate.data_ptr()
            return intermediate.sum(1)

        def second() -> torch.Tensor:
            output = step.x * 3
            places["output"] = output.data_ptr()
            return output

        self.capture(backend, (8, first), (4, second))
        assert places["intermediate"] == places["output"]
        output = backend.replay(ShapeKey(4))
        assert torch.equal(output, step.x * 3)
        backend.replay(ShapeKey(8))
        assert torch.equal(output, step.x * 2)

    def test_only_recorded_keys_can_run(self, backend: GraphBackend, step: Step) -> None:
        assert not backend.can_run(ShapeKey(4))
        self.capture(backend, (4, lambda: step.forward(4)))
        assert backend.can_run(ShapeKey(4))
        assert not backend.can_run(ShapeKey(3))
        assert not backend.can_run(ShapeKey(4, variant_label="lora"))
        with pytest.raises(KeyError):
            backend.replay(ShapeKey(3))

    def test_capture_outside_a_session_is_refused(self, backend: GraphBackend, step: Step) -> None:
        with pytest.raises(RuntimeError, match="capture_session"):
            backend.capture_one(ShapeKey(4), lambda: step.forward(4))
        assert step.calls == 0

    def test_cleanup_and_capture_again(self, backend: GraphBackend, step: Step) -> None:
        for _ in range(2):
            assert backend.pool_bytes() == 0
            self.capture(backend, (4, lambda: step.forward(4)))
            assert backend.pool_bytes() > 0
            expected, _, _ = step.expected(4)
            assert torch.equal(backend.replay(ShapeKey(4)), expected)
            backend.cleanup()
            assert not backend.can_run(ShapeKey(4))

    def test_a_second_session_adds_to_the_first(self, backend: GraphBackend, step: Step) -> None:
        self.capture(backend, (8, lambda: step.forward(8)))
        self.capture(backend, (2, lambda: step.forward(2)))
        for size in (8, 2):
            expected, _, _ = step.expected(size)
            assert torch.equal(backend.replay(ShapeKey(size)), expected)

    def test_a_failed_capture_leaves_the_other_sizes_usable(self, backend: GraphBackend, step: Step) -> None:
        recordings = {"left": 2}

        def reads_the_host_when_recorded() -> torch.Tensor:
            recordings["left"] -= 1
            if recordings["left"] < 0:
                return step.x * float(step.x.sum())
            return step.x * 1

        with backend.capture_session():
            backend.capture_one(ShapeKey(8), lambda: step.forward(8))
            with pytest.raises(
                CaptureError, match=r"backend_suite\.py:\d+: return step\.x \* float\(step\.x\.sum\(\)\)"
            ):
                backend.capture_one(ShapeKey(4), reads_the_host_when_recorded)
            backend.capture_one(ShapeKey(2), lambda: step.forward(2))
        assert not backend.can_run(ShapeKey(4))
        expected, _, _ = step.expected(2)
        assert torch.equal(backend.replay(ShapeKey(2)), expected)
        expected, state, _ = step.expected(8)
        assert torch.equal(backend.replay(ShapeKey(8)), expected)
        assert torch.equal(step.state, state)

    def test_a_rebound_input_still_reads_the_old_address(self, backend: GraphBackend, step: Step) -> None:
        """The fault that the address check exists for: nothing else notices it."""
        old = step.x
        self.capture(backend, (4, lambda: step.forward(4)))
        expected, _, _ = step.expected(4)
        step.x = old + 1.0
        assert torch.equal(backend.replay(ShapeKey(4)), expected)

    def test_inputs_given_at_capture_are_kept_alive(self, backend: GraphBackend, step: Step) -> None:
        held = [step.x + 1.0]
        with backend.capture_session():
            backend.capture_one(ShapeKey(4), lambda: held[0][:4] * 2, [held[0]])
        held.clear()
        clutter = [torch.zeros_like(step.x) for _ in range(8)]
        assert torch.equal(backend.replay(ShapeKey(4)), (step.x[:4] + 1.0) * 2)
        del clutter

    def test_another_thread_may_allocate_during_a_capture(self, backend: GraphBackend, step: Step) -> None:
        in_recording, allocated = threading.Event(), threading.Event()
        made: list[torch.Tensor] = []

        def allocate() -> None:
            in_recording.wait(timeout=60)
            with torch.no_grad():
                made.extend(torch.full((n, WIDTH), float(n), device=step.x.device) for n in range(1, 40))
            allocated.set()

        def forward() -> torch.Tensor:
            intermediate = step.x * 2
            if step.calls == 2:
                in_recording.set()
                assert allocated.wait(timeout=60)
            step.calls += 1
            return intermediate + 1

        other = threading.Thread(target=allocate)
        other.start()
        self.capture(backend, (8, forward))
        other.join()
        assert torch.equal(backend.replay(ShapeKey(8)), step.x * 2 + 1)
        assert all(torch.equal(t, torch.full_like(t, float(n))) for n, t in enumerate(made, 1)), "the pool was shared"
