"""Paged KV pool and request table. Page 0 and request row 0 are reserved: padded rows read and write there."""

from __future__ import annotations

import numpy as np
import torch

SINK_PAGE = 0
SINK_ROW = 0


class PagedKVCache:
    """Keys and values of all layers in one allocation of shape (layers, 2, pages, page size, kv heads, head size).

    ``tokens`` is the capacity for live requests; the sink page comes on top. A slot is ``page * page_size + offset``;
    slots 0 … page_size − 1 are the sink.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_size: int,
        page_size: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.pages = tokens // page_size + 1
        self.pool = torch.zeros((layers, 2, self.pages, page_size, kv_heads, head_size), dtype=dtype, device=device)
        self.keys = [self.pool[layer, 0] for layer in range(layers)]
        self.values = [self.pool[layer, 1] for layer in range(layers)]

    @property
    def bytes(self) -> int:
        return self.pool.numel() * self.pool.element_size()

    def fill_random(self, seed: int) -> None:
        """Give every slot a value of the size that real keys and values have, so that no kernel sees only zeros."""
        generator = torch.Generator(device=self.pool.device).manual_seed(seed)
        for layer in self.pool:
            layer.normal_(0.0, 1.0, generator=generator)

    def slots(self, values: torch.Tensor) -> torch.Tensor:
        """Contents of slots ``values`` (n,): (layers, 2, n, kv heads, head size), a copy."""
        flat = self.pool.flatten(2, 3)
        return flat.index_select(2, values.long())

    def write_slots(self, values: torch.Tensor, content: torch.Tensor | float) -> None:
        """Overwrite slots ``values`` (n,) in every layer."""
        flat = self.pool.flatten(2, 3)
        if isinstance(content, float):
            flat.index_fill_(2, values.long(), content)
        else:
            flat.index_copy_(2, values.long(), content)

    def page_checksums(self) -> torch.Tensor:
        """(pages,) int64: the wrapping sum of every page's bits over all layers; any one changed value changes it."""
        total = torch.zeros(self.pages, dtype=torch.int64, device=self.pool.device)
        for layer in self.pool.view(torch.int64):
            total += layer.flatten(2).sum(dim=(0, 2))
        return total


class RequestTable:
    """Request rows to pages, on the device and as a host twin, with a free list of pages.

    ``page_table`` is (rows, pages per request) int32 on the device; row 0 stays all sink pages. The host twin
    ``page_table_host`` holds the same numbers. Pages are handed out in a shuffled order, as in a server that has run
    for a while.
    """

    def __init__(self, *, cache: PagedKVCache, max_requests: int, max_context: int, seed: int = 0) -> None:
        self.page_size = cache.page_size
        self.max_requests = max_requests
        self.pages_per_request = -(-max_context // self.page_size)
        shape = (max_requests + 1, self.pages_per_request)
        self.page_table_host = np.zeros(shape, dtype=np.int32)
        self.page_table = torch.zeros(shape, dtype=torch.int32, device=cache.pool.device)
        free = np.arange(1, cache.pages, dtype=np.int32)
        np.random.default_rng(seed).shuffle(free)
        self._free: list[int] = free.tolist()
        self._held: dict[int, list[int]] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def admit(self, tokens: list[int]) -> np.ndarray:
        """Give one request row with room for ``tokens[i]`` tokens to each request; returns rows (n,) int32.

        Raises ValueError when rows or pages run out; nothing is taken then.
        """
        counts = [-(-n // self.page_size) for n in tokens]
        rows = [row for row in range(1, self.max_requests + 1) if row not in self._held][: len(tokens)]
        if len(rows) < len(tokens):
            raise ValueError(f"{len(tokens)} requests do not fit {self.max_requests - len(self._held)} free rows")
        if sum(counts) > len(self._free):
            raise ValueError(f"{sum(counts)} pages are needed and {len(self._free)} are free")
        if max(counts, default=0) > self.pages_per_request:
            raise ValueError(f"a request of {max(tokens)} tokens is longer than the table's context")
        for row, count in zip(rows, counts, strict=True):
            pages = [self._free.pop() for _ in range(count)]
            self._held[row] = pages
            self.page_table_host[row, :] = SINK_PAGE
            self.page_table_host[row, :count] = pages
        self._upload()
        return np.asarray(rows, dtype=np.int32)

    def release(self, rows: np.ndarray) -> None:
        """Return the rows' pages to the free list."""
        for row in rows.tolist():
            self._free.extend(self._held.pop(row))
            self.page_table_host[row, :] = SINK_PAGE
        self._upload()

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """KV slot of token ``positions[i]`` of request ``rows[i]``: (n,) int32."""
        pages = self.page_table_host[rows, positions // self.page_size]
        return (pages * self.page_size + positions % self.page_size).astype(np.int32)

    def _upload(self) -> None:
        self.page_table.copy_(torch.from_numpy(self.page_table_host))
