"""An allocator's events in the compact form in which a sweep stores them.

Requests and frees of one pool become whole numbers that do not depend on addresses, so that the layers of a model,
which ask for the same again and again, are one stretch with a count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from graphtune.results import EventRun

LONGEST_PERIOD = 256
"""Events of a layer, or of a warm-up, that are recognised as one."""

LEAST_SAVED = 12
"""A stretch that saves fewer numbers than this is not worth a run of its own."""


def encode(events: Iterable[tuple[int, int]]) -> tuple[EventRun, ...]:
    """Runs of ``(address, bytes)`` events, 0 bytes for a free. Frees of what was there before are left out."""
    asked: dict[int, int] = {}
    numbers: list[int] = []
    requests = 0
    for address, size in events:
        if size > 0:
            asked[address] = requests
            requests += 1
            numbers.append(size)
        elif address in asked:
            numbers.append(asked.pop(address) - requests)
    return _runs(numbers)


def decode(runs: Iterable[EventRun]) -> Iterator[int]:
    """The numbers of ``runs`` in order."""
    for run in runs:
        for _ in range(run.repeats):
            yield from run.events


def _runs(numbers: Sequence[int]) -> tuple[EventRun, ...]:
    """Greedy: at each place the repeated stretch that saves most; what does not repeat is gathered between them."""
    runs: list[EventRun] = []
    single: list[int] = []
    place = 0
    while place < len(numbers):
        period, repeats = _longest(numbers, place)
        if repeats == 1:
            single.append(numbers[place])
            place += 1
            continue
        if single:
            runs.append(EventRun(1, tuple(single)))
            single = []
        runs.append(EventRun(repeats, tuple(numbers[place : place + period])))
        place += period * repeats
    if single:
        runs.append(EventRun(1, tuple(single)))
    return tuple(runs)


def _longest(numbers: Sequence[int], place: int) -> tuple[int, int]:
    """Period and repeats of the stretch at ``place`` that saves most numbers; (1, 1) where nothing repeats."""
    best, saved = (1, 1), LEAST_SAVED
    left = len(numbers) - place
    for period in range(1, min(LONGEST_PERIOD, left // 2) + 1):
        repeats = 1
        while numbers[place + period * repeats : place + period * (repeats + 1)] == numbers[place : place + period]:
            repeats += 1
        if (repeats - 1) * period > saved:
            best, saved = (period, repeats), (repeats - 1) * period
    return best
