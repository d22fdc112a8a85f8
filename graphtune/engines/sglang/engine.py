"""SGLang as an Engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphtune.engines.base import MIB, DeviceFacts, Dispatch, Edit, Engine, Flags, GraphPlan, MemoryRule, Serving
from graphtune.engines.launch import Launch
from graphtune.engines.resolution import Resolution
from graphtune.engines.sglang import edits, flags_out, lists, memory, options, resolve
from graphtune.engines.sglang.options import NO_PADDING
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
    padding_is_optional: ClassVar[bool] = True

    def default_decode_sizes(self, device: DeviceFacts, serving: Serving) -> tuple[int, ...]:
        speculative = serving.spec_tokens > 0
        largest = lists.decode_max(device, serving)
        if speculative and serving.max_running_requests is None:
            largest = min(largest, lists.SPECULATIVE_MAX_RUNNING)
        return lists.generate_decode(largest, padding=serving.padding is not False, speculative=speculative)

    def default_prefill_sizes(self, device: DeviceFacts, serving: Serving) -> tuple[int, ...]:
        return lists.generate_prefill(lists.chunked_prefill_size(device, serving))

    def decode_flags(self, sizes: tuple[int, ...], serving: Serving) -> Flags:
        return self.flags(GraphPlan(decode=sizes), serving)

    def flags(self, plan: GraphPlan, serving: Serving, device: DeviceFacts | None = None) -> Flags:
        return flags_out.write(self, plan, serving, device or DeviceFacts(None))

    def resolve(self, launch: Launch, device: DeviceFacts) -> Resolution:
        settings, reading = options.read(options.renamed(launch, self.version))
        return resolve.resolve(settings, reading, device)

    def edit(self, launch: Launch, edit: Edit) -> Launch | None:
        launch = options.renamed(launch, self.version)
        if edit.what == "sizes":
            return edits.with_sizes(launch, edit.phase, edit.sizes)
        if edit.what == "largest":
            return edits.with_largest(launch, edit.phase, edit.number)
        if edit.what == "limit":
            return edits.with_limit(launch, edit.number)
        if edit.what == "mode":
            return edits.with_backend(launch, edit.phase, edit.text)
        if edit.what == "fraction":
            return edits.with_fraction(launch, edit.fraction)
        bare = launch.without(NO_PADDING)
        return bare if edit.on else bare.with_option(NO_PADDING)

    def reserve_bytes(self, device: DeviceFacts, serving: Serving) -> int:
        if device.nvml_total_mib is None:
            raise InputError("the memory of the device is not known", action="Name the card or its memory.")
        fraction = memory.mem_fraction_static(device, serving)
        return round(device.nvml_total_mib * (1 - fraction) * MIB)

    def memory_rule(self, device: DeviceFacts, serving: Serving) -> MemoryRule:
        reserve = memory.reserve_mib(device, serving, decode_graphs=False)
        fraction = memory.mem_fraction_static(device, serving, reserve=reserve)
        covers = frozenset({"workspace", "static_buffers", "activation_peak"})
        chunk = lists.chunked_prefill_size(device, serving)
        return MemoryRule(
            fraction,
            "free_before_load",
            covers,
            "--mem-fraction-static",
            own_fraction=memory.mem_fraction_static(device, serving),
            own_covers=covers | {"graphs"},
            chunk_tokens=chunk if chunk > 0 else serving.max_batched_tokens or memory.MAX_PREFILL_TOKENS,
            rows=lists.decode_max(device, serving),
        )

    def request_pool(self, kv_tokens: int, serving: Serving) -> int:
        return memory.request_pool(kv_tokens, serving)


SGLANG = SGLang()
