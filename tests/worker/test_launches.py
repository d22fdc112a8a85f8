from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType

from graphtune.worker.launches import Span, StepTrace, read_events


@dataclass(frozen=True)
class Event:
    """What is read of a profiler's event."""

    name: str
    start: float
    end: float
    device_type: DeviceType = DeviceType.CUDA

    @property
    def time_range(self) -> SimpleNamespace:
        return SimpleNamespace(start=self.start, end=self.end)


def host(name: str, start: float, end: float) -> Event:
    return Event(name, start, end, DeviceType.CPU)


def test_kernels_and_the_calls_that_launched_them_are_kept_apart() -> None:
    events = [
        Event("gemm", 120.0, 130.0),
        Event("norm", 110.0, 114.0),
        host("cudaLaunchKernel", 101.0, 105.0),
        host("cudaLaunchKernelExC", 106.0, 109.0),
        host("cudaDeviceSynchronize", 110.0, 131.0),
        host("aten::mm", 100.0, 109.0),
    ]
    trace = read_events(events)
    assert [span.name for span in trace.kernels] == ["norm", "gemm"]
    assert [span.start_us for span in trace.calls] == [101.0, 106.0]
    line = trace.timeline(4, 1024, "eager")
    assert (line.starts_us, line.lengths_us) == ((9.0, 19.0), (4.0, 10.0))
    assert (line.call_starts_us, line.call_lengths_us) == ((0.0, 5.0), (4.0, 3.0))
    profile = trace.profile(4, 1024, "eager")
    assert (profile.launches, profile.kernel_us, profile.span_us) == (2, 14.0, 20.0)
    assert profile.idle_share == pytest.approx(0.3)


@pytest.mark.parametrize("name", ["cudaGraphLaunch", "cuLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync"])
def test_every_way_to_launch_counts(name: str) -> None:
    assert len(read_events([Event("k", 2.0, 3.0), host(name, 0.0, 1.0)]).calls) == 1


def test_the_driver_s_side_of_a_launch_is_not_counted_again() -> None:
    nested = [host("cudaLaunchKernel", 0.0, 5.0), host("cuLaunchKernel", 1.0, 4.0), host("cuLaunchKernel", 5.0, 6.0)]
    assert [call.start_us for call in read_events([Event("k", 2.0, 3.0), *nested]).calls] == [0.0, 5.0]


def test_no_kernel_is_an_error_that_says_why() -> None:
    with pytest.raises(RuntimeError, match="another profiler"):
        read_events([host("cudaLaunchKernel", 0.0, 1.0)])


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e4), st.floats(0, 50)), min_size=1, max_size=40),
    st.integers(1, 30),
)
def test_a_timeline_holds_the_first_kernels_and_counts_the_rest(
    spans: list[tuple[str, float, float]], most: int
) -> None:
    ordered = sorted((Span(name, start, start + length) for name, start, length in spans), key=lambda s: s.start_us)
    line = StepTrace(tuple(ordered), ()).timeline(1, 1, "graph", most)
    assert len(line.kernels) + line.left_out == len(spans) and len(line.kernels) == min(most, len(spans))
    assert [line.names[at] for at in line.kernels] == [span.name for span in ordered[:most]]
    assert line.starts_us[0] == 0.0 and list(line.starts_us) == sorted(line.starts_us)
    assert len(set(line.names)) == len(line.names)
    for at, span in enumerate(ordered[:most]):
        assert line.starts_us[at] == pytest.approx(span.start_us - ordered[0].start_us, abs=0.011)
