"""SGLang's own capture lists and the device tiers that size them. Decode in requests, prefill in tokens."""

from __future__ import annotations

from dataclasses import dataclass

from graphtune.engines.base import DeviceFacts, Serving
from graphtune.engines.grids import ascending, steps

# A speculative server takes this many running requests when the user names none.
SPECULATIVE_MAX_RUNNING = 48


@dataclass(frozen=True)
class Tier:
    """Defaults of one device memory tier; ``below_mib`` is exclusive."""

    below_mib: float
    chunked_prefill_size: int
    decode_max: int
    decode_max_tp4: int


# The 35 to 60 GiB tier has a smaller decode maximum than the one below it: so it is in the engine.
TIERS = (
    Tier(20480, 2048, 8, 8),
    Tier(35840, 4096, 48, 160),
    Tier(61440, 4096, 32, 160),
    Tier(92160, 8192, 256, 512),
    Tier(163840, 8192, 256, 512),
    Tier(float("inf"), 16384, 512, 512),
)
UNKNOWN_DEVICE = Tier(0, 4096, 160, 160)


def tier(device: DeviceFacts) -> Tier:
    """The memory tier of a device; unknown memory has defaults of its own."""
    if device.nvml_total_mib is None:
        return UNKNOWN_DEVICE
    return next(t for t in TIERS if device.nvml_total_mib < t.below_mib)


def decode_max(device: DeviceFacts, serving: Serving) -> int:
    """The default largest decode size, in requests: by memory and TP, lowered to max_running_requests."""
    of_tier = tier(device)
    largest = of_tier.decode_max_tp4 if serving.tp >= 4 else of_tier.decode_max
    if serving.max_running_requests is not None:
        largest = min(largest, serving.max_running_requests)
    return largest


def chunked_prefill_size(device: DeviceFacts, serving: Serving) -> int:
    """The chunk of prefill tokens; -1 means that prompts are not cut."""
    if serving.chunked_prefill_size is not None:
        return serving.chunked_prefill_size
    return tier(device).chunked_prefill_size


def generate_decode(largest: int, *, padding: bool = True, speculative: bool = False) -> tuple[int, ...]:
    """The decode list up to ``largest``, which is appended when the grid misses it."""
    if not padding:
        return tuple(steps(1, largest, 1))
    if speculative:
        grid = ascending(steps(1, 8, 1), steps(10, 32, 2), steps(40, 64, 4), steps(72, 256, 8), steps(272, largest, 16))
    else:
        grid = ascending((1, 2, 4, 8, 12), steps(16, 256, 8), steps(272, 496, 16), steps(512, largest, 32))
    return ascending((size for size in grid if size <= largest), (largest,))


def generate_prefill(largest: int) -> tuple[int, ...]:
    """The prefill list up to ``largest`` tokens, which is *not* appended: 3000 ends at 2816."""
    grid = ascending(
        steps(4, 32, 4),
        steps(48, 256, 16),
        steps(288, 512, 32),
        steps(576, 1024, 64),
        steps(1280, 4096, 256),
        steps(4608, largest, 512),
    )
    return tuple(size for size in grid if size <= largest)


def generate_cpu(largest: int, *, padding: bool = True) -> tuple[int, ...]:
    """The list of a CPU server, whose "graphs" are compiled forwards, up to ``torch_compile_max_bs``."""
    if not padding:
        return tuple(steps(1, largest, 1))
    grid = ascending(steps(1, 16, 1), steps(18, 30, 2), steps(32, 80, 4), steps(84, largest, 8))
    return ascending((size for size in grid if size <= largest), (largest,))


def compile_sizes(sizes: tuple[int, ...], torch_compile_max_bs: int = 32) -> tuple[int, ...]:
    """The decode sizes that ``--enable-torch-compile`` compiles before they are captured."""
    return tuple(size for size in sizes if size <= torch_compile_max_bs)


def verify_tiers(sizes: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Token counts of ragged verification: each decode size times the rows of a request."""
    return tuple(size * width for size in sizes)
