"""vLLM's ``cudagraph_mode``: what is asked, and what runs given the attention's support, as tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from graphtune.engines.base import DeviceFacts

Mode = Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
Support = Literal["ALWAYS", "UNIFORM_BATCH", "UNIFORM_SINGLE_TOKEN_DECODE", "NEVER"]

MODES: tuple[Mode, ...] = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
SUPPORTS: tuple[Support, ...] = ("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS")
DEFAULT_MODE_OF_LEVEL: dict[int, Mode] = {0: "NONE", 1: "PIECEWISE", 2: "FULL_AND_PIECEWISE", 3: "FULL_AND_PIECEWISE"}
# (decode batches, mixed batches)
ROUTINES: dict[Mode, tuple[Mode, Mode]] = {
    "NONE": ("NONE", "NONE"),
    "PIECEWISE": ("PIECEWISE", "PIECEWISE"),
    "FULL": ("FULL", "FULL"),
    "FULL_DECODE_ONLY": ("FULL", "NONE"),
    "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE"),
}

BACKEND_SUPPORT: dict[str, Support] = {
    "TRITON_ATTN": "ALWAYS",
    "FLEX_ATTENTION": "ALWAYS",
    "ROCM_ATTN": "ALWAYS",
    "FLASHINFER_MLA": "ALWAYS",
    "FLASHMLA": "UNIFORM_BATCH",
    "FLASH_ATTN_MLA": "UNIFORM_BATCH",
    "TRITON_MLA": "UNIFORM_BATCH",
    "FLASHMLA_SPARSE": "UNIFORM_BATCH",
    "FLASHINFER_MLA_SPARSE": "UNIFORM_BATCH",
    "ROCM_AITER_FA": "UNIFORM_BATCH",
    "CUTLASS_MLA": "UNIFORM_SINGLE_TOKEN_DECODE",
}


@dataclass(frozen=True)
class Change:
    """One change of mode and why."""

    before: Mode
    after: Mode
    reason: str


@dataclass(frozen=True)
class Resolution:
    """What was asked, what runs, each change between, and the engine's refusal if it refuses."""

    asked: Mode
    runs: Mode
    changes: tuple[Change, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class SupportRow:
    """One row of the table: a request met by a support level. ``piecewise`` is the result when attention is compiled
    piecewise, ``whole`` when not; None keeps the request. ``speculative`` limits the row to more than one token."""

    asked: frozenset[Mode]
    support: frozenset[Support]
    piecewise: Mode | None
    whole: Mode | None
    speculative: bool | None = None
    error: bool = False


_DECODE_FULL: frozenset[Mode] = frozenset({"FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"})
_FULL: frozenset[Mode] = frozenset({"FULL"})

# The first row that matches counts; no match keeps the request.
SUPPORT_TABLE: tuple[SupportRow, ...] = (
    SupportRow(_FULL, frozenset({"NEVER"}), None, None, error=True),
    SupportRow(_FULL, frozenset({"UNIFORM_SINGLE_TOKEN_DECODE"}), "PIECEWISE", "NONE", speculative=True),
    SupportRow(
        _FULL, frozenset({"UNIFORM_BATCH", "UNIFORM_SINGLE_TOKEN_DECODE"}), "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"
    ),
    SupportRow(_DECODE_FULL, frozenset({"UNIFORM_SINGLE_TOKEN_DECODE"}), "PIECEWISE", "NONE", speculative=True),
    SupportRow(_DECODE_FULL, frozenset({"NEVER"}), "PIECEWISE", "NONE"),
)


def resolve_by_support(asked: Mode, support: Support, *, piecewise: bool, width: int) -> Resolution:
    """The mode that runs under the weakest attention support of the model.

    ``piecewise``: the attention is compiled piecewise (compile mode 3 with splitting ops); ``width``: tokens of one
    decode request.
    """
    for row in SUPPORT_TABLE:
        if asked not in row.asked or support not in row.support or (row.speculative and width == 1):
            continue
        if row.error:
            return Resolution(asked, asked, (), f"{asked} is refused: the attention backend supports no full graphs")
        runs = row.piecewise if piecewise else row.whole
        if runs is None or runs == asked:
            break
        tokens = f" and a decode request has {width} tokens" if width > 1 else ""
        mixed = " for batches that mix prefill and decode" if asked == "FULL" else ""
        better = "ALWAYS" if asked == "FULL" and runs != "PIECEWISE" else "UNIFORM_BATCH"
        reason = f"attention supports full graphs only at {support}{mixed}{tokens}"
        reason += f"; an attention backend that declares {better} keeps it"
        return Resolution(asked, runs, (Change(asked, runs, reason),))
    return Resolution(asked, asked)


@dataclass(frozen=True)
class Facts:
    """The parts of a launch that force a mode."""

    enforce_eager: bool = False
    compile_mode: int = 3
    breakable: bool = False
    empty_splitting_ops: bool = False
    pooling: bool = False
    encoder_decoder: bool = False
    dynamic_speculation_v1: bool = False
    deepep_high_throughput_dp: bool = False
    connector_needs_piecewise: bool = False
    support: Support | None = None
    width: int = 1

    @property
    def attention_piecewise(self) -> bool:
        return (self.compile_mode == 3 and not self.empty_splitting_ops) or self.breakable


@dataclass(frozen=True)
class ForcedRow:
    """A forced change: where the fact holds, each listed mode becomes another."""

    fact: str
    to: dict[Mode, Mode]
    reason: str


_NO_PIECEWISE: dict[Mode, Mode] = {"PIECEWISE": "NONE", "FULL_AND_PIECEWISE": "FULL_DECODE_ONLY"}
_ALL_NONE: dict[Mode, Mode] = {mode: "NONE" for mode in MODES if mode != "NONE"}
_FULL_TO_PIECEWISE: dict[Mode, Mode] = {mode: "PIECEWISE" for mode in MODES if mode.startswith("FULL")}

FORCED: tuple[ForcedRow, ...] = (
    ForcedRow("enforce_eager", _ALL_NONE, "--enforce-eager"),
    ForcedRow("no_compile", _NO_PIECEWISE, "piecewise graphs need compile mode 3 (VLLM_COMPILE) or breakable graphs"),
    ForcedRow(
        "empty_splitting_ops",
        {"PIECEWISE": "NONE", "FULL_AND_PIECEWISE": "FULL"},
        "splitting_ops is empty, so that nothing is cut",
    ),
    ForcedRow("pooling", _FULL_TO_PIECEWISE, "a pooling model"),
    ForcedRow(
        "encoder_decoder",
        {mode: "FULL_DECODE_ONLY" for mode in MODES if mode not in ("NONE", "FULL_DECODE_ONLY")},
        "an encoder-decoder model",
    ),
    ForcedRow("connector_needs_piecewise", _FULL_TO_PIECEWISE, "the KV connector needs piecewise graphs"),
    ForcedRow("deepep_high_throughput_dp", _ALL_NONE, "DeepEP high throughput with data parallelism"),
    ForcedRow("dynamic_speculation_v1", _FULL_TO_PIECEWISE, "dynamic speculation on runner V1"),
)


def resolve(asked: Mode, facts: Facts) -> Resolution:
    """The mode that runs: forced changes first, then the attention's support (when it is known)."""
    mode, changes = asked, []
    for row in FORCED:
        if row.fact == "no_compile":
            holds = facts.compile_mode != 3 and not facts.breakable
        else:
            holds = bool(getattr(facts, row.fact))
        if holds and mode in row.to and row.to[mode] != mode:
            changes.append(Change(mode, row.to[mode], row.reason))
            mode = row.to[mode]
    if facts.support is None:
        return Resolution(asked, mode, tuple(changes))
    last = resolve_by_support(mode, facts.support, piecewise=facts.attention_piecewise, width=facts.width)
    return Resolution(asked, last.runs, (*changes, *last.changes), last.error)


def support_of(backend: str | None, device: DeviceFacts, flash_attention: int | None = None) -> Support | None:
    """The graph support that an attention backend declares; None when it is not known from the launch alone.

    FlashAttention depends on its version, FlashInfer on its kernels: those that take several tokens per request are
    for compute capability 10.x, and where that is not known the weaker level is returned, since it decides safely.
    """
    if backend is None:
        return None
    name = backend.upper().removesuffix("_VLLM_V1")
    if name in ("FLASH_ATTN", "FLASHATTENTION"):
        if flash_attention is not None:
            return "UNIFORM_BATCH" if flash_attention == 2 else "ALWAYS"
        if device.compute_capability is None:
            return None
        return "ALWAYS" if device.compute_capability[0] in (9, 10) else "UNIFORM_BATCH"
    if name == "FLASHINFER":
        capability = device.compute_capability
        return "UNIFORM_BATCH" if capability and capability[0] == 10 else "UNIFORM_SINGLE_TOKEN_DECODE"
    return BACKEND_SUPPORT.get(name)
