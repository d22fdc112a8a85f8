"""TensorRT-LLM as an Engine."""

from __future__ import annotations

from dataclasses import dataclass

from graphtune.engines.base import MIB, DeviceFacts, Dispatch, Engine, Flags, MemoryRule, Serving
from graphtune.engines.tensorrt_llm import lists
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

    @property
    def older(self) -> bool:
        """True for releases up to 1.2: powers of two above 128, no prefill keys."""
        major, minor = (int(part) for part in self.version.split(".")[:2])
        return (major, minor) < (1, 3)

    def default_decode_sizes(self, device: DeviceFacts, serving: Serving) -> tuple[int, ...]:
        padding = bool(serving.padding)
        sizes = lists.generate_decode(lists.DEFAULT_GRAPH_MAX, padding=padding, powers_above_128=self.older)
        return lists.fit_to_cap(sizes, lists.decode_cap(serving), padding=padding)

    def decode_flags(self, sizes: tuple[int, ...], serving: Serving) -> Flags:
        text = ["cuda_graph_config: null"]
        if sizes:
            listed = ", ".join(str(size) for size in sorted(set(sizes)))
            text = ["cuda_graph_config:", "  enable_padding: true", f"  batch_sizes: [{listed}]"]
        if serving.max_running_requests is not None:
            text.append(f"max_batch_size: {serving.max_running_requests}")
        return Flags(yaml="\n".join(text) + "\n")

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
        return MemoryRule(fraction, "free_after_load", covers, "kv_cache_config.free_gpu_memory_fraction")

    def memory_flags(self, fraction: float) -> Flags:
        return Flags(yaml=f"kv_cache_config:\n  free_gpu_memory_fraction: {fraction:g}\n")


TENSORRT_LLM = TensorRTLLM()
