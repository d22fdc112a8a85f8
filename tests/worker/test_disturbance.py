"""Disturbed samples: found between the samples of a reading, kept, and left out of its statistics."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtune.plan import Measure
from graphtune.results import Samples
from graphtune.worker import disturbance
from graphtune.worker.disturbance import HostPace, Watch
from graphtune.worker.latency import Latency
from graphtune.worker.nvml import POWER_CAP, Gpu
from graphtune.worker.runners.decode import GraphDecode
from graphtune.worker.timing import Clock, Sampler, sample
from tests.worker import tiny

NORMAL_US, SLOW_US = 10.0, 25.0


class Host(HostPace):
    """A host whose readings are slow where ``slow`` says so; it is asked before the first and after each."""

    def __init__(self, slow: Callable[[int], bool]) -> None:
        self.slow = slow
        self.readings = 0
        self._cores = ()

    def slowdown(self) -> float:
        return 2.0 if self.slow(self.readings) else 1.0

    def read(self, series: Any) -> dict[str, list[float]]:
        self.readings += 1
        return {"step_us": [SLOW_US if self.slow(self.readings) else NORMAL_US]}


def taken(slow: Callable[[int], bool], *, least: int = 5, noise: float = 0.02) -> Samples:
    host = Host(slow)
    measure = Measure(min_samples=least, noise=noise, max_seconds=0.0)
    found = sample({"eager": host.read}, cast(Any, None), measure, Watch(None, 0.0, host))
    return found["eager"]["step_us"]


def test_a_disturbance_that_ends_before_the_reading_does_is_found() -> None:
    """Before the first sample and after the last one the host is fast; looked at only there, this stays unseen."""
    host = Host(lambda reading: 2 <= reading <= 4)
    measure = Measure(min_samples=5, noise=0.02, max_seconds=60.0)
    found = sample({"eager": host.read}, cast(Any, None), measure, Watch(None, 0.0, host))["eager"]["step_us"]
    assert not host.slow(0) and not host.slow(host.readings)
    assert set(found.us) == {NORMAL_US} and len(found.us) == 5
    # The first sample after the slow ones began while the host was slow.
    assert found.disturbed_us == (SLOW_US, SLOW_US, SLOW_US, NORMAL_US)
    assert (found.flags, found.taken, found.stop) == ((), 9, "noise")


def test_where_the_host_never_is_quiet_all_samples_stay_and_carry_the_flag() -> None:
    found = taken(lambda reading: True)
    assert found.us == (SLOW_US,) * 5 and not found.disturbed_us
    assert found.flags == ("host slowed down",)


def test_a_disturbed_host_gets_more_time_to_be_quiet() -> None:
    """Every other sample is disturbed; time is up after the first, and there is patience for enough of the others."""
    samplers = [Sampler(Measure(min_samples=3, noise=1e-9, max_seconds=1.0)) for _ in range(2)]
    taken = []
    for sampler, disturbed in zip(samplers, (False, True), strict=True):
        while sampler.stop is None:
            count = len(sampler.us) + len(sampler.disturbed_us)
            sampler.add([NORMAL_US + count], 0.33, ("host slowed down",) if disturbed and count % 2 == 0 else ())
        taken.append(len(sampler.us))
    assert taken == [4, 3] and len(samplers[1].disturbed_us) == 3
    assert samplers[1].samples("time").flags == ()


def test_a_slow_host_does_not_disturb_what_holds_nothing_of_it() -> None:
    host = Host(lambda reading: 1 <= reading <= 3)

    def read(series: Any) -> dict[str, list[float]]:
        return {"gpu_us": [NORMAL_US], "host_us": host.read(series)["step_us"]}

    measure = Measure(min_samples=4, noise=0.02, max_seconds=60.0)
    device_alone = {("graph", "gpu_us")}
    found = sample({"graph": read}, cast(Any, None), measure, Watch(None, 0.0, host), device_alone)["graph"]
    assert not found["gpu_us"].disturbed_us and not found["gpu_us"].flags
    # Sampling went on until the host's time had enough undisturbed samples as well.
    assert found["host_us"].us == (NORMAL_US,) * 4 and found["host_us"].disturbed_us.count(SLOW_US) == 3


@given(slow=st.lists(st.booleans(), min_size=1, max_size=60), least=st.integers(2, 8))
@settings(max_examples=60, deadline=None)
def test_no_sample_is_lost_and_statistics_hold_no_slow_one_unless_flagged(slow: list[bool], least: int) -> None:
    found = taken(lambda reading: slow[reading % len(slow)], least=least)
    assert found.taken == len(found.us) + len(found.disturbed_us) >= least
    assert any(slow) or not found.flags
    if not found.flags:
        assert set(found.us) == {NORMAL_US} and len(found.us) >= least


def test_a_watch_waits_for_a_quiet_host_and_then_goes_on() -> None:
    class Recovering(Host):
        def slowdown(self) -> float:
            self.readings += 1
            return super().slowdown()

    host = Recovering(lambda asked: asked < 3)
    watch = Watch(None, 5.0, host)
    watch.wait()
    assert host.readings == 3 and watch.now() == ()


class Cores:
    """A machine whose cores take so many µs for the fixed piece; the thread begins on the last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, us: list[float]) -> None:
        self.us = us
        self.on = set(range(len(us)))
        monkeypatch.setattr(disturbance.os, "sched_getaffinity", lambda pid: set(range(len(us))), raising=False)
        monkeypatch.setattr(disturbance.os, "sched_setaffinity", self.set, raising=False)
        monkeypatch.setattr(HostPace, "_spin", lambda pace: self.us[max(self.on)] * 1e-6)
        monkeypatch.setattr(disturbance, "HOST_EVERY_S", -1.0)
        monkeypatch.setattr(disturbance.time, "sleep", self.sleep)
        self.slept = 0
        self.tried: list[int] = []

    def set(self, pid: int, cores: set[int]) -> None:
        self.on = cores
        self.tried.append(max(cores))

    def sleep(self, seconds: float) -> None:
        self.slept += 1
        if self.slept == 3:
            self.us[1] = 120.0


