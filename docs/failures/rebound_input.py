"""An input slot is bound to a new tensor after the capture. The graph goes on reading the old one."""

from __future__ import annotations

import torch
from small_engine import capture, difference, small_engine, step

from graphtune.worker.addresses import AddressChanged
from graphtune.worker.graphs.shape_key import ShapeKey


def wrong() -> float:
    """Relative error of a replay that nobody checked."""
    engine = small_engine(4)
    runner = capture(engine, 4)
    slots = engine.eager.buffers.tensors
    slots["input_ids"] = slots["input_ids"].clone()  # the scheduler "just makes a new tensor"
    live = step(engine, 9, 20, 33)
    with torch.inference_mode():
        runner.fill(live)
        runner.plan()
        replayed = runner.backend.replay(ShapeKey(4))[: live.size].clone()
        return difference(replayed, engine.eager.run(live))


def cured() -> tuple[str, float]:
    """What the address check says, and the relative error once ids are copied into the slot instead."""
    engine = small_engine(4)
    runner = capture(engine, 4)
    slots = engine.eager.buffers.tensors
    recorded, slots["input_ids"] = slots["input_ids"], slots["input_ids"].clone()
    said = ""
    with torch.inference_mode():
        try:
            runner.run(step(engine, 9, 20, 33))
        except AddressChanged as error:
            said = str(error)
        slots["input_ids"] = recorded
        live = step(engine, 8, 8)  # a shape whose views were not made while the slot was astray
        return said, difference(runner.run(live).clone(), engine.eager.run(live))


def main() -> None:
    print(f"without a check: the replay is off by {wrong():.0%} and nothing says so")
    said, error = cured()
    print(f"with the address check: refused, {said}")
    print(f"copied into the slot at its old address: off by {error:.1e}")


if __name__ == "__main__":
    main()
