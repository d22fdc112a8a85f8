"""Memory reserves by the engines' own rules."""

from __future__ import annotations

import pytest

from graphtune.engines import ENGINES
from graphtune.engines.base import MIB, DeviceFacts, Serving
from graphtune.engines.sglang import memory
from graphtune.errors import InputError


@pytest.mark.parametrize(
    ("mib", "fraction"),
    [
        (16376, 0.752),
        (24564, 0.704),
        (32607, 0.777),
        (46068, 0.843),
        (81559, 0.830),
        (97871, 0.858),
        (143771, 0.903),
        (183359, 0.854),
    ],
)
def test_sglang_fraction_per_card(mib: int, fraction: float) -> None:
    assert memory.mem_fraction_static(DeviceFacts(mib), Serving()) == fraction


@pytest.mark.parametrize(
    ("mib", "serving", "fraction"),
    [
        (81559, Serving(tp=4), 0.819),
        (81559, Serving(tp=8), 0.812),
        (24564, Serving(tp=4), 0.679),
        (81559, Serving(role="prefill"), 0.836),
        (81559, Serving(role="decode"), 0.874),
    ],
)
def test_sglang_fraction_per_deployment(mib: int, serving: Serving, fraction: float) -> None:
    assert memory.mem_fraction_static(DeviceFacts(mib), serving) == fraction


def test_sglang_fraction_without_graphs_and_of_unknown_memory() -> None:
    device = DeviceFacts(81559)
    kept = memory.reserve_mib(device, Serving(), decode_graphs=False, prefill_graphs=False)
    assert memory.mem_fraction_static(device, Serving(), reserve=kept) == 0.841
    assert memory.mem_fraction_static(DeviceFacts(None), Serving()) == 0.95
    assert memory.mem_fraction_static(DeviceFacts(1024), Serving()) == 0.0


def test_sglang_reserve_depends_on_the_largest_decode_size_not_on_their_number() -> None:
    device = DeviceFacts(81559)
    assert memory.reserve_mib(device, Serving(), decode_max=256) == memory.reserve_mib(device, Serving())
    assert memory.reserve_mib(device, Serving(), decode_max=257) == memory.reserve_mib(device, Serving()) + 2


def test_sglang_reserve_of_special_deployments() -> None:
    device = DeviceFacts(81559)
    plain = memory.reserve_mib(device, Serving())
    assert memory.reserve_mib(device, Serving(), deepep=True) == plain + 1024 + 2048
    assert memory.reserve_mib(device, Serving(), xpu=True) == plain + 2048
    assert memory.reserve_mib(device, Serving(), mla=True) == plain - 8 * 58 + 1536
    assert memory.reserve_mib(device, Serving(), attention_dp=2) == plain + 3 * 256 * 2
    assert memory.reserve_mib(device, Serving(tp=4), attention_dp=2, decode_max=512) == (
        memory.reserve_mib(device, Serving(tp=4)) + 4.5 * 512 * 2
    )
    assert memory.post_capture_reserve_mib(Serving(tp=2)) == 1536 + 256
    assert memory.multimodal_factor(24, 1024) == 0.95
    assert memory.multimodal_factor(240, 1024) == pytest.approx(0.95 * 0.8)
    assert memory.multimodal_factor(1, 16) == pytest.approx(0.95 * 1.05)


@pytest.mark.parametrize("name", list(ENGINES))
def test_reserve_bytes_is_part_of_the_card(name: str) -> None:
    engine, device = ENGINES[name], DeviceFacts(81559)
    reserve = engine.reserve_bytes(device, Serving())
    assert 0 < reserve < 81559 * MIB
    assert engine.reserve_bytes(device, Serving(mem_fraction=0.5)) > reserve
    with pytest.raises(InputError, match="memory of the device"):
        engine.reserve_bytes(DeviceFacts(None), Serving())


def test_vllm_reserve_is_what_utilization_leaves() -> None:
    total = 81559 * MIB
    assert abs(ENGINES["vllm"].reserve_bytes(DeviceFacts(81559), Serving()) - total * 0.08) < 2