def test_the_thread_is_on_the_fastest_core_and_moves_when_that_one_slows_down(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Cores(monkeypatch, [220.0, 121.0, 180.0, 125.0])
    watch = Watch(None, 5.0)
    assert host.on == {1} and watch.now() == ()
    host.us[1] = 230.0
    assert watch.now() == ("host slowed down",)
    watch.wait()
    assert host.on == {3} and watch.now() == () and not host.slept
    watch.release()
    assert host.on == {0, 1, 2, 3}


def test_without_a_quiet_core_it_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Cores(monkeypatch, [220.0, 121.0])
    watch = Watch(None, 5.0)
    host.us[1] = 230.0
    watch.wait()
    assert host.slept == 3 and host.on == {1} and watch.now() == ()


def test_the_next_search_begins_after_the_core_that_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Cores(monkeypatch, [121.0, 122.0, 123.0, 220.0])
    watch = Watch(None, 5.0)
    visited = []
    for slow in (0, 1):
        host.us[slow] = 230.0
        host.tried.clear()
        watch.wait()
        visited.append(list(dict.fromkeys(host.tried)))
    assert visited == [[1], [2]]  # one quiet core is enough, and the slow ones before it are not asked
    assert host.on == {2}


def test_out_of_patience_a_quiet_core_is_still_looked_for_but_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disturbance, "MOVE_EVERY_S", 3600.0)
    host = Cores(monkeypatch, [121.0, 140.0])
    watch = Watch(None, 1e-9)
    host.us[:] = [230.0, 240.0]
    watch.wait()
    assert host.slept == 1 and watch.now() == ("host slowed down",)
    host.us[:] = [230.0, 122.0]
    watch.wait()
    assert host.slept == 1 and host.on == {0}  # it looked a moment ago
    monkeypatch.setattr(disturbance, "MOVE_EVERY_S", 0.0)
    watch.wait()
    assert host.slept == 1 and host.on == {1} and watch.now() == ()


