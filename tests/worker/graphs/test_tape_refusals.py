"""What a recording would freeze silently is refused by operation, file, line and source text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from graphtune.worker.graphs.backend import CaptureError
from graphtune.worker.graphs.tape import Tape, record
from graphtune.worker.graphs.tape_pool import BytePool

X = torch.arange(12.0).view(3, 4)
IDS = torch.tensor([0, 2, 1])
MASK = torch.tensor([True, False, True])
N = torch.tensor(2)
EMPTY = torch.empty(0)

# Each on one line: the error must name that line.
HOST_READS: dict[str, Callable[[], object]] = {
    "Tensor.item": lambda: N.item(),
    "Tensor.__bool__": lambda: X + 1 if N > 0 else X,
    "Tensor.__bool__ of all()": lambda: bool((X > 0).all()),
    "Tensor.__int__": lambda: X * int(N),
    "Tensor.__float__": lambda: X * float(N),
    "Tensor.__complex__": lambda: complex(N),
    "Tensor.__index__": lambda: [1, 2, 3][N],
    "Tensor.__index__ in range": lambda: range(N),
    "Tensor.tolist": lambda: (X + 1).tolist(),
    "Tensor.numpy": lambda: X.numpy(),
    "Tensor.__array__": lambda: np.asarray(X + 1),
    "Tensor.cpu": lambda: (X + 1).cpu(),
    "Tensor.__repr__": lambda: print(X + 1),
    "Tensor.__format__": lambda: f"{N}",
    "Tensor.__bool__ in max()": lambda: max(IDS),
    "tensor_split": lambda: torch.tensor_split(X, IDS),
    "tensor_split of an intermediate": lambda: (X + 1).tensor_split(IDS + 0),
    "aten._local_scalar_dense slice": lambda: X[:N],
    "aten._local_scalar_dense index": lambda: X[N],
    "aten._local_scalar_dense split": lambda: X.split(N),
    "aten._local_scalar_dense narrow": lambda: X.narrow(0, N, 1),
    "aten._local_scalar_dense expand": lambda: X[:1].expand(N, 4),  # type: ignore[call-overload]
    "aten._local_scalar_dense factory": lambda: torch.zeros(N),  # type: ignore[call-overload]
    "aten._local_scalar_dense one_hot": lambda: F.one_hot(IDS),
    "aten._local_scalar_dense contains": lambda: 2 in IDS,
    "aten._local_scalar_dense nonzero?": lambda: torch.is_nonzero(N),
    "aten.equal": lambda: torch.equal(X, X),
    "Tensor.allclose": lambda: X.allclose(X),
    "aten.nonzero": lambda: X.nonzero(),
    "aten.nonzero by where": lambda: torch.where(MASK),
    "aten.nonzero by argwhere": lambda: torch.argwhere(MASK),
    "aten.index.Tensor by mask": lambda: X[MASK],
    "aten.index.Tensor by uint8": lambda: X[MASK.to(torch.uint8)],
    "aten.index_put_ of several": lambda: (X + 1).index_put_((MASK,), X[:2]),
    "aten._unique2": lambda: X.unique(),
    "aten.unique_consecutive": lambda: X.unique_consecutive(),
    "aten.masked_select": lambda: X.masked_select(X > 1),
    "aten.repeat_interleave": lambda: torch.repeat_interleave(X, IDS, dim=0),
    "aten.bincount": lambda: torch.bincount(IDS),
    "aten.lift_fresh tensor": lambda: torch.tensor([1.0, 2.0]),
    "aten.lift_fresh scalar": lambda: X * torch.tensor(2.0),
    "aten.lift_fresh as_tensor": lambda: torch.as_tensor([1]),
    "aten.lift_fresh new_tensor": lambda: X.new_tensor([1]),
    "aten.lift_fresh from_numpy": lambda: torch.from_numpy(np.zeros(3)),
    "aten.resize_": lambda: (X + 1).resize_(24),
    "aten.set_": lambda: (X + 1).set_(X),  # type: ignore[call-overload]
    "aten.mm.out resizes": lambda: torch.mm(X, X.t(), out=EMPTY),
    "aten.native_batch_norm": lambda: F.batch_norm(X, X[0].clone(), X[1].clone(), training=True),
    "aten.to_sparse": lambda: X.to_sparse(),
    "aten._to_copy to another device": lambda: X.to("meta"),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", HOST_READS)
def test_refused_with_operation_and_line(name: str, mode: Callable[[], torch.no_grad]) -> None:
    function = HOST_READS[name]
    before = X.clone()

    def forward() -> torch.Tensor:
        function()
        return X + 1

    with mode(), pytest.raises(CaptureError) as refused:
        record(forward, BytePool())
    message = str(refused.value)
    line = function.__code__.co_firstlineno
    assert f"graphs/test_tape_refusals.py:{line}: " in message
    assert "lambda:" in message, "the source text is missing"
    operation = name.split()[0]
    if operation != "aten.to_sparse":
        assert message.startswith(operation)
    assert torch.equal(X, before)
    assert EMPTY.numel() == 0


def test_a_refusal_that_the_model_swallows_still_fails() -> None:
    def forward() -> torch.Tensor:
        try:
            return X * N.item()
        except Exception:
            return X + 1

    with torch.no_grad(), pytest.raises(CaptureError, match=r"Tensor\.item"):
        record(forward, BytePool())


ALLOWED: dict[str, Callable[[], torch.Tensor]] = {
    "fill by mask": lambda: assigned(X, X > 3, 0.0),
    "index_put_ of one value by mask": lambda: (X + 1).index_put_((MASK,), X[0, 0]),
    "masked_fill": lambda: X.masked_fill(X > 1, -1.0),
    "repeat by a number": lambda: X.repeat_interleave(2, dim=0),
    "assign a number": lambda: assigned(X, (slice(None), 1), 7),
    "masked number in where": lambda: torch.where(X > 1, X, 0.0),
    "shapes": lambda: X.view(X.shape[0] * X.size(1)) + len(X) + X.numel() + X.dim(),
    "split by numbers": lambda: torch.tensor_split(X, [1, 2])[1] + 1,
    "same device and type": lambda: (X + 1).to("cpu").to(torch.float32).contiguous(),
}


def assigned(x: torch.Tensor, where: Any, value: float) -> torch.Tensor:
    y = x + 1
    y[where] = value
    return y


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ALLOWED)
def test_false_alarms_are_none(name: str, mode: Callable[[], torch.no_grad]) -> None:
    with mode():
        expected = ALLOWED[name]()
        tape = Tape(record(ALLOWED[name], BytePool()))
        assert torch.equal(tape.replay(), expected)
        assert tape.unowned({"x": X, "mask": MASK}) == [], "a number in the source is not a stray tensor"


def test_an_error_of_the_model_names_its_line() -> None:
    with torch.no_grad(), pytest.raises(CaptureError, match=r"shape.*— at graphs/test_tape_refusals.py:\d+: .*X @ X"):
        record(lambda: X @ X, BytePool())


def test_only_one_tensor_may_be_returned() -> None:
    with torch.no_grad(), pytest.raises(CaptureError, match="one tensor, not tuple"):
        record(lambda: (X + 1, X + 2), BytePool())  # type: ignore[arg-type, return-value]


def test_memory_errors_pass_through() -> None:
    def forward() -> torch.Tensor:
        raise MemoryError

    with torch.no_grad(), pytest.raises(MemoryError):
        record(forward, BytePool())
