"""How fast server logs are read, and in how much memory.

    python benchmarks/log_reader.py [--mib 200] [--kind NAME]

Makes up a log of each kind (SGLang decode lines with client requests between, vLLM readings and step tables, progress
bars, lines about something else), summarises it as `graphtune log summary` does, and prints seconds, MiB per second
and the largest resident memory. The target is 200 MB in under 15 s on two cores, in memory that does not grow.
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from graphtune.tune.log_summary import summarise

MIB = 1 << 20


def stamp(number: int) -> str:
    return f"2026-05-31 {number // 3600 % 24:02d}:{number // 60 % 60:02d}:{number % 60:02d}"


def sglang_line(rng: random.Random, number: int) -> str:
    share = rng.random()
    if share < 0.6:
        running = rng.randint(1, 256)
        return (
            f"[{stamp(number)} DP{number % 4} TP0] Decode batch, #running-req: {running}, #token: {running * 700}, "
            f"token usage: 0.13, cuda graph: {running <= 128}, gen throughput (token/s): 171.01, #queue-req: 0"
        )
    if share < 0.8:
        return (
            f"[{stamp(number)} TP0] Prefill batch, #new-seq: 1, #new-token: {rng.randint(1, 8192)}, #cached-token: 0, "
            "token usage: 0.08, #running-req: 31, #queue-req: 0, cuda graph: True, input throughput (token/s): 559.53"
        )
    if share < 0.95:
        return 'INFO:     192.0.2.1:4242 - "POST /v1/chat/completions HTTP/1.1" 200 OK'
    return f"[{stamp(number)} TP0] a message about something else, number {number}"


def older_sglang_line(rng: random.Random, number: int) -> str:
    """Wordings that the quick reading does not know: every line goes by key."""
    running = rng.randint(1, 256)
    return (
        f"sglang-1  | [{stamp(number)} DP0 TP0] Decode batch. #running-req: {running}, #token: {running * 700}, "
        f"token usage: 0.13, accept len: 2.90, cuda graph: True, gen throughput (token/s): 171.01, #queue-req: 0, "
    )


def vllm_line(rng: random.Random, number: int) -> str:
    share = rng.random()
    prefix = f"(EngineCore_DP0 pid=441) INFO {stamp(number)[5:]} [loggers.py:257] "
    if share < 0.2:
        return (
            f"{prefix}Engine 000: Avg prompt throughput: 2130.8 tokens/s, Avg generation throughput: 7.5 tokens/s, "
            f"Running: {rng.randint(1, 99)} reqs, Waiting: 3 reqs, GPU KV cache usage: 13.3%, "
            "Prefix cache hit rate: 0.0%"
        )
    if share < 0.6:
        size = rng.randint(1, 512)
        padded, steps = -(-size // 8) * 8, rng.randint(1, 999)
        return f"{prefix}| {size:<15} | {padded:<13} | {padded - size:<12} | FULL         | {steps:<5} |"
    return 'INFO:     192.0.2.1:4242 - "POST /v1/completions HTTP/1.1" 200 OK'


def other_line(rng: random.Random, number: int) -> str:
    return f"[{stamp(number)}] worker {rng.randint(0, 7)} says nothing of interest, in words and numbers, {number}"


def bar_line(rng: random.Random, number: int) -> str:
    return "\r".join(
        f"Capturing batches (bs={size} avail_mem=11.99 GB):  {size}%|###   | {size}/99 [00:00<00:01, 14.5it/s]"
        for size in range(rng.randint(1, 20), 40)
    )


KINDS: dict[str, Callable[[random.Random, int], str]] = {
    "sglang": sglang_line,
    "sglang, older": older_sglang_line,
    "vllm": vllm_line,
    "other lines": other_line,
    "progress bars": bar_line,
}


def blocks(kind: str, size_bytes: int) -> Iterator[bytes]:
    """A made-up log, in blocks that repeat a few thousand different lines."""
    rng = random.Random(7)
    some = "".join(
        KINDS[kind](rng, number) + "\n" for number in range(20_000 if kind != "progress bars" else 200)
    ).encode()
    made = 0
    while made < size_bytes:
        yield some
        made += len(some)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=200, help="size of each log")
    parser.add_argument("--kind", choices=list(KINDS), action="append", help="only these kinds")
    arguments = parser.parse_args()
    print(f"{'kind':<16} {'MiB':>6} {'lines':>11} {'read':>11} {'seconds':>8} {'MiB/s':>7} {'resident MiB':>13}")
    for kind in arguments.kind or KINDS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "server.log"
            with path.open("wb") as file:
                for block in blocks(kind, arguments.mib * MIB):
                    file.write(block)
            size = path.stat().st_size / MIB
            started = time.perf_counter()
            with path.open("rb") as file:
                summary = summarise(file, kind)
            seconds = time.perf_counter() - started
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{kind:<16} {size:>6.0f} {summary.lines:>11,} {summary.read:>11,} {seconds:>8.1f} {size / seconds:>7.1f} "
            f"{resident:>13.0f}"
        )


if __name__ == "__main__":
    main()
