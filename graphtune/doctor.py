"""What this machine has for sweeping and what it lacks, each with the command that mends it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from graphtune.data import shipped_sweep
from graphtune.device import Gpu, TorchFacts, host_memory_bytes, list_gpus, probe_torch
from graphtune.errors import InputError
from graphtune.units import GIB, MIB, format_bytes

FLASHINFER_RANGE = ((0, 6, 13), (0, 7, 0))
OLDEST_PYTHON = (3, 11)
LEAST_DISK_BYTES = 1 * GIB
CUDA_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cu130"
EXTRA = "pip install 'graphtune[cuda]'"


@dataclass(frozen=True)
class Check:
    """One thing looked at. ``lacks`` keeps a sweep on this machine from running, ``note`` is worth knowing."""

    name: str
    state: Literal["ok", "note", "lacks"]
    found: str
    mend: str | None = None


def examine(folder: Path) -> tuple[Check, ...]:
    """Look at Python, torch, the GPU, FlashInfer, memory and the disk under ``folder``; changes nothing."""
    gpus, no_gpu = list_gpus()
    torch = probe_torch()
    checks = [_python(), _torch(torch, bool(gpus)), *_gpus(gpus, no_gpu, torch)]
    if gpus:
        checks += [_flashinfer(), _compiler(), _norm_kernels()]
    return (*checks, _memory(), _disk(folder), _shipped())


def _python() -> Check:
    found = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Check("python", "lacks", found, "install Python 3.11 or newer")
    return Check("python", "ok", found)


def _torch(torch: TorchFacts, gpu_here: bool) -> Check:
    if torch.version is None:
        return Check("torch", "lacks", torch.error or "cannot be imported", "pip install torch")
    built = f"{torch.version}, built for CUDA {torch.cuda}" if torch.cuda else f"{torch.version}, CPU build"
    if gpu_here and torch.cuda is None:
        return Check("torch", "lacks", f"{built}: it cannot use the GPU", CUDA_TORCH)
    if gpu_here and not torch.cuda_usable:
        mend = f"update the NVIDIA driver, or install a torch for an older CUDA: {CUDA_TORCH}"
        return Check("torch", "lacks", f"{built}: it cannot use the GPU with this driver", mend)
    return Check("torch", "ok", built)


def _gpus(gpus: tuple[Gpu, ...], reason: str | None, torch: TorchFacts) -> list[Check]:
    if not gpus:
        found = f"none ({reason}); sweeps here run on the CPU and check the machinery only"
        return [Check("gpu", "note", found, "sweep on an NVIDIA GPU; recommend and lint need none")]
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return [Check("gpu", "lacks", "hidden by an empty CUDA_VISIBLE_DEVICES", "unset CUDA_VISIBLE_DEVICES")]
    return [check for gpu in gpus for check in _gpu(gpu)]


def _gpu(gpu: Gpu) -> list[Check]:
    major, minor = gpu.compute_capability
    what = f"{gpu.name}, {gpu.total_bytes // MIB} MiB, compute capability {major}.{minor}, driver {gpu.driver}"
    checks = [Check(f"gpu {gpu.index}", "ok", what)]
    if gpu.mig:
        checks.append(Check(f"gpu {gpu.index} slices", "note", "MIG is on: a sweep measures one slice, not the card"))
    if gpu.processes or gpu.used_bytes > 2 * GIB:
        users = "processes are hidden" if gpu.processes is None else f"{gpu.processes} processes"
        found = f"{format_bytes(gpu.used_bytes)} in use, {users}: step times and memory will be disturbed"
        checks.append(Check(f"gpu {gpu.index} load", "note", found, "nvidia-smi shows who; end them before a sweep"))
    return checks


def _package(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _flashinfer() -> Check:
    found = _package("flashinfer-python")
    if found is None:
        return Check("flashinfer", "lacks", "not installed; attention on the GPU needs it", EXTRA)
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    oldest, newest = FLASHINFER_RANGE
    if not oldest <= numbers < newest:
        return Check("flashinfer", "lacks", f"{found}; graphtune is written for 0.6.13 up to 0.7", EXTRA)
    return Check("flashinfer", "ok", found)


def _compiler() -> Check:
    """FlashInfer compiles kernels at first use unless their binaries are installed."""
    if _package("flashinfer-jit-cache"):
        return Check("kernel compiler", "ok", "not needed: flashinfer-jit-cache is installed")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc") or (str(Path(home, "bin/nvcc")) if Path(home, "bin/nvcc").exists() else None)
    ninja = shutil.which("ninja") or importlib.util.find_spec("ninja")
    absent = [name for name, there in (("nvcc", nvcc), ("ninja", ninja)) if not there]
    if absent:
        found = f"{' and '.join(absent)} not found; FlashInfer compiles kernels at first use"
        return Check("kernel compiler", "note", found, "install the CUDA toolkit and `pip install ninja`")
    return Check("kernel compiler", "ok", "nvcc and ninja found")


def _norm_kernels() -> Check:
    found = _package("nvidia-cutlass-dsl")
    what = f"{found}: FlashInfer's norm kernels come from it" if found else "absent: FlashInfer's own norm kernels run"
    return Check("nvidia-cutlass-dsl", "ok", what)


def _memory() -> Check:
    total = host_memory_bytes()
    return Check("memory", "ok", format_bytes(total) if total else "not known")


def _disk(folder: Path) -> Check:
    place = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if not os.access(place, os.W_OK):
        return Check("disk", "lacks", f"{place} cannot be written", "work in a folder of your own, or use --out")
    if free < LEAST_DISK_BYTES:
        return Check("disk", "note", f"{format_bytes(free)} free for results", "free some space, or use --out")
    return Check("disk", "ok", f"{format_bytes(free)} free for results")


def _shipped() -> Check:
    try:
        return Check("shipped sweep", "ok", shipped_sweep().name)
    except InputError as error:
        return Check("shipped sweep", "note", error.message, "pip install --force-reinstall graphtune")