def test_cores_that_are_taken_away_leave_the_thread_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Cores(monkeypatch, [220.0, 121.0])
    watch = Watch(None, 1e-9)

    def refused(pid: int, cores: set[int]) -> None:
        if len(cores) == 1:
            raise OSError(22, "Invalid argument")
        host.set(pid, cores)

    monkeypatch.setattr(disturbance.os, "sched_setaffinity", refused)
    host.us[1] = 230.0
    watch.wait()
    assert host.on == {0, 1} and watch.now() == ("host slowed down",)
    watch.release()


@pytest.mark.parametrize("fails", [False, True])
def test_measuring_releases_the_core_however_it_ends(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    released: list[Watch] = []
    monkeypatch.setattr(Watch, "release", lambda watch: released.append(watch))

    def decode(latency: Latency, runner: GraphDecode, clock: Clock) -> None:
        if fails:
            raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(Latency, "_decode", decode)
    engine = cast(Any, SimpleNamespace(device=torch.device("cpu")))
    latency = Latency(tiny.cell(), engine, None, lambda *_: None)
    with suppress(torch.cuda.OutOfMemoryError):
        latency.measure(object.__new__(GraphDecode))
    assert len(released) == 1


@pytest.mark.parametrize(
    ("near", "expected"),
    [(set(), (0, 1, 2, 3)), ({2, 3, 9}, (2, 3)), ({9}, (0, 1, 2, 3))],
    ids=["untold", "some", "none of them allowed"],
)
def test_cores_next_to_the_gpu_come_first(
    monkeypatch: pytest.MonkeyPatch, near: set[int], expected: tuple[int, ...]
) -> None:
    monkeypatch.setattr(disturbance.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    card = Card()
    card.near = near
    assert disturbance.cores_to_choose_from(cast(Gpu, card)) == expected


def test_of_many_cores_some_are_looked_at_and_a_system_may_not_let_a_thread_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disturbance.os, "sched_getaffinity", lambda pid: set(range(192)), raising=False)
    cores = disturbance.cores_to_choose_from(None)
    assert cores == tuple(range(0, 192, 3)) and len(cores) <= disturbance.MOST_CORES
    monkeypatch.delattr(disturbance.os, "sched_setaffinity", raising=False)
    assert disturbance.cores_to_choose_from(None) == ()


class Card:
    """A GPU as the driver would tell of it."""

    def __init__(self) -> None:
        self.reasons: tuple[str, ...] = ()
        self.mhz: int | None = 1980
        self.others = 0
        self.near: set[int] = set()

    def near_cores(self) -> set[int]:
        return self.near

    def throttle_reasons(self) -> tuple[str, ...]:
        return self.reasons

    def clock_mhz(self) -> int | None:
        return self.mhz

    def other_processes(self) -> int:
        return self.others


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, ()),
        ({"reasons": ("thermal (hardware)",), "mhz": 1980}, ("thermal (hardware)",)),
        ({"reasons": (POWER_CAP,), "mhz": 1500}, ()),
        ({"mhz": 1500}, ("GPU clock dropped",)),
        ({"mhz": 1900}, ()),
        ({"mhz": None}, ()),
        ({"others": 1}, ("another process on the GPU",)),
    ],
)
def test_what_the_driver_says_is_told_and_a_power_cap_is_none(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], told: tuple[str, ...]
) -> None:
    monkeypatch.setattr(disturbance, "GPU_EVERY_S", -1.0)
    card = Card()
    watch = Watch(cast(Gpu, card), 0.0, Host(lambda reading: False))
    assert watch.now() == ()
    for name, value in change.items():
        setattr(card, name, value)
    assert watch.now() == told


@pytest.mark.parametrize(("listed", "others"), [((), 0), ((1,), 0), ((1, 2), 1), ((1, 1), 0)])
def test_one_of_the_processes_listed_is_this_one(
    monkeypatch: pytest.MonkeyPatch, listed: tuple[int, ...], others: int
) -> None:
    class Listed:
        def __init__(self, pid: int) -> None:
            self.pid = pid

    gpu = object.__new__(Gpu)
    monkeypatch.setattr(Gpu, "_processes", lambda self: [Listed(pid) for pid in listed])
    assert gpu.other_processes() == others
