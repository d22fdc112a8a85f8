"""A padded row keeps the KV slot of a request that has left the batch, and writes there."""

from __future__ import annotations

from dataclasses import replace

import torch
from small_engine import capture, small_engine

from graphtune.results import GateCheck
from graphtune.worker.gate import check_list
from graphtune.worker.runners.buffers import Policy, StaticBuffers, decode_slots


def gate(policy: Policy) -> tuple[GateCheck, ...]:
    """The gate's checks with ``out_slots`` padded by this policy."""
    engine = small_engine(2, 4)
    eager = engine.eager
    slots = tuple(
        replace(slot, policy=policy) if slot.name == "out_slots" else slot
        for slot in decode_slots(engine.attention.seq_len_fill)
    )
    eager.buffers = StaticBuffers(slots, eager.buffers.max_requests, engine.device)
    runner = capture(engine, 2, 4)
    with torch.inference_mode():
        return check_list(runner, seed=3)


def wrong() -> tuple[GateCheck, ...]:
    """``copy`` leaves in the tail whatever an earlier step put there."""
    return gate("copy")


def cured() -> tuple[GateCheck, ...]:
    """``zero`` sends padded rows to the sink page, which no request owns."""
    return gate("zero")


def main() -> None:
    for check in wrong():
        print(f"tail copied, size {check.size}: {check.reason or 'passed'}")
    for check in cured():
        print(f"tail zeroed, size {check.size}: {check.reason or 'passed'}")


if __name__ == "__main__":
    main()
