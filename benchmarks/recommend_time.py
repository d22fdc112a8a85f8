"""How long `recommend` takes for a histogram, and for a trace for one engine and for all.

    python benchmarks/recommend_time.py SWEEP TRACE.csv [--prefill-tokens-per-s 30000]

Times the whole command in a fresh process, as a user waits for it. The targets are 3 s for a histogram, 15 s for a
trace and one engine, 40 s for all three.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time


def seconds(*arguments: str) -> float:
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "graphtune", "recommend", *arguments, "--json"], capture_output=True)
    if done.returncode:
        raise SystemExit(done.stderr.decode())
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sweep")
    parser.add_argument("trace")
    parser.add_argument("--prefill-tokens-per-s", help="where the sweep holds no prefill times")
    arguments = parser.parse_args()
    sweep = (arguments.sweep, "--gpu-mem", "141")
    stated = arguments.prefill_tokens_per_s
    trace = ("--workload", arguments.trace, "--load", "80%", *(("--prefill-tokens-per-s", stated) if stated else ()))
    print(f"{'question':<28} {'seconds':>8} {'target':>7}")
    for name, target, options in (
        ("histogram, all engines", 3, ("--workload", "uniform 256")),
        ("trace, one engine", 15, (*trace, "--engine", "sglang")),
        ("trace, all engines", 40, trace),
    ):
        print(f"{name:<28} {seconds(*sweep, *options):>8.2f} {target:>7}")


if __name__ == "__main__":
    main()
