"""SGLang as an Engine."""

from __future__ import annotations

import json
from dataclasses import dataclass

from graphtune.engines.base import MIB, DeviceFacts, Dispatch, Engine, Flags, MemoryRule, Serving
from graphtune.engines.sglang import lists, memory
from graphtune.errors import InputError

DISPATCH = Dispatch(
    decode="always",
    prefill="capped",
    decode_unit="requests",
    prefill_unit="tokens",
    one_list=False,
    prefill_cap_factor=2.0,
)


@dataclass(frozen=True)
class SGLang(Engine):
    """Decode lists in requests; prefill lists in tokens, refused when padding would more than double the work."""

    version: str = "0.5.23"
    name: str = "sglang"
    dispatch: Dispatch = DISPATCH

    def default_decode_sizes(self, device: DeviceFacts, serving: Serving) -> tuple[int, ...]:
        speculative = serving.spec_tokens > 0
        largest = lists.decode_max(device, serving)
        if speculative and serving.max_running_requests is None:
            largest = min(largest, lists.SPECULATIVE_MAX_RUNNING)
        return lists.generate_decode(largest, padding=serving.padding is not False, speculative=speculative)

    def decode_flags(self, sizes: tuple[int, ...], serving: Serving) -> Flags:
        decode: dict[str, object] = {"bs": sorted(set(sizes))} if sizes else {"backend": "disabled"}
        args = ["--cuda-graph-config", json.dumps({"decode": decode}, separators=(",", ":"))]
        if serving.max_running_requests is not None:
            args += ["--max-running-requests", str(serving.max_running_requests)]
        return Flags(args=tuple(args))

    def reserve_bytes(self, device: DeviceFacts, serving: Serving) -> int:
        if device.nvml_total_mib is None:
            raise InputError("the memory of the device is not known", action="Name the card or its memory.")
        fraction = memory.mem_fraction_static(device, serving)
        return round(device.nvml_total_mib * (1 - fraction) * MIB)

    def memory_rule(self, device: DeviceFacts, serving: Serving) -> MemoryRule:
        reserve = memory.reserve_mib(device, serving, decode_graphs=False)
        fraction = memory.mem_fraction_static(device, serving, reserve=reserve)
        covers = frozenset({"workspace", "static_buffers", "activation_peak"})
        return MemoryRule(fraction, "free_before_load", covers, "--mem-fraction-static")

    def memory_flags(self, fraction: float) -> Flags:
        return Flags(args=("--mem-fraction-static", f"{fraction:g}"))


SGLANG = SGLang()
