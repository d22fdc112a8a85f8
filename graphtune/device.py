"""Which device a sweep runs on, found without importing torch: NVML for the card, a short child process for torch."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from graphtune.engines.base import DeviceFacts
from graphtune.errors import DeviceError, InputError
from graphtune.units import MIB

PROBE_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Gpu:
    """One card as NVML shows it. ``processes`` counts compute processes; None where they are hidden."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    driver: str
    compute_capability: tuple[int, int]
    processes: int | None
    mig: bool


@dataclass(frozen=True)
class TorchFacts:
    """What ``import torch`` gives in a fresh process. ``cuda`` is the version it is built for, None for CPU builds."""

    version: str | None
    cuda: str | None
    cuda_usable: bool
    device_name: str | None
    device_total_bytes: int | None
    error: str | None


@dataclass(frozen=True)
class Device:
    """Where cells run. ``environment`` is what a worker's environment gets on top of the caller's."""

    kind: Literal["cuda", "cpu"]
    name: str
    slug: str
    facts: DeviceFacts | None
    memory_bytes: int | None
    environment: Mapping[str, str]


def list_gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """The cards that NVML shows, and why there are none."""
    try:
        import pynvml
    except ImportError:
        return (), "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return (), f"NVML: {error}"
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        count = pynvml.nvmlDeviceGetCount()
        gpus = tuple(_gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index), index, driver) for index in range(count))
    except pynvml.NVMLError as error:
        return (), f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()
    return gpus, None if gpus else "NVML shows no GPU"


def _gpu(pynvml: Any, handle: Any, index: int, driver: str) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        processes: int | None = len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except pynvml.NVMLError:
        processes = None
    try:
        mig = pynvml.nvmlDeviceGetMigMode(handle)[0] == 1
    except pynvml.NVMLError:
        mig = False
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        used_bytes=int(memory.used),
        driver=driver,
        compute_capability=(major, minor),
        processes=processes,
        mig=mig,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


_PROBE = """
import json
try:
    import torch
    usable = torch.cuda.is_available()
    properties = torch.cuda.get_device_properties(0) if usable else None
    print(json.dumps({
        "version": torch.__version__, "cuda": torch.version.cuda, "cuda_usable": usable,
        "device_name": properties.name if usable else None,
        "device_total_bytes": properties.total_memory if usable else None, "error": None,
    }))
except Exception as error:
    print(json.dumps({
        "version": None, "cuda": None, "cuda_usable": False, "device_name": None, "device_total_bytes": None,
        "error": f"{type(error).__name__}: {error}",
    }))
"""


def probe_torch(environment: Mapping[str, str] | None = None) -> TorchFacts:
    """Import torch in a child process and ask it about CUDA; never raises."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
        return TorchFacts(**json.loads(done.stdout.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        problem = f"importing torch took more than {PROBE_TIMEOUT_S:.0f} s"
    except (OSError, ValueError, IndexError, TypeError) as error:
        problem = f"importing torch ended badly: {error}"
    return TorchFacts(None, None, False, None, None, problem)


def choose_device(asked: str) -> Device:
    """The device for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    ``auto`` is the first GPU where there is one, else the CPU. A GPU that torch cannot use is a DeviceError also for
    ``auto``: sweeping a large model on the CPU instead would be a surprise.
    """
    match = re.fullmatch(r"auto|cpu|cuda(?::(\d{1,4}))?", asked)
    if match is None:
        raise InputError(f"{asked!r} is not a device", where="--device", action="Write auto, cpu, cuda or cuda:0.")
    if asked == "cpu":
        return cpu_device()
    gpus, reason = list_gpus()
    driver_here = bool(gpus) or Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
    if not driver_here:
        if asked == "auto":
            return cpu_device()
        action = "Use --device cpu (a check of the machinery), or a machine with an NVIDIA GPU; see graphtune doctor."
        raise DeviceError(f"no CUDA device here ({reason})", where=f"--device {asked}", action=action)
    return _cuda_device(asked, int(match[1] or 0), gpus)


def _cuda_device(asked: str, number: int, gpus: tuple[Gpu, ...]) -> Device:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",") if name.strip()] if visible is not None else None
    if names is None:
        names = [str(gpu.index) for gpu in gpus] or ["0"]
    if number >= len(names):
        action = "Use --device cpu, or a smaller number." if names else "Unset CUDA_VISIBLE_DEVICES, which hides all."
        raise DeviceError(f"there is no GPU {number}; {len(names)} visible", where=f"--device {asked}", action=action)
    chosen = names[number]
    environment = {"CUDA_VISIBLE_DEVICES": chosen, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    torch = probe_torch(environment)
    if not torch.cuda_usable:
        if torch.version is None:
            problem = torch.error or "torch cannot be imported"
        elif torch.cuda is None:
            problem = f"torch {torch.version} is a CPU build"
        else:
            problem = f"torch {torch.version} for CUDA {torch.cuda} cannot use the GPU with this driver"
        action = "Install a CUDA build of torch (see graphtune doctor), or use --device cpu."
        raise DeviceError(problem, where=f"--device {asked}", action=action)
    gpu = next((gpu for gpu in gpus if chosen in (str(gpu.index), gpu.uuid)), None)
    name = torch.device_name or (gpu.name if gpu else "CUDA device")
    # A slice of a card (MIG) has less than the card: then only torch's figure counts.
    whole = gpu is not None and not gpu.mig
    total = gpu.total_bytes if whole and gpu is not None else torch.device_total_bytes
    facts = DeviceFacts(
        nvml_total_mib=total // MIB if total else None,
        compute_capability=gpu.compute_capability if gpu else None,
        name=name,
    )
    return Device("cuda", name, slug(name), facts, torch.device_total_bytes, environment)


def cpu_device() -> Device:
    """The CPU, with CUDA hidden from workers so that nothing there depends on a GPU being present."""
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    return Device("cpu", cpu_name(), "cpu", None, host_memory_bytes(), environment)


def slug(name: str) -> str:
    """``nvidia-h200`` of ``NVIDIA H200``: part of a folder's name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "device"


def cpu_name() -> str:
    """The processor's model name; its architecture where the system does not say."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def host_memory_bytes() -> int | None:
    """Memory of this machine, or the container's limit where that is lower."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(file).read_text()))
        except (OSError, ValueError):
            continue
    return total
