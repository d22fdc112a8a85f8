"""A tape replays what eager computes, bit for bit, over a table of kinds of operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from graphtune.worker.graphs.tape import Tape, record
from graphtune.worker.graphs.tape_pool import BytePool
from tests.worker.graphs.op_cases import CASES, Case, Inputs

Mode = Callable[[], AbstractContextManager[object]]
MODES: dict[str, Mode] = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


class Harness:
    """One case with static inputs and one given buffer per result, the way a runner would use it."""

    def __init__(self, case: Case, mode: Mode) -> None:
        self.case = case
        self.mode = mode
        self.inputs = Inputs(seed=1)
        with mode():
            self.results = [torch.empty_like(result).copy_(result) for result in self.listed()]
        self.inputs.fill(1)

    def listed(self) -> list[torch.Tensor]:
        returned = self.case(self.inputs)
        return [returned] if isinstance(returned, torch.Tensor) else list(returned)

    def forward(self) -> torch.Tensor:
        returned = self.listed()
        for given, result in zip(self.results, returned, strict=True):
            given.copy_(result)
        return returned[0]

    def run(self, seed: int, call: Callable[[], torch.Tensor]) -> dict[str, bytes]:
        """Bits of everything that can be seen after a call on the inputs of ``seed``."""
        self.inputs.fill(seed)
        with self.mode():
            returned = call()
        seen = {"returned": returned, **self.inputs.tensors()}
        seen |= {f"result {n}": result for n, result in enumerate(self.results)}
        return {name: bits(tensor) for name, tensor in seen.items()}

    def record(self) -> Tape:
        with self.mode():
            return Tape(record(self.forward, BytePool()))


def spoil(tensor: torch.Tensor) -> None:
    """Change every element."""
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    elif tensor.numel():
        flipped = tensor.resolve_conj().flatten().clone().view(torch.uint8).bitwise_not_().view(tensor.dtype)
        tensor.copy_(flipped.view(tensor.shape))


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_replay_equals_eager(name: str, mode: str) -> None:
    harness = Harness(CASES[name], MODES[mode])
    before = {label: bits(t) for label, t in harness.inputs.tensors().items()}
    results = [bits(t) for t in harness.results]
    tape = harness.record()
    assert {label: bits(t) for label, t in harness.inputs.tensors().items()} == before, "the recording wrote an input"
    assert [bits(t) for t in harness.results] == results, "the recording wrote a given buffer"
    for seed in (2, 3):
        expected = harness.run(seed, harness.forward)
        replayed = harness.run(seed, tape.replay)
        assert [label for label in expected if expected[label] != replayed[label]] == []


# Eager itself differs here: inference mode resolves a conjugation before it takes matmul apart.
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"complex_conjugate_kept"}))
def test_same_tape_in_every_mode(name: str) -> None:
    def calls(mode: Mode) -> list[str]:
        return [str(entry.call) for entry in Harness(CASES[name], mode).record().recording.entries]

    assert calls(torch.no_grad) == calls(torch.inference_mode) == calls(torch.enable_grad)


@pytest.mark.parametrize("name", CASES)
def test_every_entry_matters(name: str) -> None:
    """Leaving any one entry out of a tape changes what is seen: the comparison above can fail."""
    harness = Harness(CASES[name], torch.no_grad)
    recording = harness.record().recording
    expected = harness.run(2, harness.forward)
    unseen = []
    for left_out in range(len(recording.entries)):
        entries = recording.entries[:left_out] + recording.entries[left_out + 1 :]
        harness.run(2, harness.forward)
        for made in recording.made:
            recording.pool.poison(made.address, made.nbytes)
        for result in harness.results:
            spoil(result)
        try:
            seen = harness.run(2, Tape(dataclasses.replace(recording, entries=entries)).replay)
        except (IndexError, RuntimeError):
            continue
        if seen == expected:
            unseen.append(str(recording.entries[left_out].origin))
    assert unseen == []


def test_weights_that_require_grad() -> None:
    """Autograd's saved tensors would hold pool bytes; the tape's output carries no history."""
    weight = torch.nn.Parameter(torch.eye(6) * 2)
    x = torch.ones(4, 6)
    pool = BytePool()
    tape = Tape(record(lambda: torch.nn.functional.silu(x @ weight.t()).relu(), pool))
    assert tape.output.grad_fn is None
    assert pool.in_use() == 128
    x.fill_(0.5)
    assert torch.equal(tape.replay(), torch.nn.functional.silu(x @ weight.t()).relu())
    assert [outside.tensor.data_ptr() for outside in tape.externals] == [x.data_ptr(), weight.data_ptr()]
