"""Non-owning tensors: the address, shape and strides of another tensor without keeping its memory from reuse."""

from __future__ import annotations

import torch


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same device memory that holds no reference to it.

    A strong reference would stop a graph pool from reusing the bytes, and a Python weak reference would be dead at
    replay. The memory must outlive the alias by other means: here, the pool that the graphs hold.
    """
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.untyped_storage().data_ptr(), tensor.device, tensor.untyped_storage().nbytes()
    )
    out = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return out.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
