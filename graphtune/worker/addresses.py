"""The address check: every address that a graph reads must still belong to the same live allocation at replay."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class AddressChanged(Exception):
    """Replaying would read freed or foreign memory; the message names each buffer that moved."""


class AddressBook:
    """Pointers by name as they were at capture, compared before each replay."""

    def __init__(self, owners: Mapping[str, torch.Tensor]) -> None:
        self._pointers = {name: tensor.data_ptr() for name, tensor in owners.items()}

    def check(self, owners: Mapping[str, torch.Tensor]) -> None:
        """Raise AddressChanged unless every recorded name still has its pointer."""
        now = {name: tensor.data_ptr() for name, tensor in owners.items()}
        if now == self._pointers:
            return
        moved = [name for name, pointer in self._pointers.items() if now.get(name) != pointer]
        moved += [f"{name} (new)" for name in now if name not in self._pointers]
        raise AddressChanged(f"changed since capture: {', '.join(moved)}")
