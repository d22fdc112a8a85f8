"""TensorRT-LLM as an Engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphtune.engines.base import (
    MIB,
    DeviceFacts,
    Dispatch,
    Edit,
    Engine,
    Flags,
    GraphPlan,
    MemoryRule,
    Serving,
    version_tuple,
)
from graphtune.engines.launch import Launch
from graphtune.engines.resolution import Resolution
from graphtune.engines.tensorrt_llm import edits, flags_out, lists, options, resolve, rules
from graphtune.errors import InputError

DEFAULT_FREE_FRACTION = 0.9


DISPATCH = Dispatch(
    decode="always",
    prefill="always",
    decode_unit="requests",
    prefill_unit="tokens",
    one_list=False,
    decode_by_default="exact",
)


@dataclass(frozen=True)
class TensorRTLLM(Engine):
    """Decode lists in requests. The dispatch stated is that of ``enable_padding: true``, which graphtune writes; the
    engine's own default is exact sizes only."""

    version: str = "1.3"
    name: str = "tensorrt_llm"
    dispatch: Dispatch = DISPATCH
    padding_is_optional: ClassVar[bool] = True

    @property
    def older(self) -> bool:
        """True for releases up to 1.2: powers of two above 128, no prefill keys."""
        return version_tuple(self.version)[:2] < (1, 3)

    def default_decode_sizes(self, device: DeviceFacts, serving: Serving) -> tuple[int, ...]:
        padding = bool(serving.padding)
        listed = rules.configured_decode(None, None, padding=padding, powers_above_128=self.older)
        return rules.effective_decode(listed, serving, padding=padding).sizes

    def default_prefill_sizes(self, device: DeviceFacts, serving: Serving) -> tuple[int, ...]:
        """Empty: prefill graphs are off unless asked for (``tensorrt_llm.lists`` has the list they then get)."""
        return ()

    def decode_flags(self, sizes: tuple[int, ...], serving: Serving) -> Flags:
        return self.flags(GraphPlan(decode=sizes), serving)

    def flags(self, plan: GraphPlan, serving: Serving, device: DeviceFacts | None = None) -> Flags:
        return flags_out.write(self, plan, serving, self.older)

    def resolve(self, launch: Launch, device: DeviceFacts) -> Resolution:
        settings, reading = options.read(launch, older=self.older)
        return resolve.resolve(settings, reading, older=self.older)

    def edit(self, launch: Launch, edit: Edit) -> Launch | None:
        if edit.what == "sizes":
            return edits.with_sizes(launch, edit.phase, edit.sizes)
        if edit.what == "largest":
            return edits.with_largest(launch, edit.number) if edit.phase == "decode" else None
        if edit.what == "limit":
            return edits.with_limit(launch, edit.number)
        if edit.what == "fraction":
            return edits.with_fraction(launch, edit.fraction)
        return edits.with_padding(launch, edit.on) if edit.what == "padding" else None

    def reserve_bytes(self, device: DeviceFacts, serving: Serving) -> int:
        """What the free-memory fraction leaves, with the whole device taken as free: an upper bound, since the
        engine applies the fraction after loading weights."""
        if device.nvml_total_mib is None:
            raise InputError("the memory of the device is not known", action="Name the card or its memory.")
        fraction = DEFAULT_FREE_FRACTION if serving.mem_fraction is None else serving.mem_fraction
        return round(device.nvml_total_mib * MIB * (1 - fraction))

    def memory_rule(self, device: DeviceFacts, serving: Serving) -> MemoryRule:
        fraction = DEFAULT_FREE_FRACTION if serving.mem_fraction is None else serving.mem_fraction
        covers = frozenset({"activation_peak", "graphs"})
        return MemoryRule(
            fraction,
            "free_after_load",
            covers,
            "kv_cache_config.free_gpu_memory_fraction",
            own_fraction=fraction,
            own_covers=covers,
            chunk_tokens=serving.max_batched_tokens or lists.DEFAULT_MAX_NUM_TOKENS,
            rows=serving.max_running_requests or lists.DEFAULT_MAX_BATCH_SIZE,
        )


TENSORRT_LLM = TensorRTLLM()
