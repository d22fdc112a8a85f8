"""Prefill batches: new tokens of several requests on one axis, and the static buffers that a recording reads.

A request has ``prefix`` tokens in the KV cache already and ``extend`` new ones in this batch; a prompt longer than a
batch may hold is prefilled in chunks, each with the tokens before it as its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from graphtune.worker.kv_cache import SINK_ROW, RequestTable

TOKEN_SLOTS = ("input_ids", "positions", "out_slots")
REQUEST_SLOTS = ("req_rows", "extend_lens", "extend_starts", "prefix_lens", "last_rows")


@dataclass(frozen=True)
class LivePrefill:
    """One prefill as a scheduler holds it.

    ``token_rows`` is (3, tokens) int32 on the device, requests one after another: ids, positions in the request and KV
    slots. On the request axis, (requests,) int32 on the host: rows of the request table, new tokens (at least 1) and
    cached tokens.
    """

    token_rows: torch.Tensor
    req_rows: torch.Tensor
    extend_lens: torch.Tensor
    prefix_lens: torch.Tensor

    @property
    def input_ids(self) -> torch.Tensor:
        return self.token_rows[0]

    @property
    def positions(self) -> torch.Tensor:
        return self.token_rows[1]

    @property
    def out_slots(self) -> torch.Tensor:
        return self.token_rows[2]

    @property
    def tokens(self) -> int:
        return self.token_rows.shape[1]

    @property
    def requests(self) -> int:
        return self.req_rows.shape[0]

    @property
    def longest(self) -> int:
        """Tokens of the longest request after this prefill."""
        return int((self.extend_lens + self.prefix_lens).max())


@dataclass(frozen=True)
class PrefillBatch:
    """Views of the static buffers for one padded size; the first ``raw_tokens`` tokens are real.

    The request axis holds the batch's requests; with ``request_slots`` it has that many, and requests without tokens
    follow that start behind the real tokens. ``last_rows`` is the place of each request's last token on the token axis,
    0 for one without tokens. ``host`` holds the request axis by name as CPU tensors.
    """

    raw_tokens: int
    padded_tokens: int
    requests: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_slots: torch.Tensor
    req_rows: torch.Tensor
    extend_lens: torch.Tensor
    extend_starts: torch.Tensor
    prefix_lens: torch.Tensor
    last_rows: torch.Tensor
    host: dict[str, torch.Tensor]
    request_slots: int | None = None


class PrefillBuffers:
    """Static buffers of ``max_tokens`` tokens and ``max_requests`` requests, made once.

    Every token row of a bucket is computed, padding included, so all token slots are zeroed behind the real tokens:
    token 0 at position 0, written to the sink. A fill costs a copy and a zeroing on the token axis and one copy of the
    whole request axis, from pinned memory where there is a GPU: the next fill waits until that copy is done.
    """

    def __init__(self, max_tokens: int, max_requests: int, device: torch.device) -> None:
        self.max_tokens = max_tokens
        self.max_requests = max_requests
        self._tokens = torch.zeros((len(TOKEN_SLOTS), max_tokens), dtype=torch.int32, device=device)
        self._requests = torch.zeros((len(REQUEST_SLOTS), max_requests), dtype=torch.int32, device=device)
        on_gpu = device.type == "cuda"
        self._host = torch.zeros((len(REQUEST_SLOTS), max_requests), dtype=torch.int32, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._host_arrays = dict(zip(REQUEST_SLOTS, self._host.numpy(), strict=True))
        self._token_views = _Views(TOKEN_SLOTS, self._tokens)
        self._request_views = _Views(REQUEST_SLOTS, self._requests)
        self._host_views = _Views(REQUEST_SLOTS, self._host)
        self.tensors: dict[str, torch.Tensor] = {
            **dict(zip(TOKEN_SLOTS, self._tokens, strict=True)),
            **dict(zip(REQUEST_SLOTS, self._requests, strict=True)),
        }

    @property
    def bytes(self) -> int:
        """Device bytes of all slots."""
        return self._tokens.nbytes + self._requests.nbytes

    def fill(self, live: LivePrefill, padded_tokens: int, request_slots: int | None = None) -> PrefillBatch:
        """Copy a prefill in, put the tails in order and return views of ``padded_tokens`` tokens.

        The request axis is as long as the batch, or ``request_slots`` long with requests of no tokens at its end.
        Raises ValueError when the batch does not fit; admission asks before.
        """
        raw, requests = live.tokens, live.requests
        slots = requests if request_slots is None else request_slots
        if not raw <= padded_tokens <= self.max_tokens or not requests <= slots <= self.max_requests:
            raise ValueError(
                f"{raw} tokens padded to {padded_tokens} and {requests} requests in {slots} slots do not fit buffers "
                f"of {self.max_tokens} tokens and {self.max_requests} requests"
            )
        self._tokens[:, :raw].copy_(live.token_rows)
        if raw < padded_tokens:
            self.clear_tail(raw, padded_tokens)
        if self._copied is not None:
            self._copied.synchronize()
        self._fill_requests(live, raw)
        self._requests.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return self.batch(raw, padded_tokens, requests, request_slots)

    def clear_tail(self, raw: int, padded_tokens: int) -> None:
        """Make the token rows from ``raw`` on padding."""
        self._tokens[:, raw:padded_tokens].zero_()

    def batch(
        self, raw_tokens: int, padded_tokens: int, requests: int, request_slots: int | None = None
    ) -> PrefillBatch:
        """Views of the buffers as they are."""
        slots = requests if request_slots is None else request_slots
        return PrefillBatch(
            raw_tokens,
            padded_tokens,
            requests,
            **self._token_views.of(padded_tokens),
            **self._request_views.of(slots),
            host=self._host_views.of(slots),
            request_slots=request_slots,
        )

    def reset(self) -> None:
        """Make every row padding."""
        for block in (self._tokens, self._requests, self._host):
            block.zero_()

    def _fill_requests(self, live: LivePrefill, raw: int) -> None:
        n, host = live.requests, self._host_arrays
        lengths = live.extend_lens.numpy()
        starts = np.cumsum(lengths) - lengths
        host["req_rows"][:n] = live.req_rows.numpy()
        host["extend_lens"][:n] = lengths
        host["extend_starts"][:n] = starts
        host["prefix_lens"][:n] = live.prefix_lens.numpy()
        host["last_rows"][:n] = starts + lengths - 1
        for name, padding in (("req_rows", SINK_ROW), ("extend_lens", 0), ("prefix_lens", 0), ("last_rows", 0)):
            host[name][n:] = padding
        # Requests without tokens begin where the real tokens end, so starts never descend.
        host["extend_starts"][n:] = raw


class _Views:
    """The first so many columns of a block's rows by name, kept by length: a dozen made at every step would be a large
    part of filling."""

    def __init__(self, names: tuple[str, ...], block: torch.Tensor) -> None:
        self._names = names
        self._block = block
        self._kept: dict[int, dict[str, torch.Tensor]] = {}

    def of(self, length: int) -> dict[str, torch.Tensor]:
        if length not in self._kept:
            self._kept[length] = {name: row[:length] for name, row in zip(self._names, self._block, strict=True)}
        return self._kept[length]


def live_prefill(
    table: RequestTable, *, rows: Sequence[int], prefix_lens: Sequence[int], input_ids: Sequence[np.ndarray]
) -> LivePrefill:
    """A prefill of ``input_ids[i]`` for request ``rows[i]``, whose first ``prefix_lens[i]`` tokens are cached."""
    lengths = np.asarray([len(ids) for ids in input_ids], dtype=np.int32)
    positions = np.concatenate(
        [np.arange(prefix, prefix + n, dtype=np.int32) for prefix, n in zip(prefix_lens, lengths, strict=True)]
    )
    slots = table.slots(np.repeat(np.asarray(rows, dtype=np.int32), lengths), positions)
    ids = np.concatenate(input_ids).astype(np.int32)
    on_device = torch.from_numpy(np.stack([ids, positions, slots])).to(table.page_table.device)
    return LivePrefill(
        token_rows=on_device,
        req_rows=torch.tensor(list(rows), dtype=torch.int32),
        extend_lens=torch.from_numpy(lengths),
        prefix_lens=torch.tensor(list(prefix_lens), dtype=torch.int32),
    )


def sink_prefill(tokens: int, longest: int, device: torch.device) -> LivePrefill:
    """A prefill that writes to the sink only: as few requests as hold ``tokens`` tokens at ``longest`` each."""
    lengths = [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
    count = len(lengths)
    token_rows = torch.zeros((len(TOKEN_SLOTS), tokens), dtype=torch.int32, device=device)
    token_rows[1] = torch.arange(tokens, dtype=torch.int32, device=device) % longest
    return LivePrefill(
        token_rows=token_rows,
        req_rows=torch.full((count,), SINK_ROW, dtype=torch.int32),
        extend_lens=torch.tensor(lengths, dtype=torch.int32),
        prefix_lens=torch.zeros(count, dtype=torch.int32),
    )


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start`` … ``stop`` − 1 of request ``request``'s prompt; those before ``start`` are cached by then."""

    request: int
    start: int
    stop: int


def chunked(
    prompt_lens: Sequence[int], *, cached_lens: Sequence[int], chunk_tokens: int, max_requests: int
) -> list[list[Chunk]]:
    """Prompts cut into batches of at most ``chunk_tokens`` tokens and ``max_requests`` requests, first come first.

    A prompt that does not fit what is left of a batch is split there. At least one token of every prompt must be new.
    """
    if chunk_tokens < 1 or max_requests < 1:
        raise ValueError(f"a chunk of {chunk_tokens} tokens and {max_requests} requests holds nothing")
    batches: list[list[Chunk]] = []
    room = 0
    for request, (length, cached) in enumerate(zip(prompt_lens, cached_lens, strict=True)):
        if not 0 <= cached < length:
            raise ValueError(f"request {request} has {cached} of {length} tokens cached; one at least must be new")
        start = cached
        while start < length:
            if room == 0 or len(batches[-1]) == max_requests:
                batches.append([])
                room = chunk_tokens
            stop = min(length, start + room)
            batches[-1].append(Chunk(request, start, stop))
            room -= stop - start
            start = stop
    return batches
