"""What a cell runs on and with."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import time
from dataclasses import replace

import torch

from graphtune import __version__
from graphtune.commit import COMMIT_VARIABLE
from graphtune.results import Environment
from graphtune.worker.nvml import Gpu

LAUNCHES = 400


def read_environment(gpu: Gpu | None) -> Environment:
    """Versions, device and totals. The clock is read here, before any work."""
    environment = Environment(
        device="cpu",
        graph_mechanism="tape",
        device_name=platform.processor() or platform.machine() or "cpu",
        graphtune=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        flashinfer=None,
        cutlass_dsl=importlib.util.find_spec("cutlass") is not None,
        driver=None,
        cuda=None,
        nvml_total_bytes=None,
        cuda_total_bytes=None,
        compute_capability=None,
        commit=os.environ.get(COMMIT_VARIABLE) or None,
        allocator_settings=os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
    )
    if gpu is None:
        return environment
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return replace(
        environment,
        device="cuda",
        graph_mechanism="cuda_graph",
        device_name=properties.name,
        flashinfer=_version("flashinfer-python"),
        driver=gpu.driver(),
        cuda=torch.version.cuda,
        nvml_total_bytes=gpu.total_bytes,
        cuda_total_bytes=torch.cuda.mem_get_info()[1],
        compute_capability=f"{properties.major}.{properties.minor}",
        clock_mhz_before=gpu.clock_mhz(),
        other_processes=gpu.other_processes(),
    )


def launch_cost_us() -> float:
    """Host microseconds of one kernel launch through torch: the median over bursts that do not fill the queue."""
    x = torch.zeros(1, device="cuda")
    bursts = []
    for _ in range(9):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(LAUNCHES):
            x.add_(1.0)
        bursts.append((time.perf_counter() - started) / LAUNCHES * 1e6)
    torch.cuda.synchronize()
    return round(sorted(bursts)[len(bursts) // 2], 3)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
