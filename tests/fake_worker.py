"""A stand-in for the worker that measures nothing and fails on demand, and a sweep that uses it.

Behaviours are files in the folder FAKE_WORKER: ``<purpose>-<process>-<lists>`` or ``default`` holds a word. Started
cells are counted in ``started`` there, one name a line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from graphtune.commit import COMMIT_VARIABLE
from graphtune.plan import Cell
from graphtune.results import CapturedList, CaptureList, CellResult, GateCheck, Point, Samples
from graphtune.worker.guard import die_with_parent

FOLDER = "FAKE_WORKER"
NOW = "2026-01-01T00:00:00+00:00"


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--device", "cpu", "cuda", "--ahead")]
    if "--ahead" in sys.argv and not told_to_go():
        return 1
    cell_file, result_file = Path(arguments[0]), Path(arguments[1])
    cell = json.loads(cell_file.read_text())
    name = f"{cell['purpose']}-{cell['process']}-{len(cell['lists'])}"
    folder = Path(os.environ[FOLDER])
    with (folder / "started").open("a") as started:
        started.write(f"{name}\n")
    (folder / "commit").write_text(os.environ.get(COMMIT_VARIABLE, "not set"))
    behaviour = next((file.read_text() for file in (folder / name, folder / "default") if file.exists()), "ok")
    print(json.dumps({"stage": "capture", "done": 1, "total": 2}), flush=True)
    print("a line that is not progress", flush=True)
    return globals()[f"do_{behaviour}"](cell, cell_file.name.split(".")[0], result_file)


def told_to_go() -> bool:
    with (Path(os.environ[FOLDER]) / "waiting").open("a") as waiting:
        waiting.write(f"{os.getpid()}\n")
    return bool(sys.stdin.readline())


def result_of(cell: dict[str, Any], cell_id: str, **changes: Any) -> CellResult:
    done = tuple(
        CapturedList(
            list=CaptureList(**{**one, "sizes": tuple(one["sizes"])}),
            position_in_process=position,
            status="ok",
            reason=None,
            captures=(),
            gate=tuple(GateCheck(size, (size,), True, 0.0, 0.0, 1e-5, True, True) for size in one["sizes"]),
            graph_bytes=1,
            pool_bytes=1,
            outside_torch_bytes=0,
            peak_bytes=1,
            capture_s=0.1,
            leftover_bytes=0,
        )
        for position, one in enumerate(cell["lists"])
    )
    samples = Samples((10.0, 11.0, 12.0), 3, "count")
    points = tuple(
        Point("decode", size, size, at["context_tokens"], execution, "full", "sdpa", samples, samples, samples)
        for at in cell["latency"]
        for size in at["sizes"]
        for execution in at["executions"]
    )
    result = CellResult(
        1, cell_id, cell, "ok", None, None, None, done, points, None, (), {}, {"capture": 0.1}, NOW, NOW
    )
    return replace(result, **changes)


def write(file: Path, result: CellResult) -> int:
    part = file.with_name(file.name + ".tmp")
    part.write_text(json.dumps(asdict(result)))
    os.replace(part, file)
    return 0


def partial(cell: dict[str, Any], cell_id: str, file: Path) -> None:
    whole = result_of(cell, cell_id)
    some = replace(whole, status="failed", reason="not at the end", captured_lists=whole.captured_lists[:1])
    write(file.with_name(file.name + ".partial"), some)


def do_ok(cell: dict[str, Any], cell_id: str, file: Path) -> int:
    return write(file, result_of(cell, cell_id))


def do_kill_waiting(cell: dict[str, Any], cell_id: str, file: Path) -> int:
    """Kill the process that waits for the next cell, as the host's out-of-memory killer would."""
    waiting = Path(os.environ[FOLDER]) / "waiting"
    while not waiting.exists() or not waiting.read_text().endswith("\n"):
        time.sleep(0.01)
    os.kill(int(waiting.read_text()), signal.SIGKILL)
    return do_ok(cell, cell_id, file)


def do_nan(cell: dict[str, Any], cell_id: str, file: Path) -> int:
    bad = GateCheck(1, (1,), False, float("nan"), float("nan"), 1e-5, True, False, "NaN in the output")
    whole = result_of(cell, cell_id)
    first = replace(whole.captured_lists[0], gate=(bad,))
    return write(file, replace(whole, captured_lists=(first, *whole.captured_lists[1:])))


def do_crash(cell: dict[str, Any], cell_id: str, file: Path) -> int:
    raise RuntimeError("the model fell over")


