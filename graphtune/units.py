"""Bytes, durations and card sizes as people write them.

Binary units are powers of 1024 (``GiB``), decimal ones powers of 1000 (``GB``). A size without a unit is refused,
except for ``--gpu-mem``, where it is the size printed on a card's box.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from graphtune.errors import InputError
from graphtune.results import Environment

KIB = 1024
MIB = 1024**2
GIB = 1024**3

UNIT_BYTES = {
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024**4,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
}
UNIT_SECONDS = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "min": Fraction(60), "h": Fraction(3600)}

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(text: str, *, where: str | None = None) -> int:
    """Whole bytes of ``1GiB``, ``512 MiB``, ``80GB`` or ``4096B``, rounded down. The unit must be written.

    Raises InputError, located at ``where``, for anything else; ``80G`` is refused because engines read it both ways.
    """
    number, unit = _quantity(text, "a size in bytes", where)
    if unit.lower() not in UNIT_BYTES:
        problem = (
            f"{text!r} has no unit" if not unit else f"{text!r} has a unit that can be read two ways or not at all"
        )
        raise InputError(problem, where=where, action="Write for example 512MiB, 1GiB or 80GB.")
    return int(number * UNIT_BYTES[unit.lower()])


def parse_duration_s(text: str, *, where: str | None = None) -> float:
    """Seconds of ``20s``, ``500ms``, ``10m``, ``10min`` or ``1.5h``. The unit must be written."""
    number, unit = _quantity(text, "a duration", where)
    if unit.lower() not in UNIT_SECONDS:
        raise InputError(f"{text!r} is not a duration", where=where, action="Write for example 20s, 500ms or 10m.")
    return float(number * UNIT_SECONDS[unit.lower()])


def _quantity(
    text: str, noun: str, where: str | None, action: str = "Write a number that is not negative and a unit."
) -> tuple[Fraction, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is not {noun}", where=where, action=action)
    return Fraction(match[1]), match[2]


def format_bytes(count: int) -> str:
    """``126 MiB``, ``14.96 GiB``: three to four figures, always binary units."""
    sign = "-" if count < 0 else ""
    size = abs(count)
    if size < KIB:
        return f"{sign}{size} B"
    for unit, name in ((KIB, "KiB"), (MIB, "MiB")):
        if round(size / unit) < 1024:
            return f"{sign}{size / unit:.{1 if size < 10 * unit else 0}f} {name}"
    return f"{sign}{size / GIB:,.2f} GiB"


def format_duration_s(seconds: float) -> str:
    """``0.4 ms``, ``35 ms``, ``1.02 s``, ``2 min 05 s``, ``1 h 02 min``."""
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.{2 if seconds < 9.995 else 1}f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_us(us: float) -> str:
    """A step time: ``870 µs`` below a millisecond, then ``4.77 ms``."""
    if abs(us) < 999.5:
        return f"{us:.{1 if abs(us) < 10 else 0}f} µs"
    return f"{us / 1000:,.{2 if abs(us) < 99_995 else 1}f} ms"


@dataclass(frozen=True)
class GpuMemory:
    """Memory of the card that an answer is for.

    ``nvml_total_bytes`` is what nvidia-smi shows: engines choose their defaults by it. ``cuda_total_bytes`` is what a
    process can have: every budget starts from it; ``cuda_total_assumed`` when no process of that card measured it.
    ``rule`` says in words how both came about. ``compute_capability`` is that of the card named, if one is.
    """

    nvml_total_bytes: int
    cuda_total_bytes: int
    cuda_total_assumed: bool
    rule: str
    card: str | None
    compute_capability: tuple[int, int] | None = None

    @property
    def nvml_total_mib(self) -> int:
        return self.nvml_total_bytes // MIB


@dataclass(frozen=True)
class Card:
    """A card that has a size on its box: what nvidia-smi reports for it, and its generation."""

    nvml_total_mib: int
    name: str
    compute_capability: tuple[int, int]


NOMINAL_CARDS: dict[int, Card] = {
    16: Card(16376, "GeForce RTX 4080", (8, 9)),
    24: Card(24564, "GeForce RTX 4090", (8, 9)),
    32: Card(32607, "GeForce RTX 5090", (12, 0)),
    48: Card(46068, "L40S", (8, 9)),
    80: Card(81559, "H100 80GB", (9, 0)),
    96: Card(97871, "H20", (9, 0)),
    141: Card(143771, "H200", (9, 0)),
    180: Card(183359, "B200", (10, 0)),
    192: Card(183359, "B200", (10, 0)),
}
"""By size on the box in GB."""

ASSUMED_OVERHEAD_BYTES = 600 * MIB
LARGEST_BARE_GIB = 1024


def parse_gpu_memory(text: str, swept: Environment | None = None) -> GpuMemory:
    """Read ``--gpu-mem``: a card's nominal size (``80``), another bare number in GiB, or a size with its unit.

    The total that a process can have is taken from ``swept`` when the sweep ran on a card of that size, else it is
    assumed to be 600 MiB less than nvidia-smi's. Raises InputError for text, zero, and sizes no card has.
    """
    where = "--gpu-mem"
    number, unit = _quantity(
        text, "a memory size", where, "Write the size on the card's box, for example 80, or 80GiB, or 81559MiB."
    )
    card = None
    if unit:
        nvml_bytes = parse_bytes(text, where=where)
        rule = f"{text.strip()} taken as written"
    elif number in NOMINAL_CARDS:
        card = NOMINAL_CARDS[int(number)]
        nvml_bytes = card.nvml_total_mib * MIB
        shown = f"for which nvidia-smi shows {card.nvml_total_mib} MiB"
        rule = f"{text.strip()} is the size on the box of the {card.name}, {shown}"
    elif number > LARGEST_BARE_GIB:
        raise InputError(
            f"{text.strip()} without a unit means GiB, more than any card has",
            where=where,
            action=f"Write {text.strip()}MiB if that is meant.",
        )
    else:
        nvml_bytes = int(number * GIB)
        rule = f"{text.strip()} is no card's nominal size, so it is read as GiB"
    if nvml_bytes <= ASSUMED_OVERHEAD_BYTES:
        raise InputError(f"{text.strip()} is too small for any model", where=where, action="Write for example 80.")
    return _with_cuda_total(nvml_bytes, rule, card, swept)


def swept_gpu_memory(swept: Environment) -> GpuMemory | None:
    """Memory of the card that was swept; None where the sweep does not know it (a CPU)."""
    if swept.nvml_total_bytes is None:
        return None
    return _with_cuda_total(swept.nvml_total_bytes, "the card that was swept", None, swept)


def _with_cuda_total(nvml_bytes: int, rule: str, card: Card | None, swept: Environment | None) -> GpuMemory:
    same_card = (
        swept is not None
        and swept.nvml_total_bytes is not None
        and abs(swept.nvml_total_bytes - nvml_bytes) < MIB
        and swept.cuda_total_bytes is not None
    )
    if same_card:
        assert swept is not None and swept.cuda_total_bytes is not None
        cuda_bytes = swept.cuda_total_bytes
        rule += f"; a process can have {format_bytes(cuda_bytes)}, measured on {swept.device_name}"
        capability = _capability(swept.compute_capability)
        return GpuMemory(nvml_bytes, cuda_bytes, False, rule, swept.device_name, capability)
    cuda_bytes = nvml_bytes - ASSUMED_OVERHEAD_BYTES
    rule += f"; a process is assumed to have {format_bytes(cuda_bytes)}, 600 MiB less"
    if card is None:
        return GpuMemory(nvml_bytes, cuda_bytes, True, rule, None)
    return GpuMemory(nvml_bytes, cuda_bytes, True, rule, card.name, card.compute_capability)


def _capability(text: str | None) -> tuple[int, int] | None:
    major, dot, minor = (text or "").partition(".")
    return (int(major), int(minor)) if dot and major.isdigit() and minor.isdigit() else None
