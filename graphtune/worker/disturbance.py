"""What disturbs a measurement: somebody else on the host's core or on the GPU, a throttled or lowered clock."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from graphtune.worker.nvml import POWER_CAP, Gpu

SLOW = 1.25
"""A host this many times slower than it has been is somebody else's as well."""
QUIET = 1.1
"""A core that is at most this many times slower than the fastest is good enough to go to."""
LOW_CLOCK = 0.9
"""A clock below this share of the highest one seen has dropped."""
GPU_EVERY_S = 0.05
"""What the driver says is read no more often: a reading takes longer than a short step."""
HOST_EVERY_S = 0.005
"""Nor is the host looked at more often: that takes half a millisecond, a third of the shortest steps."""
PATIENCE_S = 4.0
"""How long a process waits in all for a quiet host where no core is quiet. Ten seconds of sleep took a third of the
time of 26 sizes on the H200's machine and made none of them quieter."""
MOVE_EVERY_S = 0.1
"""Out of patience a quiet core is looked for no more often: that takes some milliseconds."""
MOST_CORES = 64
"""Cores that are looked at: each takes half a millisecond at first."""

HOST = "host slowed down"


def cores_to_choose_from(gpu: Gpu | None) -> tuple[int, ...]:
    """Cores that this thread may run on, those next to the GPU where the driver tells; none where a system does not
    let a thread choose. At most ``MOST_CORES``, evenly chosen."""
    if not hasattr(os, "sched_setaffinity"):
        return ()
    allowed = os.sched_getaffinity(0)
    cores = sorted((allowed & gpu.near_cores() if gpu is not None else set()) or allowed)
    return tuple(cores[:: -(-len(cores) // MOST_CORES)])


class HostPace:
    """Tells how fast the host runs against the fastest it has shown, and keeps to a core that is fast.

    On shared machines a host falls to half its speed for a second or more at a time (seen on the H200's machine:
    eager steps of 5 and 9 ms in turn), and an eager step is host time. A fixed piece of Python is timed, long enough
    that its fastest run is no rare luck: with a quarter of its length, every second sample was called disturbed.

    It is a core that falls, not the machine: its other half runs somebody else's work, while others are quiet (134 µs
    on 3 of 16 cores and 220 to 277 on the others, other ones a moment later). The thread that looks is therefore put on
    the fastest of ``cores``, and by ``move`` on another quiet one; with none it stays where the system puts it.
    ``release`` undoes that.
    """

    def __init__(self, cores: Sequence[int] = ()) -> None:
        self._cores = tuple(cores)
        self._allowed = os.sched_getaffinity(0) if cores else set()
        self._fastest = math.inf
        self._slowdown = 1.0
        self._looked_at = -math.inf
        for _ in range(20):
            self._look()
        took = {}
        for core in self._cores:
            self._pin({core})
            took[core] = self._look()
        self._settle(took)

    def move(self) -> None:
        """Go to the next core that is quiet, or to the fastest where none is."""
        took: dict[int, float] = {}
        for core in self._cores:
            self._pin({core})
            took[core] = self._spin()
            if took[core] <= QUIET * self._fastest:
                break
        self._settle(took)

    def release(self) -> None:
        """Let the thread run on every core again; those that it starts would inherit its one core."""
        if self._cores:
            self._pin(self._allowed)

    def _settle(self, took: Mapping[int, float]) -> None:
        """Stay on the core that took least. The next search begins after it: it may still be slow then."""
        if not self._cores:
            return
        core = min(took, key=lambda one: took[one])
        at = self._cores.index(core) + 1
        self._cores = (*self._cores[at:], *self._cores[:at])
        self._pin({core})
        self._look()

    def _pin(self, cores: Collection[int]) -> None:
        try:
            os.sched_setaffinity(0, cores)
        except OSError:  # cores were taken away from this process: from now on the system places the thread
            self._cores = ()
            with suppress(OSError):
                os.sched_setaffinity(0, self._allowed)

    def slowdown(self) -> float:
        """Time of the fixed piece over its fastest time so far, now or ``HOST_EVERY_S`` ago at most."""
        if time.perf_counter() - self._looked_at > HOST_EVERY_S:
            self._look()
        return self._slowdown

    def _look(self) -> float:
        took = min(self._spin() for _ in range(3))
        self._fastest = min(self._fastest, took)
        self._slowdown = took / self._fastest
        self._looked_at = time.perf_counter()
        return took

    @staticmethod
    def _spin() -> float:
        began = time.perf_counter()
        total = 0
        for i in range(4000):
            total += i
        return time.perf_counter() - began


class Watch:
    """Asked between samples, because a disturbance that ends within a reading leaves no trace after it.

    A power cap is no disturbance, nor is the lower clock that it brings: a server under this load runs into it too.
    """

    def __init__(self, gpu: Gpu | None, patience_s: float, pace: HostPace | None = None) -> None:
        self._gpu = gpu
        self._patience_s = patience_s
        self._pace = pace or HostPace(cores_to_choose_from(gpu) if patience_s > 0 else ())
        self._highest_mhz = 0
        self._of_gpu: tuple[str, ...] = ()
        self._gpu_read_at = -math.inf
        self._moved_at = -math.inf

    def now(self) -> tuple[str, ...]:
        """What is wrong at this moment, in words without figures; empty when nothing is."""
        return (*self._host(), *self._gpu_now())

    def wait(self) -> None:
        """Return once the host is fast, on another core if need be, or when the process has waited for its patience in
        all; out of patience, look for a quiet core from time to time."""
        while self._host():
            began = time.perf_counter()
            if self._patience_s <= 0 and began < self._moved_at + MOVE_EVERY_S:
                return
            self._pace.move()
            self._moved_at = time.perf_counter()
            if self._patience_s <= 0 or not self._host():
                return
            time.sleep(0.02)
            self._patience_s -= time.perf_counter() - began

    def release(self) -> None:
        """Let the thread run on every core again."""
        self._pace.release()

    def _host(self) -> tuple[str, ...]:
        return (HOST,) if self._pace.slowdown() > SLOW else ()

    def _gpu_now(self) -> tuple[str, ...]:
        if self._gpu is not None and time.perf_counter() - self._gpu_read_at > GPU_EVERY_S:
            self._of_gpu = self._read_gpu(self._gpu)
            self._gpu_read_at = time.perf_counter()
        return self._of_gpu

    def _read_gpu(self, gpu: Gpu) -> tuple[str, ...]:
        reasons = gpu.throttle_reasons()
        found = [reason for reason in reasons if reason != POWER_CAP]
        mhz = gpu.clock_mhz()
        if mhz is not None:
            self._highest_mhz = max(self._highest_mhz, mhz)
            if mhz < LOW_CLOCK * self._highest_mhz and POWER_CAP not in reasons:
                found.append("GPU clock dropped")
        if gpu.other_processes():
            found.append("another process on the GPU")
        return tuple(found)
