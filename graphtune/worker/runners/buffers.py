"""Static buffers of a decode step: slots at fixed addresses, each with a declared padding policy.

A graph reads fixed addresses, so a step's inputs are copied into slots. Rows between the raw and the padded size
belong to nobody but are computed, so each slot says what its tail holds:

- ``copy``: whatever an earlier step left there; its proof stands with the slot and in a test;
- ``zero``: 0, the sink page and the sink row, for anything that is used as an index;
- ``sentinel``: a legal value that the attention backend names;
- ``computed``: derived on the device from other slots after they were filled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

Policy = Literal["copy", "zero", "sentinel", "computed"]


@dataclass(frozen=True)
class LiveBatch:
    """The inputs of one decode step as a scheduler holds them: n requests, all tensors (n,) int32.

    ``seq_lens`` counts the tokens of each request including the one that this step writes. ``seq_lens_host`` and
    ``req_rows_host`` are the declared host twins (CPU tensors).
    """

    input_ids: torch.Tensor
    seq_lens: torch.Tensor
    out_slots: torch.Tensor
    req_rows: torch.Tensor
    seq_lens_host: torch.Tensor
    req_rows_host: torch.Tensor

    @property
    def size(self) -> int:
        return self.seq_lens_host.shape[0]


@dataclass(frozen=True)
class DecodeBatch:
    """Views of the static buffers for one padded size; the first ``raw_size`` rows are live."""

    raw_size: int
    padded_size: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_slots: torch.Tensor
    req_rows: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_host: torch.Tensor
    req_rows_host: torch.Tensor


@dataclass(frozen=True)
class Slot:
    """One static buffer of ``max_requests`` rows. ``proof`` says why a ``copy`` tail is harmless."""

    name: str
    policy: Policy
    dtype: torch.dtype = torch.int32
    source_dtype: torch.dtype = torch.int32
    pad_value: int = 0
    host: bool = False
    compute: Callable[[DecodeBatch], None] | None = None
    proof: str = ""


def _positions(batch: DecodeBatch) -> None:
    # In decode a token's position is its request's length minus one, so the tail follows from the sentinel length.
    torch.sub(batch.seq_lens, 1, out=batch.positions)


def decode_slots(seq_len_fill: int) -> tuple[Slot, ...]:
    """The slots of a decode step for an attention backend whose padded rows pretend to have ``seq_len_fill`` tokens."""
    return (
        Slot(
            "input_ids",
            "copy",
            proof="any id ever copied is inside the vocabulary, and a padded row's logits are sliced off",
        ),
        Slot("out_slots", "zero"),
        Slot("req_rows", "zero"),
        Slot("seq_lens", "sentinel", pad_value=seq_len_fill),
        Slot("seq_lens_host", "sentinel", pad_value=seq_len_fill, host=True),
        Slot("req_rows_host", "zero", host=True),
        Slot("positions", "computed", compute=_positions),
    )


@dataclass
class StaticBuffers:
    """Slots allocated once at ``max_requests`` rows; ``fill`` costs one kernel per dtype pair plus the computed slots.

    The eager runner makes these first; graph runners use the same object, so their addresses are its addresses.
    """

    slots: tuple[Slot, ...]
    max_requests: int
    device: torch.device
    tensors: dict[str, torch.Tensor] = field(init=False)
    _pads: dict[tuple[torch.dtype, int], torch.Tensor] = field(init=False)
    _views: dict[tuple[int, int], DecodeBatch] = field(init=False, default_factory=dict)
    _fills: dict[tuple[int, int], _FillViews] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        names = [slot.name for slot in self.slots]
        if len(set(names)) != len(names):
            raise ValueError(f"duplicate slot names in {names}")
        self.tensors = {
            slot.name: torch.full(
                (self.max_requests,), slot.pad_value, dtype=slot.dtype, device="cpu" if slot.host else self.device
            )
            for slot in self.slots
        }
        self._pads = {
            (slot.dtype, slot.pad_value): torch.full(
                (self.max_requests,), slot.pad_value, dtype=slot.dtype, device=self.device
            )
            for slot in self.slots
            if slot.policy in ("zero", "sentinel") and not slot.host
        }

    @property
    def bytes(self) -> int:
        """Device bytes of the slots and their padding sources."""
        owned = [t for t in self.tensors.values() if t.device == self.device] + list(self._pads.values())
        return sum(t.numel() * t.element_size() for t in owned)

    def reset(self) -> None:
        """Make every row padding: sink page, sink row, sentinel length."""
        for slot in self.slots:
            if slot.compute is None:
                self.tensors[slot.name].fill_(slot.pad_value)
        whole = self.batch(0, self.max_requests)
        for slot in self.slots:
            if slot.compute is not None:
                slot.compute(whole)

    def batch(self, raw_size: int, padded_size: int) -> DecodeBatch:
        """Views ``[:padded_size]``, made once per pair of sizes."""
        views = self._views.get((raw_size, padded_size))
        if views is None:
            rows = {name: tensor[:padded_size] for name, tensor in self.tensors.items()}
            views = self._views[raw_size, padded_size] = DecodeBatch(raw_size, padded_size, **rows)
        return views

    def fill(self, live: LiveBatch, padded_size: int) -> DecodeBatch:
        """Copy a step's inputs to the slots' heads and put the tails in order; returns the padded views.

        Heads and tails touch different rows, so both go into one foreach copy per (slot dtype, source dtype) pair:
        the number of kernels does not grow with the number of slots. Host slots are copied one by one.
        """
        raw = live.size
        views = self._fills.get((raw, padded_size))
        if views is None:
            views = self._fills[raw, padded_size] = self._fill_views(raw, padded_size)
        for targets, names, pads in views.groups:
            torch._foreach_copy_(targets, [getattr(live, name) for name in names] + pads)
        for head, tail, name, pad_value in views.host:
            head[:] = getattr(live, name).numpy()
            if tail is not None:
                tail[:] = pad_value
        for compute in views.computed:
            compute(views.batch)
        return views.batch

    def _fill_views(self, raw: int, padded_size: int) -> _FillViews:
        """What a fill of these two sizes touches; slicing at every step would cost more than the copies."""
        groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[str], list[torch.Tensor]]] = {}
        host = []
        for slot in self.slots:
            tensor = self.tensors[slot.name]
            padded = slot.policy in ("zero", "sentinel") and raw < padded_size
            if slot.policy == "computed":
                continue
            if slot.host:
                rows = tensor.numpy()
                host.append((rows[:raw], rows[raw:padded_size] if padded else None, slot.name, slot.pad_value))
                continue
            targets, names, _ = groups.setdefault((slot.dtype, slot.source_dtype), ([], [], []))
            targets.append(tensor[:raw])
            names.append(slot.name)
        for slot in self.slots:
            if slot.policy in ("zero", "sentinel") and not slot.host and raw < padded_size:
                targets, _, pads = groups.setdefault((slot.dtype, slot.dtype), ([], [], []))
                targets.append(self.tensors[slot.name][raw:padded_size])
                pads.append(self._pads[slot.dtype, slot.pad_value][: padded_size - raw])
        computed = tuple(slot.compute for slot in self.slots if slot.compute is not None)
        return _FillViews(self.batch(raw, padded_size), tuple(groups.values()), tuple(host), computed)


@dataclass(frozen=True)
class _FillViews:
    """Views that a fill of one (raw, padded) pair writes: foreach groups (targets, source names, padding sources), host
    heads and tails with source name and pad value, and the computed slots."""

    batch: DecodeBatch
    groups: tuple[tuple[list[torch.Tensor], list[str], list[torch.Tensor]], ...]
    host: tuple[tuple[np.ndarray, np.ndarray | None, str, int], ...]
    computed: tuple[Callable[[DecodeBatch], None], ...]
