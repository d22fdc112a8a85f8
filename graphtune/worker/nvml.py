"""The GPU as its driver's management library sees it. NVML calls are safe during a capture; CUDA calls are not."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any

import pynvml

POWER_CAP = "power cap"
THROTTLE_REASONS = {
    pynvml.nvmlClocksThrottleReasonSwPowerCap: POWER_CAP,
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: "thermal (software)",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "thermal (hardware)",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
}
SAMPLE_EVERY_S = 0.002
CORE_MASKS = 64
"""Words of 64 cores each, enough for any host."""


class Gpu:
    """One device by its CUDA index; every reading is None where the driver or a container withholds it."""

    def __init__(self, index: int) -> None:
        pynvml.nvmlInit()
        self._handle = self._find(index)

    @staticmethod
    def _find(index: int) -> object:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if not visible:
            return pynvml.nvmlDeviceGetHandleByIndex(index)
        name = visible.split(",")[index].strip()
        if name.isdigit():
            return pynvml.nvmlDeviceGetHandleByIndex(int(name))
        return pynvml.nvmlDeviceGetHandleByUUID(name)

    @property
    def total_bytes(self) -> int:
        """The figure that nvidia-smi prints."""
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).total)

    def used_bytes(self) -> int:
        """Device-wide used bytes."""
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def free_bytes(self) -> int:
        """Device-wide free bytes."""
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).free)

    def process_bytes(self) -> int | None:
        """Bytes of this process; None where the container hides it."""
        for process in self._processes():
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
        return None

    def other_processes(self) -> int:
        """Processes on the device beside this one, as far as they can be seen. This one has a context there: where its
        number is not listed, a container gave it another one, and one of those listed is it."""
        return max(0, len({process.pid for process in self._processes()}) - 1)

    def _processes(self) -> list[Any]:
        try:
            return list(pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        except pynvml.NVMLError:
            return []

    def driver(self) -> str:
        return str(pynvml.nvmlSystemGetDriverVersion())

    def near_cores(self) -> set[int]:
        """The host's cores that are next to this device; empty where the driver does not tell."""
        try:
            masks = pynvml.nvmlDeviceGetCpuAffinity(self._handle, CORE_MASKS)
        except pynvml.NVMLError:
            return set()
        return {64 * word + bit for word, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1}

    def clock_mhz(self) -> int | None:
        """The SM clock now."""
        try:
            return int(pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM))
        except pynvml.NVMLError:
            return None

    def throttle_reasons(self) -> tuple[str, ...]:
        """Reasons that lower the clock now, idle and user settings apart."""
        try:
            mask = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        except pynvml.NVMLError:
            return ()
        return tuple(name for bit, name in THROTTLE_REASONS.items() if mask & bit)


class PeakSampler:
    """Samples the device's used bytes from a thread, for peaks that torch's allocator does not see."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._peak = 0

    def __enter__(self) -> PeakSampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def take(self) -> int:
        """The highest reading since the last call."""
        peak, self._peak = max(self._peak, self._gpu.used_bytes()), 0
        return peak

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            self._peak = max(self._peak, self._gpu.used_bytes())