def do_hang(cell: dict[str, Any], cell_id: str, file: Path) -> int:
    partial(cell, cell_id, file)
    (Path(os.environ[FOLDER]) / "pid").write_text(str(os.getpid()))
    time.sleep(600)
    return 1


def do_killed(cell: dict[str, Any], cell_id: str, file: Path) -> int:
    partial(cell, cell_id, file)
    os.kill(os.getpid(), signal.SIGKILL)
    return 1


def do_segfault(cell: dict[str, Any], cell_id: str, file: Path) -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 1


def do_memory_error(cell: dict[str, Any], cell_id: str, file: Path) -> int:
    raise MemoryError("cannot allocate 40 GiB")


def do_oom(cell: dict[str, Any], cell_id: str, file: Path) -> int:
    return write(file, result_of(cell, cell_id, status="oom", reason="CUDA out of memory", captured_lists=()))


def do_capture_failed(cell: dict[str, Any], cell_id: str, file: Path) -> int:
    whole = result_of(cell, cell_id)
    reason = "aten::item at decoder.py:12 reads the device"
    first = replace(whole.captured_lists[0], status="capture_failed", reason=reason, gate=())
    rest = tuple(one.list for one in whole.captured_lists[1:])
    changes = {"status": "capture_failed", "reason": reason, "captured_lists": (first,), "unmeasured": rest}
    return write(file, replace(whole, **changes))


def do_leftover(cell: dict[str, Any], cell_id: str, file: Path) -> int:
    whole = result_of(cell, cell_id)
    rest = tuple(one.list for one in whole.captured_lists[1:])
    return write(file, replace(whole, captured_lists=whole.captured_lists[:1], unmeasured=rest))


def do_stuck(cell: dict[str, Any], cell_id: str, file: Path) -> int:
    whole = result_of(cell, cell_id)
    return write(file, replace(whole, captured_lists=(), unmeasured=tuple(one.list for one in whole.captured_lists)))


def do_no_result(cell: dict[str, Any], cell_id: str, file: Path) -> int:
    return 0


def do_garbage(cell: dict[str, Any], cell_id: str, file: Path) -> int:
    file.write_text('{"schema": 1, "cell_id"')
    return 0


def do_disk_full(cell: dict[str, Any], cell_id: str, file: Path) -> int:
    with open("/dev/full", "w") as full:
        full.write("x")
    return 0


def do_wait(cell: dict[str, Any], cell_id: str, file: Path) -> int:
    """Finish the result, then stay: the parent can be killed between the two."""
    write(file, result_of(cell, cell_id))
    (Path(os.environ[FOLDER]) / "pid").write_text(str(os.getpid()))
    time.sleep(600)
    return 0


RECIPE = """
name: made-up
model: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4,
        num_key_value_heads: 2, vocab_size: 128, max_position_embeddings: 1024, rms_norm_eps: 1.0e-5}
processes: 2
decode:
  lists: [{name: dense, sizes: [1, 2, 4]}]
  order: [descending, ascending]
  contexts: [64]
"""


class Silent:
    """Progress that only remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def cell_started(self, number: int, total: int, what: str, expected_s: float, left_s: float | None) -> None:
        self.told.append(f"start {number}/{total} {what}")

    def stage(self, name: str, done: int | None, total: int | None) -> None:
        self.told.append(f"stage {name} {done}/{total}")

    def cell_ended(self, status: str, seconds: float, left_s: float | None) -> None:
        self.told.append(f"end {status}")

    def say(self, text: str) -> None:
        self.told.append(text)

    def close(self) -> None:
        self.told.append("close")


def plan_made_up(recipe: str = RECIPE) -> tuple[Any, Any, Any]:
    from graphtune.device import cpu_device
    from graphtune.planner import plan_sweep
    from graphtune.recipe import parse_recipe

    loaded = parse_recipe(recipe, "made-up.yaml", Path())
    return plan_sweep(loaded, device="cpu", device_facts=None), loaded, cpu_device()


def run_made_up(path: Path, recipe: str = RECIPE, progress: Any = None, **options: Any) -> Any:
    from graphtune.sweep import SweepOptions, run_sweep

    plan, loaded, device = plan_made_up(recipe)
    worker = (sys.executable, str(Path(__file__).resolve()))
    options = {"cell_timeout_s": 30.0, **options}
    return run_sweep(
        plan,
        loaded,
        device,
        path,
        expected_s=lambda cell: 1.0,
        progress=progress or Silent(),
        options=SweepOptions(worker=worker, **options),
    )


def cells_of(recipe: str = RECIPE) -> tuple[Cell, ...]:
    return plan_made_up(recipe)[0].cells


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main())
