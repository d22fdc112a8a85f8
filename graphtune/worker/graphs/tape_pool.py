"""Reusable bytes for tapes: the CPU's counterpart of a CUDA graph pool."""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from graphtune.worker.graphs.backend import collector_frozen

ALIGNMENT_BYTES = 64
"""Torch's own CPU allocator aligns alike; kernels may round differently at another alignment."""

POISON = 0x7FF9
"""Repeated 16-bit pattern: a quiet NaN as fp64, fp32, bf16 and fp16, far beyond any index as int32 and int64."""


class Segment:
    """One reserved stretch of bytes. ``free`` maps start to stop of its free ranges, which never touch each other."""

    def __init__(self, nbytes: int) -> None:
        raw = np.empty(nbytes + ALIGNMENT_BYTES, dtype=np.uint8)
        skew = -raw.ctypes.data % ALIGNMENT_BYTES
        self.memory = raw[skew : skew + nbytes]
        self.address: int = self.memory.ctypes.data
        self.free: dict[int, int] = {0: nbytes}

    @property
    def nbytes(self) -> int:
        return int(self.memory.nbytes)

    def take(self, start: int, nbytes: int) -> None:
        """Cut ``nbytes`` off the front of the free range at ``start``."""
        stop = self.free.pop(start)
        if start + nbytes < stop:
            self.free[start + nbytes] = stop

    def give(self, start: int, stop: int) -> None:
        """Free a range and merge it with its neighbours."""
        if stop in self.free:
            stop = self.free.pop(stop)
        before = next((a for a, b in self.free.items() if b == start), None)
        self.free[start if before is None else before] = stop


class BytePool:
    """Blocks of bytes, best fit first, in segments of a multiple of ``segment_bytes`` that are never given back.

    A block is a numpy array of its own: whatever is built over it (``torch.from_numpy``) keeps it, and it is free again
    exactly when the last of these dies. ``segment_bytes`` = 64 makes every segment as large as the request that needed
    it; large segments hide the effect of capture order in small models.
    """

    def __init__(self, segment_bytes: int = 64 * 1024) -> None:
        if segment_bytes < ALIGNMENT_BYTES or segment_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"segment_bytes must be a positive multiple of {ALIGNMENT_BYTES}, got {segment_bytes}")
        self.segment_bytes = segment_bytes
        self.peak = 0
        """Most bytes ever in use at once."""
        self.history: list[tuple[int, int]] = []
        """Every request as (address, bytes) and every free, as the pool learns of it, as (address, 0)."""
        self._segments: list[Segment] = []
        self._in_use = 0
        # Blocks die wherever their last tensor dies, in the middle of allocate() or on another thread.
        self._returned: deque[tuple[Segment, int, int]] = deque()

    def allocate(self, nbytes: int) -> np.ndarray:
        """A block of ``nbytes`` (at least 1), uninitialised, aligned to 64 bytes."""
        if nbytes < 1:
            raise ValueError(f"a block has at least one byte, got {nbytes}")
        self._collect()
        size = round_up(nbytes, ALIGNMENT_BYTES)
        segment, start = self._fit(size)
        segment.take(start, size)
        self._in_use += size
        self.peak = max(self.peak, self._in_use)
        self.history.append((segment.address + start, nbytes))
        block = segment.memory[start : start + nbytes]
        weakref.finalize(block, self._returned.append, (segment, start, start + size)).atexit = False
        return block

    def segments(self) -> tuple[int, ...]:
        """Bytes of every segment."""
        return tuple(segment.nbytes for segment in self._segments)

    def bytes(self) -> int:
        """Bytes reserved: the sum of all segments."""
        return sum(self.segments())

    def in_use(self) -> int:
        """Bytes of live blocks."""
        self._collect()
        return self._in_use

    def contains(self, address: int) -> bool:
        """True when the byte at ``address`` belongs to a segment."""
        return self.segment_at(address) is not None

    def segment_at(self, address: int) -> Segment | None:
        """The segment that holds the byte at ``address``."""
        index = bisect.bisect_right(self._segments, address, key=lambda segment: segment.address) - 1
        if index < 0 or address >= self._segments[index].address + self._segments[index].nbytes:
            return None
        return self._segments[index]

    def poison(self, address: int, nbytes: int) -> None:
        """Overwrite a block's bytes so that a value read before it is written shows."""
        segment = self.segment_at(address)
        if segment is None:
            raise ValueError("this address is not in the pool")
        start = address - segment.address
        segment.memory[start : start + round_up(nbytes, ALIGNMENT_BYTES)].view(np.uint16)[:] = POISON

    def _fit(self, size: int) -> tuple[Segment, int]:
        fits = [
            (stop - start, index, start)
            for index, segment in enumerate(self._segments)
            for start, stop in segment.free.items()
            if stop - start >= size
        ]
        if fits:
            _, index, start = min(fits)
            return self._segments[index], start
        segment = Segment(round_up(size, self.segment_bytes))
        bisect.insort(self._segments, segment, key=lambda segment: segment.address)
        return segment, 0

    def _collect(self) -> None:
        while self._returned:
            segment, start, stop = self._returned.popleft()
            segment.give(start, stop)
            self.history.append((segment.address + start, 0))
            self._in_use -= stop - start


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class InBytePools:
    """What both kinds of tape backend record into: pools of their own, or those of another backend."""

    def __init__(self, *, segment_bytes: int, pools: list[BytePool] | None, **rest: Any) -> None:
        super().__init__(**rest)
        self._segment_bytes = segment_bytes
        self._pools = [] if pools is None else pools

    @contextlib.contextmanager
    def capture_session(self) -> Iterator[None]:
        with collector_frozen():
            if not self._pools:
                self._pools.append(BytePool(self._segment_bytes))
            yield

    @property
    def pool(self) -> BytePool:
        """The pool of what was captured; RuntimeError before the first session."""
        if not self._pools:
            raise RuntimeError("there is no pool before capture_session()")
        return self._pools[-1]

    def pool_segments(self) -> tuple[int, ...]:
        return tuple(size for pool in self._pools for size in pool.segments())
