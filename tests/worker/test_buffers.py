"""Static buffers: padding policies, each with the failure it prevents, and the number of kernels of a fill."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from graphtune.worker.gate import poison_tails
from graphtune.worker.runners.buffers import LiveBatch, Slot, StaticBuffers, decode_slots

CPU = torch.device("cpu")


def live_batch(size: int, *, length: int = 20, slot: int = 64) -> LiveBatch:
    ints = lambda value: torch.full((size,), value, dtype=torch.int32)  # noqa: E731
    return LiveBatch(
        input_ids=ints(5),
        seq_lens=ints(length),
        out_slots=torch.arange(slot, slot + size, dtype=torch.int32),
        req_rows=torch.arange(1, size + 1, dtype=torch.int32),
        seq_lens_host=ints(length),
        req_rows_host=torch.arange(1, size + 1, dtype=torch.int32),
    )


def buffers(size: int = 8, fill: int = 1) -> StaticBuffers:
    return StaticBuffers(decode_slots(fill), size, CPU)


@given(raw=st.integers(1, 8), extra=st.integers(0, 7), earlier=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_tails_hold_only_what_their_policy_allows(raw: int, extra: int, earlier: int) -> None:
    padded = min(8, raw + extra)
    static = buffers()
    static.fill(live_batch(earlier, length=33, slot=90), earlier)
    poison_tails(static, raw, row=7, length=40, slot=123)
    batch = static.fill(live_batch(raw), padded)
    assert batch.out_slots[raw:].eq(0).all() and batch.req_rows[raw:].eq(0).all()
    assert batch.req_rows_host[raw:].eq(0).all()
    assert batch.seq_lens[raw:].eq(1).all() and batch.seq_lens_host[raw:].eq(1).all()
    assert batch.positions[raw:].eq(0).all()
    assert batch.positions[:raw].eq(19).all()
    assert batch.out_slots[:raw].tolist() == list(range(64, 64 + raw))


def test_addresses_never_change() -> None:
    static = buffers()
    before = {name: tensor.data_ptr() for name, tensor in static.tensors.items()}
    for raw, padded in ((3, 8), (8, 8), (1, 2)):
        static.fill(live_batch(raw), padded)
    static.reset()
    assert {name: tensor.data_ptr() for name, tensor in static.tensors.items()} == before


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = str(func.overloadpacket)
        writes = ("copy_", "fill_", "zero_", "sub", "add")
        if any(name.endswith(write) for write in writes):
            self.calls.append(name)
        return func(*args, **(kwargs or {}))


def device_writes(extra_slots: int) -> list[str]:
    slots = [slot for slot in decode_slots(1) if not slot.host]
    slots += [Slot(f"extra_{i}", "zero") for i in range(extra_slots)]
    static = StaticBuffers(tuple(slots), 8, CPU)
    live = live_batch(3)
    source = type("Source", (), {**{s.name: getattr(live, s.name, live.out_slots) for s in slots}, "size": 3})()
    static.batch = lambda raw, padded: buffers().batch(raw, padded)  # type: ignore[method-assign]
    with CountOps() as count:
        static.fill(source, 8)
    return count.calls


def test_kernels_of_a_fill_do_not_grow_with_the_slots() -> None:
    few, many = device_writes(0), device_writes(6)
    assert few == many
    assert sum("_foreach_copy_" in call for call in few) == 1


def test_a_name_is_a_slot_once() -> None:
    with pytest.raises(ValueError, match="duplicate slot names"):
        StaticBuffers((Slot("a", "zero"), Slot("a", "copy")), 4, CPU)


def test_every_copy_slot_carries_its_proof() -> None:
    assert all(slot.proof for slot in decode_slots(1) if slot.policy == "copy")
