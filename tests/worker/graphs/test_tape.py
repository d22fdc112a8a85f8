"""What a recording leaves alone, what a tape knows about itself, and how its pool behaves."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtune.worker.graphs.backend import CaptureError
from graphtune.worker.graphs.tape import Tape, record
from graphtune.worker.graphs.tape_pool import BytePool

BODY_RUNS: list[str] = []


@torch.library.custom_op("graphtune_test::append", mutates_args=("cache",))
def append(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Like attention: writes a cache in place, reads host values and returns a new tensor."""
    BODY_RUNS.append("append")
    for row, slot in zip(x, slots.tolist(), strict=True):
        cache[slot] = row
    return cache[: int(slots.max()) + 1].sum(0).expand_as(x) + x


@append.register_fake
def _(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("graphtune_test::no_fake", mutates_args=("cache",))
def no_fake(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    cache.copy_(x)
    return x + 1


@torch.library.custom_op("graphtune_test::pure", mutates_args=())
def pure(x: torch.Tensor) -> torch.Tensor:
    BODY_RUNS.append("pure")
    return x * len(x.tolist())


@torch.library.custom_op("graphtune_test::into", mutates_args=("out",))
def into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 3)


@into.register_fake
def _(x: torch.Tensor, out: torch.Tensor) -> None:
    return None


@torch.library.custom_op("graphtune_test::longest", mutates_args=())
def longest(lengths: torch.Tensor) -> int:
    return int(lengths.max())


@torch.library.custom_op("graphtune::test_bounded", mutates_args=())
def bounded(x: torch.Tensor, longest: int) -> torch.Tensor:
    return x[:longest].clone()


@pytest.fixture(autouse=True, params=["no_grad", "inference"])
def mode(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.no_grad() if request.param == "no_grad" else torch.inference_mode():
        yield


def tape(forward: Callable[[], torch.Tensor], pool: BytePool | None = None) -> Tape:
    return Tape(record(forward, pool or BytePool()))


class TestNothingRuns:
    def test_output_is_poison_until_the_first_replay(self) -> None:
        x = torch.ones(5)
        made = tape(lambda: x + 1)
        assert made.output.isnan().all()
        assert made.replay() is made.output
        assert made.output.tolist() == [2.0] * 5

    def test_output_elsewhere_is_left_alone(self) -> None:
        x, given = torch.ones(5), torch.zeros(8)

        def forward() -> torch.Tensor:
            given[:5].copy_(x + 1)
            return given[:5]

        made = tape(forward)
        assert given.tolist() == [0.0] * 8
        assert made.replay().data_ptr() == given.data_ptr()
        assert given.tolist() == [2.0] * 5 + [0.0] * 3

    def test_state_after_two_warmups_and_a_recording_is_that_of_two(self) -> None:
        count = torch.zeros(1, dtype=torch.int64)

        def forward() -> torch.Tensor:
            count.add_(1)
            return count * 1

        forward(), forward()
        made = tape(forward)
        assert count.item() == 2
        assert made.replay().item() == 3

    def test_random_state_is_left_alone_and_replays_draw_anew(self) -> None:
        x = torch.zeros(100)
        torch.manual_seed(0)
        first = torch.rand(100)
        torch.manual_seed(0)
        made = tape(lambda: torch.rand(100) + x)
        assert torch.equal(made.replay(), first)
        assert not torch.equal(made.replay(), first)

    def test_inference_tensors_can_be_static_inputs(self) -> None:
        with torch.inference_mode():
            state, x = torch.zeros(3), torch.ones(3)
            made = tape(lambda: state.add_(x))
        assert state.tolist() == [0.0] * 3
        made.replay(), made.replay()
        assert state.tolist() == [2.0] * 3

    def test_ambient_autocast_does_not_change_a_replay(self) -> None:
        x, w = torch.randn(4, 4), torch.randn(4, 4)
        made = tape(lambda: x @ w)
        expected = made.replay().clone()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(made.replay(), expected)


class TestCustomOperators:
    def test_a_body_that_writes_outside_is_not_run_while_recording(self) -> None:
        cache, x, slots = torch.zeros(6, 4), torch.ones(2, 4), torch.tensor([1, 4])
        BODY_RUNS.clear()
        made = tape(lambda: append(x * 2, cache, slots) + 1)
        assert BODY_RUNS == []
        assert not cache.any()
        assert made.nodes == 3
        slots.copy_(torch.tensor([0, 5]))
        x.fill_(2.0)
        replayed = made.replay().clone()
        written = cache.clone()
        cache.zero_()
        assert torch.equal(replayed, append(x * 2, cache, slots) + 1)
        assert torch.equal(written, cache)
        assert cache[[0, 5]].eq(4).all() and not cache[1:5].any()

    def test_a_body_without_outside_writes_runs(self) -> None:
        x = torch.ones(3)
        BODY_RUNS.clear()
        made = tape(lambda: pure(x) + 1)
        assert BODY_RUNS == ["pure"]
        x.fill_(2.0)
        assert made.replay().tolist() == [7.0] * 3
        assert BODY_RUNS == ["pure"] * 2

    def test_a_given_output_may_lie_in_the_pool_or_outside(self) -> None:
        x, given = torch.ones(3), torch.zeros(3)

        def forward() -> torch.Tensor:
            mine = torch.empty(3)
            into(x, mine)
            into(x + 1, given)
            return mine + given

        made = tape(forward)
        assert not given.any()
        assert made.replay().tolist() == [9.0] * 3
        assert given.tolist() == [6.0] * 3

    def test_without_a_fake_kernel_it_is_refused(self) -> None:
        x, cache = torch.ones(3), torch.zeros(3)
        with pytest.raises(
            CaptureError, match=r"graphtune_test.no_fake.default writes outside .* no usable fake kernel"
        ):
            tape(lambda: no_fake(x, cache))
        assert not cache.any()

    def test_numbers_from_an_operator_are_host_reads(self) -> None:
        x, lengths = torch.ones(3), torch.tensor([2, 1])
        with pytest.raises(CaptureError, match=r"graphtune_test.longest.default reads a value back"):
            tape(lambda: x[: longest(lengths)] + 1)

    def test_numbers_into_our_own_operators_are_refused(self) -> None:
        x = torch.ones(3)
        with pytest.raises(
            CaptureError, match=r"graphtune.test_bounded.default takes numbers from the host \(longest\)"
        ):
            tape(lambda: bounded(x, 2))


class TestKnowledge:
    def test_externals_are_named_by_the_first_use(self) -> None:
        x, w, unread = torch.ones(2, 3), torch.ones(4, 3), torch.ones(3)

        def forward() -> torch.Tensor:
            unread.view(-1)
            return F.linear(x, w) + x[:, :1]

        externals = tape(forward).externals
        assert {outside.tensor.data_ptr() for outside in externals} == {x.data_ptr(), w.data_ptr()}
        assert externals[0].origin.operation == "aten.mm.default"
        assert externals[0].origin.source == "return F.linear(x, w) + x[:, :1]"

    def test_a_stray_temporary_is_unowned(self) -> None:
        x, w = torch.ones(3), torch.ones(8, 3)
        stray = [torch.full((3,), 2.0)]
        made = tape(lambda: w[2] * x + stray[0])
        assert made.unowned({"x": x, "w": w, "stray": stray[0]}) == []
        [found] = made.unowned({"x": x, "w": w[4:]})
        assert "(3,) torch.float32 first used by aten.add.Tensor at graphs/test_tape.py:" in str(found)
        assert "w[2] * x + stray[0]" in str(found)
        assert len(made.unowned({})) == 3

    def test_a_written_stray_is_unowned_too(self) -> None:
        x, stray = torch.ones(3), torch.zeros(3)

        def forward() -> torch.Tensor:
            stray.copy_(x)
            return x + 1

        assert [str(found.origin.operation) for found in tape(forward).unowned({"x": x})] == ["aten.copy_.default"]

    def test_a_lazy_cache_escapes_and_a_warmup_cures_it(self) -> None:
        x = torch.ones(4)

        class Lazy:
            table: torch.Tensor | None = None

            def __call__(self) -> torch.Tensor:
                if self.table is None:
                    self.table = torch.arange(4) * 2.0
                return x * self.table

        cold, warm = Lazy(), Lazy()
        [found] = tape(cold).escaped()
        assert str(found).startswith("(4,) torch.float32 made by aten.mul.Tensor at graphs/test_tape.py:")
        assert "self.table = torch.arange(4) * 2.0" in str(found)
        warm()
        made = tape(warm)
        assert made.escaped() == []
        assert [str(outside.origin.operation) for outside in made.unowned({"x": x})] == ["aten.mul.Tensor"]

    def test_what_escaped_one_recording_is_from_outside_for_the_next(self) -> None:
        pool, x, kept = BytePool(), torch.ones(4), []

        def first() -> torch.Tensor:
            kept.append(x * 2)
            return kept[0] + 1

        one = tape(first, pool)
        two = tape(lambda: kept[0] + x, pool)
        assert len(one.escaped()) == 1
        assert len(two.unowned({"x": x})) == 1
        assert two.replay().isnan().all(), "the first tape has not run yet"
        one.replay()
        assert two.replay().tolist() == [3.0] * 4

    def test_the_output_does_not_escape(self) -> None:
        x, outputs = torch.ones(4), []

        def forward() -> torch.Tensor:
            outputs.append((x + 1).view(2, 2))
            return outputs[-1][0]

        assert tape(forward).escaped() == []

    def test_a_failing_replay_names_the_recorded_line(self) -> None:
        ids, table = torch.zeros(2, dtype=torch.int64), torch.ones(3, 4)
        made = tape(lambda: F.embedding(ids, table) * 2)
        ids.fill_(99)
        with pytest.raises(IndexError) as failed:
            made.replay()
        assert "while replaying aten.embedding.default at graphs/test_tape.py" in failed.value.__notes__[0]

    def test_operations_on_another_thread_are_not_recorded(self) -> None:
        x, other = torch.ones(4), []

        def forward() -> torch.Tensor:
            thread = threading.Thread(target=lambda: other.append(torch.ones(4) * 2))
            thread.start()
            thread.join()
            return x + 1

        made = tape(forward)
        assert made.nodes == 1
        assert other[0].tolist() == [2.0] * 4


class TestPool:
    def test_intermediates_share_bytes(self) -> None:
        x = torch.ones(1024)

        def layers(count: int) -> int:
            def forward() -> torch.Tensor:
                h = x
                for _ in range(count):
                    h = F.silu(h * 2) + h
                return h

            pool = BytePool(64)
            made = tape(forward, pool)
            made.replay()
            return pool.bytes()

        assert layers(24) == layers(2) == 3 * 4096

    def test_only_the_output_stays_in_use(self) -> None:
        pool, x = BytePool(), torch.ones(1024)
        made = tape(lambda: (x + 1) * 2, pool)
        assert pool.in_use() == 4096
        output = made.output
        del made
        assert pool.in_use() == 4096
        del output
        gc.collect()
        assert pool.in_use() == 0

    def test_capture_order_decides_the_bytes(self) -> None:
        """As on a GPU: shared output, large to small is far smaller than the other order or outputs per size."""
        hidden, vocabulary, sizes = 16, 4096, (1, 2, 4, 8, 16, 32, 64)
        x, w, head = torch.ones(64, hidden), torch.ones(hidden, hidden), torch.ones(vocabulary, hidden)

        def pool_bytes(descending: bool, shared: bool) -> int:
            pool, tapes = BytePool(), []
            for size in sorted(sizes, reverse=descending):

                def forward(size: int = size) -> torch.Tensor:
                    h = x[:size]
                    for _ in range(3):
                        h = h + F.silu(F.linear(h, w))
                    return F.linear(h, head)

                tapes.append(Tape(record(forward, pool, hold_output=not shared)))
            return pool.bytes()

        logits = 64 * vocabulary * 4
        best = pool_bytes(descending=True, shared=True)
        assert logits <= best < 1.1 * logits
        for other in [(False, True), (True, False), (False, False)]:
            assert pool_bytes(*other) > 1.8 * best

    def test_an_output_that_is_not_held_is_memory_of_the_pool(self) -> None:
        pool, x = BytePool(64), torch.ones(256)
        first = Tape(record(lambda: x + 1, pool, hold_output=False))
        assert pool.in_use() == 0
        second = Tape(record(lambda: (x + 2).view(16, 16).t(), pool, hold_output=False))
        output = first.replay()
        assert output.tolist() == [2.0] * 256
        assert second.replay().shape == (16, 16)
        assert output.tolist() == [3.0] * 256
        assert (first.escaped(), second.escaped()) == ([], [])
        del first, second, pool
        assert output.tolist() == [3.0] * 256, "the segment lives as long as the output"

    def test_recording_destroys_only_bytes_that_it_used(self) -> None:
        pool, x = BytePool(64), torch.ones(256)
        first = tape(lambda: x + 1, pool)
        kept = first.replay()
        second = tape(lambda: (x * 3) + 1, pool)
        assert kept.tolist() == [2.0] * 256
        second.replay()
        assert kept.tolist() == [2.0] * 256

    def test_failed_recording_returns_its_memory_with_its_traceback(self) -> None:
        pool, x = BytePool(), torch.ones(256)

        def forward() -> torch.Tensor:
            h = x + 1
            return h * int(h.sum())

        gc.disable()
        try:
            try:
                tape(forward, pool)
            except CaptureError as error:
                assert pool.in_use() > 0
                del error
            assert pool.in_use() == 0, "without help of the cycle collector"
        finally:
            gc.enable()
        assert tape(lambda: x + 1, pool).replay().tolist() == [2.0] * 256

    def test_a_reference_cycle_keeps_bytes_until_it_is_collected(self) -> None:
        pool, x = BytePool(64), torch.ones(256)

        def forward() -> torch.Tensor:
            h = x
            for _ in range(20):
                holder: list[object] = [h + 1]
                holder.append(holder)
                h = holder[0]  # type: ignore[assignment]
            return h

        gc.disable()
        try:
            made = tape(forward, pool)
            assert pool.in_use() == 20 * 1024
            assert made.escaped() == [], "cycles that nobody can reach do not outlive a recording"
            assert pool.in_use() == 1024
        finally:
            gc.enable()


STEPS: list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda h, x, s: h + x,
    lambda h, x, s: h * 0.5,
    lambda h, x, s: h.t().contiguous().view(4, 4),
    lambda h, x, s: h.t(),
    lambda h, x, s: h.view_as(h)[torch.arange(3, -1, -1)],
    lambda h, x, s: h.mul_(2) if h.data_ptr() not in (x.data_ptr(), s.data_ptr()) else h * 2,
    lambda h, x, s: h[1:3].add_(1).new_zeros(4, 4) + h if h.data_ptr() != x.data_ptr() else h + 1,
    # Cloned, because h may be a transposed view of s, and eager refuses or garbles a write that overlaps its input.
    lambda h, x, s: s.add_(h.clone()),
    lambda h, x, s: s[:2].copy_(h[2:].clone()) @ h,
    lambda h, x, s: h.softmax(-1),
    lambda h, x, s: torch.cat([h[:2], x[2:]]),
    lambda h, x, s: h @ x,
    lambda h, x, s: F.layer_norm(h, (4,)),
    lambda h, x, s: torch.where(h > 0, h, s),
    lambda h, x, s: h.sort(0)[0],
    lambda h, x, s: h.chunk(2, 1)[0].repeat(1, 2),
    lambda h, x, s: h.to(torch.float64).sum(0, keepdim=True).expand(4, 4).float(),
]


@settings(max_examples=80, deadline=None)
@given(program=st.lists(st.integers(0, len(STEPS) - 1), min_size=1, max_size=12), seed=st.integers(0, 999))
def test_random_programs_replay_like_eager(program: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, state = torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)

    def forward() -> torch.Tensor:
        h = x
        for step in program:
            h = STEPS[step](h, x, state)
            if h.shape != (4, 4):
                h = h.repeat(2, 1)
        return h

    before = state.clone()
    made = tape(forward)
    assert torch.equal(state, before)
    for _ in range(2):
        x.normal_(generator=generator)
        start = state.clone()
        expected, after = forward().clone(), state.clone()
        state.copy_(start)
        assert torch.equal(made.replay().nan_to_num(7.0), expected.nan_to_num(7.0))
        assert torch.equal(state.nan_to_num(7.0), after.nan_to_num(7.0))
