"""Whether a batch may be replayed. Every refusal has a name; the caller counts them.

There is one predicate per phase. The runner uses it, and a scheduler can ask it before the batch exists: it needs
nothing but numbers on the host. Where several ranks must take the same path, each votes with its own answer, the votes
are reduced to their minimum, and ``others_admit`` carries the outcome back into the predicate.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from enum import StrEnum

WASTE_CAP = 2.0
"""Padded tokens per token up to which a prefill is replayed unless told otherwise; engines use the same factor."""


class Refusal(StrEnum):
    """Why a batch runs eager."""

    ABOVE_TOP = "above_top"
    NO_EXACT_SIZE = "no_exact_size"
    CONTEXT_TOO_LONG = "context_too_long"
    CONTEXT_UNKNOWN = "context_unknown"
    TOO_MUCH_PADDING = "too_much_padding"
    TOO_MANY_REQUESTS = "too_many_requests"
    WIDTH_MISMATCH = "width_mismatch"
    MIXED_BATCH = "mixed_batch"
    OTHER_RANK = "other_rank"


NOT_APPLICABLE = {
    "multimodal_input": "models have no image or audio encoder",
    "lora": "there are no adapters",
    "input_embeddings": "the forward takes token ids only",
    "replaced_embeddings": "the forward takes token ids only",
    "prompt_logprobs": "a prefill returns the logits of each request's last token only",
    "hidden_states": "hidden states are not returned to requests",
    "encoder_lengths": "there are no encoder-decoder models",
    "two_batch_overlap": "a step is one batch",
    "context_parallel": "a sequence lies on one rank",
    "layer_wise_kv_transfer": "KV comes from no other server",
}
"""Reasons for which engines refuse a graph and that cannot occur here, each with what the program lacks."""


@dataclass(frozen=True)
class Admission:
    """The bucket to replay, or the reason not to."""

    padded_size: int | None
    refusal: Refusal | None

    @property
    def reason(self) -> str:
        return self.refusal.value if self.refusal else "graph"


def admit_decode(
    requests: int,
    longest: int | None,
    *,
    sizes: tuple[int, ...],
    max_context: int,
    padding: bool = True,
    width: int = 1,
    captured_width: int = 1,
    others_admit: bool = True,
) -> Admission:
    """Admission of ``requests`` requests whose longest has ``longest`` tokens, for captured ``sizes`` (ascending).

    The smallest captured size that holds the batch is chosen; without ``padding`` only an equal one. ``width`` is the
    number of tokens per request of this step, which a graph has built in.
    """
    if width != captured_width:
        return Admission(None, Refusal.WIDTH_MISMATCH)
    if longest is None:
        return Admission(None, Refusal.CONTEXT_UNKNOWN)
    if longest > max_context:
        return Admission(None, Refusal.CONTEXT_TOO_LONG)
    admission = _bucket(requests, sizes, padding)
    return admission if others_admit or admission.refusal else Admission(None, Refusal.OTHER_RANK)


@dataclass(frozen=True)
class PrefillShape:
    """What admission must know of a prefill: new tokens of all requests, requests, and the longest one's total tokens.

    ``longest`` is None when a scheduler cannot tell yet. ``decode_requests`` are those of a mixed batch that have one
    new token and are past their prompt. ``width`` is above 1 when the new tokens are drafts to verify.
    """

    tokens: int
    requests: int
    longest: int | None
    decode_requests: int = 0
    width: int = 1


@dataclass(frozen=True)
class PrefillLimits:
    """What was captured (``sizes`` in tokens, ascending) and what the static buffers hold.

    ``waste_cap``: padded tokens per token above which eager is taken to be faster; None for no cap. ``mixed``: whether
    batches with decode requests in them are replayed.
    """

    sizes: tuple[int, ...]
    max_requests: int
    max_context: int
    waste_cap: float | None = WASTE_CAP
    padding: bool = True
    mixed: bool = False


def admit_prefill(shape: PrefillShape, limits: PrefillLimits, *, others_admit: bool = True) -> Admission:
    """Admission of a prefill. A rank's own reason comes before that of the others."""
    if shape.width != 1:
        return Admission(None, Refusal.WIDTH_MISMATCH)
    if shape.decode_requests and not limits.mixed:
        return Admission(None, Refusal.MIXED_BATCH)
    if shape.requests > limits.max_requests:
        return Admission(None, Refusal.TOO_MANY_REQUESTS)
    if shape.longest is None:
        return Admission(None, Refusal.CONTEXT_UNKNOWN)
    if shape.longest > limits.max_context:
        return Admission(None, Refusal.CONTEXT_TOO_LONG)
    admission = _bucket(shape.tokens, limits.sizes, limits.padding)
    if admission.padded_size is None:
        return admission
    if limits.waste_cap is not None and admission.padded_size > limits.waste_cap * shape.tokens:
        return Admission(None, Refusal.TOO_MUCH_PADDING)
    return admission if others_admit else Admission(None, Refusal.OTHER_RANK)


def _bucket(raw_size: int, sizes: tuple[int, ...], padding: bool) -> Admission:
    at = bisect.bisect_left(sizes, raw_size)
    if at == len(sizes):
        return Admission(None, Refusal.ABOVE_TOP)
    if not padding and sizes[at] != raw_size:
        return Admission(None, Refusal.NO_EXACT_SIZE)
    return Admission(sizes[at], None)
