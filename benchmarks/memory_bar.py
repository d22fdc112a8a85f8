"""Predicted against measured graph memory of a sweep's random lists: python benchmarks/memory_bar.py SWEEP [SWEEP ...]

Lists named held-out-N were kept back: nothing is derived from them. The bar is an error of at most 2 % or 16 MiB,
whichever is more, in 15 of 16 lists per phase and backend, and the stated interval covering as many. Exit status 1
where a phase misses it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from graphtune.memory_cells import is_held_out
from graphtune.store import read_sweep
from graphtune.tune.memory_prediction import CheckedPrediction, MemoryPredictor, memory_predictor
from graphtune.units import MIB

SMALL_BYTES = 256 * MIB
SHARE = 15 / 16


def within(one: CheckedPrediction) -> bool:
    return abs(one.error_bytes) <= max(0.02 * one.measured_bytes, 16 * MIB)


def verdict(title: str, lists: Sequence[CheckedPrediction]) -> bool:
    """Print how many of ``lists`` are within the bar; True when enough are, or there are none."""
    if not lists:
        return True
    good, inside = sum(map(within, lists)), sum(one.inside for one in lists)
    worst = max(abs(one.error_bytes) for one in lists)
    print(
        f"  {title}: {good} of {len(lists)} within the bar, {inside} inside the interval, worst {worst / MIB:.1f} MiB"
    )
    return min(good, inside) >= SHARE * len(lists) - 1e-9


def row(one: CheckedPrediction) -> str:
    of, prediction = one.prediction.of, one.prediction
    low, high = prediction.interval
    figures = (prediction.graph_bytes, one.measured_bytes, one.error_bytes, low, high, one.two_sample_bytes)
    numbers = "".join(f"{'–' if value is None else f'{value / MIB:.1f}':>10}" for value in figures)
    name = f"{of.name} {of.order} output {of.output}"
    marks = ("" if within(one) else " off") + ("" if one.inside else " outside")
    return f"  {name:38}{len(of.sizes):>4}{numbers}{marks}"


def show(found: MemoryPredictor) -> bool:
    passed = True
    for kind, fit in found.fits.items():
        outside = found.outside[kind]
        rate, off = outside.per_executable_bytes / MIB, outside.off_bytes / MIB
        print(f" {kind[0]}, {kind[1]}: growth factor {fit.growth_factor:.4f} from {len(fit.errors_bytes)} lists;")
        print(f"  outside torch {rate:.2f} MiB an executable, off by {off:.1f} over {outside.lists} lists.")
        print("  MiB, with the predicted bytes outside torch on both sides:")
        titles = ("predicted", "measured", "error", "low", "high", "2-sample")
        print(f"  {'list':38}{'n':>4}{''.join(f'{title:>10}' for title in titles)}")
        lists = [one for one in found.checked if (one.prediction.of.phase, one.prediction.of.backend) == kind]
        for one in sorted(lists, key=lambda one: (one.prediction.of.output, one.measured_bytes)):
            print(row(one))
        held_out = [one for one in lists if is_held_out(one.prediction.of)]
        passed &= verdict("held out", held_out)
        verdict("held out, under 256 MiB", [one for one in held_out if one.measured_bytes < SMALL_BYTES])
        verdict("held out, 256 MiB and more", [one for one in held_out if one.measured_bytes >= SMALL_BYTES])
    return passed


def main(folders: Sequence[str]) -> int:
    if not folders:
        print(__doc__)
        return 2
    passed = True
    for folder in folders:
        found = memory_predictor(read_sweep(Path(folder)).cells)
        print(folder)
        if found is None:
            print("  no captures for memory alone; a recipe asks for them with the key memory")
            return 2
        passed &= show(found)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
