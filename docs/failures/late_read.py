"""An output is read after the next replay, which has written its own output to the same memory."""

from __future__ import annotations

import torch
from small_engine import capture, difference, small_engine, step


def read(*, copied: bool) -> float:
    """Relative error of the first step's logits when they are read after the second step."""
    engine = small_engine(4)
    runner = capture(engine, 2)
    first, second = step(engine, 9, 20, seed=1), step(engine, 30, 5, seed=2)
    with torch.inference_mode():
        expected = engine.eager.run(first).clone()
        logits = runner.run(first)
        kept = logits.clone() if copied else logits
        runner.run(second)
        return difference(kept, expected)


def wrong() -> float:
    return read(copied=False)


def cured() -> float:
    return read(copied=True)


def main() -> None:
    print(f"read after the next replay: off by {wrong():.0%}")
    print(f"copied before the next replay: off by {cured():.1e}")


if __name__ == "__main__":
    main()
