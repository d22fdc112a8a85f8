"""vLLM as an Engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from graphtune.engines.base import MIB, DeviceFacts, Dispatch, Edit, Engine, Flags, GraphPlan, MemoryRule, Serving
from graphtune.engines.launch import Launch
from graphtune.engines.resolution import Resolution
from graphtune.engines.vllm import edits, flags_out, lists, options, resolve
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

    def default_prefill_sizes(self, device: DeviceFacts, serving: Serving) -> tuple[int, ...]:
        """The one list, which serves batches that mix prefill and decode as well."""
        return lists.generate(device, serving)

    def decode_flags(self, sizes: tuple[int, ...], serving: Serving) -> Flags:
        return self.flags(GraphPlan(decode=sizes), serving)

    def flags(self, plan: GraphPlan, serving: Serving, device: DeviceFacts | None = None) -> Flags:
        return flags_out.write(self, plan, serving, device or DeviceFacts(None))

    def resolve(self, launch: Launch, device: DeviceFacts) -> Resolution:
        settings, reading = options.read(launch)
        return resolve.resolve(settings, reading, device)

    def edit(self, launch: Launch, edit: Edit) -> Launch | None:
        if edit.what == "sizes":
            return edits.with_sizes(launch, edit.sizes)
        if edit.what == "largest":
            return edits.with_largest(launch, edit.number)
        if edit.what == "limit":
            return edits.with_limit(launch, edit.number)
        if edit.what == "fraction":
            return edits.with_fraction(launch, edit.fraction)
        return edits.with_mode(launch, edit.text) if edit.what == "mode" else None

    def reserve_bytes(self, device: DeviceFacts, serving: Serving) -> int:
        """What utilization leaves. Graphs come on top: the engine measures them and takes them from the KV cache."""
        if device.nvml_total_mib is None:
            raise InputError("the memory of the device is not known", action="Name the card or its memory.")
        total = device.nvml_total_mib * MIB
        utilization = lists.DEFAULT_UTILIZATION if serving.mem_fraction is None else serving.mem_fraction
        return total - math.ceil(total * utilization)

    def memory_rule(self, device: DeviceFacts, serving: Serving) -> MemoryRule:
        utilization = lists.DEFAULT_UTILIZATION if serving.mem_fraction is None else serving.mem_fraction
        covers = frozenset({"context"})
        limits = lists.limits(device, serving)
        return MemoryRule(
            utilization,
            "total",
            covers,
            "--gpu-memory-utilization",
            own_fraction=utilization,
            own_covers=covers,
            chunk_tokens=limits.max_num_batched_tokens,
            rows=limits.max_num_seqs,
            bytes_setting="--kv-cache-memory-bytes",
        )


VLLM = VLLMEngine()
