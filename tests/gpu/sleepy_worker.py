"""A worker whose recorded decode forward ends with a sleep: the slowed side of `benchmarks/rounds.py`.

    SLEEP_US='{"1": 50, "16": 60}' python tests/gpu/sleepy_worker.py CELL.json RESULT.json [--device ...]

``SLEEP_US`` maps captured sizes to microseconds. Only recordings sleep, on a GPU as a kernel of the graph; eager steps
are those of the worker itself.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

from graphtune.results import CaptureList
from graphtune.worker import __main__ as worker
from graphtune.worker.graphs.backend import GraphBackend
from graphtune.worker.runners.buffers import DecodeBatch
from graphtune.worker.runners.decode import EagerDecode, GraphDecode

SLEEP_US = "SLEEP_US"
CALIBRATION_CYCLES = 20_000_000


@torch.library.custom_op("graphtune_tests::sleep", mutates_args=("logits",), device_types="cpu")
def sleep(logits: torch.Tensor, us: float) -> None:
    """Keep the core busy for so long; said to write the logits, so that a recording keeps it."""
    end = time.perf_counter() + us / 1e6
    while time.perf_counter() < end:
        pass


class SleepyDecode(GraphDecode):
    """Captured sizes whose forward ends with a sleep of their own length."""

    def __init__(self, eager: EagerDecode, backend: GraphBackend, capture_list: CaptureList) -> None:
        super().__init__(eager, backend, capture_list)
        self._us = {int(size): float(us) for size, us in json.loads(os.environ[SLEEP_US]).items()}
        self._cycles_per_us = _cycles_per_us() if eager.cache.pool.is_cuda else 0.0

    def _forward(self, batch: DecodeBatch) -> torch.Tensor:
        logits = super()._forward(batch)
        us = self._us[batch.padded_size]
        if logits.is_cuda:
            torch.cuda._sleep(round(us * self._cycles_per_us))
        else:
            sleep(logits, us)
        return logits


def _cycles_per_us() -> float:
    """What a sleep kernel's cycles last on this device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(CALIBRATION_CYCLES)
    start.record()
    torch.cuda._sleep(CALIBRATION_CYCLES)
    end.record()
    end.synchronize()
    return CALIBRATION_CYCLES / (start.elapsed_time(end) * 1e3)


if __name__ == "__main__":
    from graphtune.worker import engine

    engine.GraphDecode = SleepyDecode  # type: ignore[misc]
    sys.exit(worker.main())
