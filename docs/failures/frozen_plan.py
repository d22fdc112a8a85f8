"""A number that the host computes for each step is used in the forward: a recording keeps the first one for ever."""

from __future__ import annotations

from collections.abc import Callable

import torch
from small_engine import capture, difference, small_engine, step

from graphtune.worker.engine import Engine
from graphtune.worker.runners.buffers import DecodeBatch

Scale = Callable[[], float | torch.Tensor]


def scaled_by(engine: Engine, scale: Scale) -> None:
    """Make the model divide its logits by something that depends on the step, as a length-dependent scale does."""
    forward = engine.eager.forward

    def scaled(batch: DecodeBatch) -> torch.Tensor:
        return forward(batch) / scale()

    engine.eager.forward = scaled


def wrong() -> float:
    """Relative error when the plan is a Python number: it was 8 while recording and is 40 now."""
    engine = small_engine(2)
    plan = {"longest": 8}
    scaled_by(engine, lambda: float(plan["longest"]))
    runner = capture(engine, 2)
    live = step(engine, 40, 12)
    plan["longest"] = 40
    with torch.inference_mode():
        return difference(runner.run(live).clone(), engine.eager.run(live))


def refused() -> str:
    """What the recording says when the number is read from a tensor instead: this it can see."""
    engine = small_engine(2)
    longest = torch.tensor(8.0)
    scaled_by(engine, lambda: longest.item())
    try:
        capture(engine, 2)
    except RuntimeError as error:
        return str(error)
    return ""


def cured() -> float:
    """Relative error when the plan is a tensor at a fixed address that the host writes before each replay."""
    engine = small_engine(2)
    longest = torch.tensor(8.0)
    scaled_by(engine, lambda: longest)
    runner = capture(engine, 2)
    live = step(engine, 40, 12)
    longest.fill_(40.0)
    with torch.inference_mode():
        return difference(runner.run(live).clone(), engine.eager.run(live))


def main() -> None:
    print(f"a Python number, frozen: the replay is off by {wrong():.0%}")
    print(f"read from a tensor: refused, {refused()}")
    print(f"written to a tensor before each replay: off by {cured():.1e}")


if __name__ == "__main__":
    main()
