"""What the profiler sees of a step on the GPU: many launches of an eager step, one of a replay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from graphtune.worker.launches import StepTrace, trace_step
from graphtune.worker.runners.series import BatchSeries
from tests.gpu.test_decode import CONFIG, captured, make_engine
from tests.worker import tiny

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def traces() -> Iterator[tuple[StepTrace, StepTrace]]:
    """An eager step and a replay of four requests."""
    engine = make_engine(CONFIG)
    runner = captured(engine, tiny.capture_list(4))
    with torch.inference_mode():
        series = BatchSeries(engine.table, size=4, context=100, vocab_size=CONFIG["vocab_size"], seed=1)
        yield trace_step(engine.eager, series), trace_step(runner, series)
        series.close()
        runner.tear_down()


def test_every_kernel_of_an_eager_step_has_its_launch(traces: tuple[StepTrace, StepTrace]) -> None:
    eager, _ = traces
    assert eager.graph_launches == 0
    assert eager.kernel_launches == pytest.approx(len(eager.kernels), rel=0.05)


def test_a_replay_is_one_launch_of_the_same_kernels(traces: tuple[StepTrace, StepTrace]) -> None:
    eager, replay = traces
    assert replay.graph_launches == 1 and replay.kernel_launches <= 2
    assert len(replay.kernels) == pytest.approx(len(eager.kernels), rel=0.1)


def test_the_timelines_leave_fewer_microseconds_between_replayed_kernels(traces: tuple[StepTrace, StepTrace]) -> None:
    eager, replay = (
        trace.profile(4, 100, execution) for trace, execution in zip(traces, ("eager", "graph"), strict=True)
    )
    assert replay.idle_share < eager.idle_share
    line = traces[1].timeline(4, 100, "graph")
    assert line.left_out == 0 and len(line.call_starts_us) >= 1 and min(line.starts_us) >= 0.0
