"""doctor names what is lacking with the command that mends it, on machines that this one is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from graphtune import device, doctor
from graphtune.cli.app import app
from graphtune.device import Gpu, TorchFacts, choose_device, slug
from graphtune.errors import DeviceError, InputError

GIB = 1 << 30
H200 = Gpu(0, "GPU-1", "NVIDIA H200", 143771 << 20, 1 << 20, "580.00", (9, 0), 0, False)
CUDA_TORCH = TorchFacts("2.11.0", "13.0", True, "NVIDIA H200", 143156 << 20, None)
CPU_TORCH = TorchFacts("2.13.0+cpu", None, False, None, None, None)
GOOD = {"flashinfer-python": "0.6.13", "flashinfer-jit-cache": "0.6.13", "nvidia-cutlass-dsl": "4.2"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend to be a machine with these cards, torch and packages."""

    def pretend(gpus: tuple[Gpu, ...] = (), torch: TorchFacts = CPU_TORCH, packages: Any = None) -> None:
        installed = GOOD if packages is None else packages
        for module in (doctor, device):
            monkeypatch.setattr(module, "list_gpus", lambda: (gpus, None if gpus else "NVML shows no GPU"))
            monkeypatch.setattr(module, "probe_torch", lambda *_: torch)
        monkeypatch.setattr(doctor, "_package", installed.get)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return pretend


def states(folder: Path = Path("reports")) -> dict[str, doctor.Check]:
    return {check.name: check for check in doctor.examine(folder)}


def test_a_machine_without_a_gpu_lacks_nothing_it_needs(machine: Any) -> None:
    machine()
    checks = states()
    assert "lacks" not in {check.state for check in checks.values()}
    assert checks["gpu"].state == "note"
    assert "NVIDIA GPU" in str(checks["gpu"].mend)
    assert "flashinfer" not in checks


def test_a_gpu_machine_with_everything_is_well(machine: Any) -> None:
    machine((H200,), CUDA_TORCH)
    checks = states()
    assert {check.state for name, check in checks.items() if name != "shipped sweep"} == {"ok"}
    assert checks["gpu 0"].found == "NVIDIA H200, 143771 MiB, compute capability 9.0, driver 580.00"


@pytest.mark.parametrize(
    ("torch", "packages", "name", "found", "mend"),
    [
        (CPU_TORCH, None, "torch", "CPU build: it cannot use the GPU", "pip install torch --index-url"),
        (replace(CUDA_TORCH, cuda_usable=False), None, "torch", "with this driver", "update the NVIDIA driver"),
        (
            replace(CPU_TORCH, version=None, error="No module named 'torch'"),
            None,
            "torch",
            "No module",
            "pip install torch",
        ),
        (CUDA_TORCH, {}, "flashinfer", "not installed", "pip install 'graphtune[cuda]'"),
        (CUDA_TORCH, GOOD | {"flashinfer-python": "0.6.2"}, "flashinfer", "0.6.2", "pip install 'graphtune[cuda]'"),
        (CUDA_TORCH, GOOD | {"flashinfer-python": "0.7.0"}, "flashinfer", "0.7.0", "pip install 'graphtune[cuda]'"),
    ],
)
def test_what_is_lacking_is_named_with_its_cure(
    machine: Any, torch: TorchFacts, packages: Any, name: str, found: str, mend: str
) -> None:
    machine((H200,), torch, packages)
    check = states()[name]
    assert check.state == "lacks"
    assert found in check.found
    assert mend in str(check.mend)


def test_a_busy_or_sliced_card_and_a_missing_compiler_are_noted(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine((replace(H200, processes=2, used_bytes=9 * GIB, mig=True),), CUDA_TORCH, {"flashinfer-python": "0.6.14"})
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    checks = states()
    assert "9.00 GiB in use, 2 processes" in checks["gpu 0 load"].found
    assert "MIG is on" in checks["gpu 0 slices"].found
    assert checks["kernel compiler"].state == "note"
    assert "nvcc" in checks["kernel compiler"].found
    assert checks["flashinfer"].state == "ok"


def test_a_folder_that_cannot_be_written_is_lacking(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    monkeypatch.setattr("os.access", lambda *_: False)
    assert states(tmp_path / "not" / "there")["disk"].state == "lacks"


def test_the_command_prints_lines_or_json_and_exits_1_when_something_is_lacking(machine: Any) -> None:
    machine()
    plain = CliRunner().invoke(app, ["doctor"])
    assert plain.exit_code == 0
    assert "CPU build" in plain.stdout
    machine((H200,), CUDA_TORCH, {})
    printed = CliRunner().invoke(app, ["doctor", "--json"])
    assert printed.exit_code == 1
    assert "flashinfer" in [check["name"] for check in json.loads(printed.stdout)["checks"]]


def test_auto_takes_the_gpu_where_there_is_one(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: False)
    machine()
    assert choose_device("auto").kind == "cpu"
    assert choose_device("cpu").environment["CUDA_VISIBLE_DEVICES"] == ""
    machine((H200,), CUDA_TORCH)
    chosen = choose_device("auto")
    assert (chosen.kind, chosen.name, chosen.slug) == ("cuda", "NVIDIA H200", "nvidia-h200")
    assert chosen.facts is not None
    assert (chosen.facts.nvml_total_mib, chosen.facts.compute_capability) == (143771, (9, 0))
    assert choose_device("cpu").kind == "cpu"


def test_a_numbered_card_is_the_one_the_worker_sees(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    second = replace(H200, index=1, uuid="GPU-2", total_bytes=81559 << 20)
    machine((H200, second), CUDA_TORCH)
    chosen = choose_device("cuda:1")
    assert chosen.environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert chosen.facts is not None
    assert chosen.facts.nvml_total_mib == 81559
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2")
    assert choose_device("cuda").facts == chosen.facts
    with pytest.raises(DeviceError, match="there is no GPU 1; 1 visible"):
        choose_device("cuda:1")


def test_a_slice_of_a_card_has_the_memory_that_torch_reports(machine: Any) -> None:
    machine((replace(H200, mig=True),), replace(CUDA_TORCH, device_total_bytes=20 * GIB))
    facts = choose_device("cuda").facts
    assert facts is not None
    assert facts.nvml_total_mib == 20 * 1024


def test_cuda_where_there_is_none_says_what_to_do(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: False)
    machine()
    with pytest.raises(DeviceError, match="no CUDA device here") as caught:
        choose_device("cuda")
    assert "--device cpu" in str(caught.value)
    machine((H200,), CPU_TORCH)
    for asked in ("cuda", "auto"):
        with pytest.raises(DeviceError, match="is a CPU build") as caught:
            choose_device(asked)
        assert "graphtune doctor" in str(caught.value)
    for asked in ("gpu", "cuda:x", "cuda:-1", "cuda:", ""):
        with pytest.raises(InputError, match="is not a device"):
            choose_device(asked)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb"),
        ("Quadro RTX 6000/8000", "quadro-rtx-6000-8000"),
        ("///", "device"),
    ],
)
def test_folders_are_named_after_the_card(name: str, expected: str) -> None:
    assert slug(name) == expected


def test_probing_torch_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    facts = device.probe_torch()
    assert (facts.version, facts.cuda_usable) == (None, False)
    assert facts.error
