"""A pool of device memory as an allocator keeps it: which blocks a list of captures needs, and what they reuse.

Torch's caching allocator gives a request the smallest free block that holds it and asks the device for a new segment
when there is none; a graph pool never gives segments back. What a list takes therefore depends on which freed blocks of
earlier captures later ones fit into, in steps of whole segments of 20 MiB: no sum of parts follows that to 16 MiB. So
the requests of each size are recorded once, alone (``AllocationTrace``), and any list is the play-back of its sizes'
requests in order. The tape's pool on the CPU follows the same rules with other numbers, so the play-back is checked
there to the byte.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from graphtune.results import EventRun
from graphtune.units import MIB

STEADY_REPEATS = 3
"""A stretch of requests that frees all it took leaves a pool the same from its third repeat on: layers of a model."""


@dataclass(frozen=True)
class PoolRules:
    """How an allocator rounds requests, cuts blocks and sizes segments. Bytes.

    Requests up to ``small_bytes`` come from segments of their own of ``small_segment_bytes``; those below
    ``direct_bytes`` from segments of ``large_segment_bytes``; larger ones get a segment rounded up to
    ``segment_step_bytes``. What is left of a block is cut off when it is more than the least rest of its kind.
    """

    round_bytes: int
    small_bytes: int
    small_segment_bytes: int
    large_segment_bytes: int
    direct_bytes: int
    segment_step_bytes: int
    least_small_rest_bytes: int
    least_large_rest_bytes: int

    def rounded(self, size: int) -> int:
        return max(self.round_bytes, -(-size // self.round_bytes) * self.round_bytes)

    def segment_bytes(self, size: int) -> int:
        if size <= self.small_bytes:
            return self.small_segment_bytes
        if size < self.direct_bytes:
            return self.large_segment_bytes
        return -(-size // self.segment_step_bytes) * self.segment_step_bytes

    def cuts(self, size: int, rest: int) -> bool:
        if size <= self.small_bytes:
            return rest >= self.least_small_rest_bytes
        return rest > self.least_large_rest_bytes


TORCH_RULES = PoolRules(512, MIB, 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB, 512, MIB)
"""Torch's CUDA caching allocator with its default settings (c10/cuda/CUDACachingAllocator)."""

TAPE_RULES = PoolRules(64, 0, 0, 0, 0, 64 * 1024, 64, 0)
"""The CPU tape's pool: one kind of segment, blocks cut to 64 bytes."""

RULES: Mapping[str, PoolRules] = {"cuda_graph": TORCH_RULES, "tape": TAPE_RULES}
"""By ``Environment.graph_mechanism``."""


@dataclass(eq=False, slots=True)
class _Block:
    """A stretch of one segment, linked to its neighbours there."""

    size: int
    small: bool
    order: int
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.order


@dataclass
class BlockPool:
    """Blocks of one pool. ``holes`` are free blocks in it at the start, whose segments are not counted here;
    ``small_holes`` are those in segments for small requests."""

    rules: PoolRules
    holes: Iterable[int] = ()
    small_holes: Iterable[int] = ()
    reserved_bytes: int = 0
    _free: dict[bool, list[tuple[tuple[int, int], _Block]]] = field(default_factory=lambda: {True: [], False: []})
    _segments: int = 0

    def __post_init__(self) -> None:
        for small, holes in ((False, self.holes), (True, self.small_holes)):
            for size in holes:
                self._give(self._segment(size, small, counted=False))

    def allocate(self, requested: int) -> _Block:
        """The smallest free block that holds the request, else a new segment."""
        size = self.rules.rounded(requested)
        small = size <= self.rules.small_bytes
        free = self._free[small]
        at = bisect_left(free, ((size,),))  # a shorter tuple comes first of those it begins
        block = free.pop(at)[1] if at < len(free) else self._segment(self.rules.segment_bytes(size), small)
        block.free = False
        rest = block.size - size
        if rest and self.rules.cuts(size, rest):
            block.size = size
            cut = _Block(rest, small, block.order + size, before=block, after=block.after)
            if block.after is not None:
                block.after.before = cut
            block.after = cut
            self._give(cut)
        return block

    def free(self, block: _Block) -> None:
        """Give a block back; it joins free neighbours."""
        for neighbour in (block.before, block.after):
            if neighbour is None or not neighbour.free:
                continue
            self._take(neighbour)
            first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
            first.size += second.size
            first.after = second.after
            if second.after is not None:
                second.after.before = first
            block = first
        self._give(block)

    def release_free_segments(self) -> None:
        """Give segments without a live block back to the device, as emptying torch's cache does."""
        for small, free in self._free.items():
            whole = [block for _, block in free if block.before is None and block.after is None]
            self.reserved_bytes -= sum(block.size for block in whole if block.order >= 0)
            self._free[small] = [entry for entry in free if entry[1] not in whole or entry[1].order < 0]

    def play(self, runs: Iterable[EventRun]) -> None:
        """Make the requests of ``runs``; what they do not give back stays.

        A stretch that gives back as many blocks as it takes finds the pool as it left it, so it is played
        ``STEADY_REPEATS`` times and its other repeats count as having got the blocks of the last one.
        """
        asked: list[_Block] = []
        for run in runs:
            requests = sum(number > 0 for number in run.events)
            steady = 2 * requests == len(run.events)
            played = min(run.repeats, STEADY_REPEATS) if steady else run.repeats
            for _ in range(played):
                for number in run.events:
                    if number > 0:
                        asked.append(self.allocate(number))
                    else:
                        self.free(asked[number])
            asked += asked[len(asked) - requests :] * (run.repeats - played)

    def _segment(self, size: int, small: bool, *, counted: bool = True) -> _Block:
        self._segments += 1
        if counted:
            self.reserved_bytes += size
        # Segments are told apart by their order; device addresses mostly ascend with it. Holes come before all of them.
        return _Block(size, small, (self._segments << 44) * (1 if counted else -1))

    def _give(self, block: _Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.key, block))  # no two keys are equal, so no two blocks are compared

    def _take(self, block: _Block) -> None:
        free = self._free[block.small]
        free.pop(bisect_left(free, (block.key,)))
