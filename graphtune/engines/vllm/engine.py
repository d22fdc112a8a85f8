"""vLLM as an Engine."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from graphtune.engines.base import MIB, DeviceFacts, Dispatch, Engine, Flags, MemoryRule, Serving
from graphtune.engines.vllm import lists
from graphtune.errors import InputError

DISPATCH = Dispatch(decode="always", prefill="always", decode_unit="tokens", prefill_unit="tokens", one_list=True)


@dataclass(frozen=True)
class VLLMEngine(Engine):
    """One list in tokens serves decode and prefill; padding has no cap."""

    version: str = "0.33"
    name: str = "vllm"
    dispatch: Dispatch = DISPATCH

    def default_decode_sizes(self, device: DeviceFacts, serving: Serving) -> tuple[int, ...]:
        return lists.generate(device, serving)

    def decode_flags(self, sizes: tuple[int, ...], serving: Serving) -> Flags:
        settings: dict[str, object] = {"cudagraph_mode": "NONE"}
        if sizes:
            settings = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": sorted(set(sizes))}
        args = ["--compilation-config", json.dumps(settings, separators=(",", ":"))]
        if serving.max_running_requests is not None:
            args += ["--max-num-seqs", str(serving.max_running_requests)]
        return Flags(args=tuple(args))

    def reserve_bytes(self, device: DeviceFacts, serving: Serving) -> int:
        """What utilization leaves. Graphs come on top: the engine measures them and takes them from the KV cache."""
        if device.nvml_total_mib is None:
            raise InputError("the memory of the device is not known", action="Name the card or its memory.")
        total = device.nvml_total_mib * MIB
        utilization = lists.DEFAULT_UTILIZATION if serving.mem_fraction is None else serving.mem_fraction
        return total - math.ceil(total * utilization)

    def memory_rule(self, device: DeviceFacts, serving: Serving) -> MemoryRule:
        utilization = lists.DEFAULT_UTILIZATION if serving.mem_fraction is None else serving.mem_fraction
        return MemoryRule(utilization, "total", frozenset({"context"}), "--gpu-memory-utilization")

    def memory_flags(self, fraction: float) -> Flags:
        return Flags(args=("--gpu-memory-utilization", f"{fraction:g}"))


VLLM = VLLMEngine()
