"""A sweep survives its workers, itself and its disk: every bad end costs at most the running cell."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from graphtune.errors import InputError
from graphtune.store import CELLS_FILE, encode_result, read_sweep
from tests.fake_worker import FOLDER, RECIPE, Silent, cells_of, result_of, run_made_up
from tests.synthetic import environment

MAIN_1, MAIN_2, CONTROL = "main-1-2", "main-2-2", "control-1-1"


@pytest.fixture
def behave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Set what the fake worker does per cell; returns its folder."""
    folder = tmp_path / "behaviour"
    folder.mkdir()
    monkeypatch.setenv(FOLDER, str(folder))
    page = types.ModuleType("graphtune.report")
    page.write_report = lambda sweep, out: out.write_text("page")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "graphtune.report", page)

    def set_behaviour(**words: str) -> Path:
        for name, word in words.items():
            (folder / name.replace("_", "-")).write_text(word)
        return folder

    return set_behaviour


def started(folder: Path) -> list[str]:
    file = folder / "started"
    return file.read_text().split() if file.exists() else []


def statuses(path: Path) -> list[str]:
    return [cell.status for cell in read_sweep(path).cells]


def test_every_cell_runs_once_and_the_sweep_is_stamped(behave: Callable[..., Path], tmp_path: Path) -> None:
    folder, out, progress = behave(), tmp_path / "out", Silent()
    outcome = run_made_up(out, progress=progress)
    sweep = read_sweep(out)
    assert started(folder) == [MAIN_1, MAIN_2, CONTROL]
    assert (outcome.measured, outcome.resumed, outcome.left, outcome.findings) == (3, 0, 0, [])
    assert [cell.cell_id for cell in sweep.cells] == [cell.id for cell in cells_of()]
    assert sweep.finished_at is not None
    assert (out / "report.html").read_text() == "page"
    assert sorted(file.name for file in out.iterdir()) == ["cells.jsonl", "logs", "report.html", "run.json"]
    assert progress.told[0].startswith("start 1/3 process 1: dense under 2 settings, 6 captures, 6 step times")
    assert "stage capture 1/2" in progress.told
    log = (out / str(sweep.cells[0].log_path)).read_text()
    assert log == "a line that is not progress\n"


def test_a_second_call_measures_nothing(behave: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = behave(), tmp_path / "out"
    run_made_up(out)
    finished = read_sweep(out).finished_at
    outcome = run_made_up(out)
    assert (outcome.measured, outcome.resumed) == (0, 3)
    assert len(started(folder)) == 3
    assert read_sweep(out).finished_at == finished


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody waited for yet has, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("words", [{}, {MAIN_1: "leftover"}, {MAIN_1: "killed"}, {MAIN_2: "crash"}])
def test_processes_started_ahead_change_nothing_but_the_wait(
    behave: Callable[..., Path], tmp_path: Path, words: dict[str, str]
) -> None:
    folder = behave(**words)
    run_made_up(tmp_path / "one by one")
    alone = started(folder)
    (folder / "started").unlink()
    run_made_up(tmp_path / "ahead", ahead=True)
    assert started(folder) == alone
    assert statuses(tmp_path / "ahead") == statuses(tmp_path / "one by one")
    waited = [int(pid) for pid in (folder / "waiting").read_text().split()]
    assert len(waited) == 2
    assert all(gone(pid) for pid in waited)


def test_a_process_that_dies_while_it_waits_is_started_again(behave: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = behave(**{MAIN_1: "kill_waiting"}), tmp_path / "out"
    outcome = run_made_up(out, ahead=True)
    assert started(folder) == [MAIN_1, MAIN_2, CONTROL]
    assert (outcome.measured, outcome.findings) == (3, [])


def test_a_process_that_waits_ends_with_a_sweep_that_stops_early(behave: Callable[..., Path], tmp_path: Path) -> None:
    folder = behave()
    outcome = run_made_up(tmp_path / "out", ahead=True, time_budget_s=0.0)
    assert (outcome.measured, outcome.left) == (1, 2)
    waiting = folder / "waiting"
    assert not waiting.exists() or all(gone(int(pid)) for pid in waiting.read_text().split())


@pytest.mark.parametrize(
    ("behaviour", "status", "reason"),
    [
        ("crash", "failed", "exit code 1: RuntimeError: the model fell over"),
        ("segfault", "failed", "ended by SIGSEGV"),
        ("memory_error", "oom", "MemoryError: cannot allocate 40 GiB"),
        ("oom", "oom", "CUDA out of memory"),
        ("no_result", "failed", "the worker ended without a result"),
        ("garbage", "failed", "the worker ended without a result"),
        ("killed", "failed", "killed (SIGKILL), possibly by the host's out-of-memory killer; kept what was measured"),
        ("capture_failed", "capture_failed", "aten::item at decoder.py:12 reads the device"),
    ],
)
def test_a_bad_end_is_a_result_with_a_reason(
    behave: Callable[..., Path], tmp_path: Path, behaviour: str, status: str, reason: str
) -> None:
    behave(main_1_2=behaviour)
    out = tmp_path / "out"
    outcome = run_made_up(out)
    results = {cell.cell_id: cell for cell in read_sweep(out).cells}
    bad, second, control = (results[cell.id] for cell in cells_of())
    assert bad.status == status, bad.reason
    assert bad.reason is not None and bad.reason.startswith(reason)
    assert (second.status, control.status) == ("ok", "ok")
    assert any(reason in finding for finding in outcome.findings)
    assert read_sweep(out).finished_at is not None


def test_a_hang_is_stopped_and_what_it_measured_is_kept(behave: Callable[..., Path], tmp_path: Path) -> None:
    folder = behave(main_1_2="hang")
    out = tmp_path / "out"
    run_made_up(out, cell_timeout_s=1.0)
    hung = read_sweep(out).cells[0]
    assert hung.status == "timeout"
    assert hung.reason == "took longer than the limit of 1 s and was stopped; kept what was measured before"
    assert len(hung.captured_lists) == 1
    assert not alive(int((folder / "pid").read_text()))
    assert statuses(out) == ["timeout", "ok", "ok"]


def test_the_commit_goes_to_the_worker_and_cells_of_others_are_named(
    behave: Callable[..., Path], tmp_path: Path
) -> None:
    folder, out = behave(), tmp_path / "out"
    run_made_up(out, commit="abc1234")
    assert (folder / "commit").read_text() == "abc1234"
    results = read_sweep(out).cells
    measured = [replace(one, environment=replace(environment("cpu"), commit="abc1234")) for one in results]
    (out / CELLS_FILE).write_text("".join(f"{encode_result(one)}\n" for one in measured))
    assert run_made_up(out, commit="abc1234").notes == []
    (note,) = run_made_up(out, commit="def5678").notes
    assert "commit abc1234, this one is def5678; --fresh" in note


def test_failed_cells_run_again_only_when_asked(behave: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = behave(main_1_2="crash"), tmp_path / "out"
    run_made_up(out)
    outcome = run_made_up(out)
    assert (outcome.measured, outcome.resumed, len(outcome.findings)) == (0, 3, 1)
    behave(main_1_2="ok")
    outcome = run_made_up(out, retry_failed=True)
    assert (outcome.measured, outcome.resumed, outcome.findings) == (1, 2, [])
    assert started(folder).count(MAIN_1) == 2
    assert sorted(statuses(out)) == ["ok", "ok", "ok"]


@pytest.mark.parametrize("behaviour", ["leftover", "capture_failed"])
def test_lists_left_out_are_captured_in_a_fresh_process(
    behave: Callable[..., Path], tmp_path: Path, behaviour: str
) -> None:
    folder, out = behave(main_1_2=behaviour), tmp_path / "out"
    run_made_up(out)
    assert started(folder) == [MAIN_1, "main-1-1", MAIN_2, CONTROL]
    rest = read_sweep(out).cells[1]
    assert [one.list.order for one in rest.captured_lists] == ["ascending"]
    assert rest.cell["latency"] == []
    assert rest.points == ()
    run_made_up(out)
    assert len(started(folder)) == 4


def test_a_worker_that_gets_nowhere_is_not_followed_for_ever(behave: Callable[..., Path], tmp_path: Path) -> None:
    folder = behave(default="stuck")
    run_made_up(tmp_path / "out")
    assert len(started(folder)) == 3


def test_wrong_results_are_a_finding_and_nan_is_stored_as_missing(behave: Callable[..., Path], tmp_path: Path) -> None:
    behave(main_1_2="nan")
    out = tmp_path / "out"
    outcome = run_made_up(out)
    assert len(outcome.findings) == 1
    assert "list dense: wrong results at 1: NaN in the output" in outcome.findings[0]
    assert read_sweep(out).cells[0].captured_lists[0].gate[0].error_at_raw is None
    assert "NaN" not in (out / CELLS_FILE).read_text().replace("NaN in the output", "")


def test_a_torn_last_line_costs_that_cell(behave: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = behave(), tmp_path / "out"
    run_made_up(out)
    cells = out / CELLS_FILE
    content = cells.read_bytes()
    cells.write_bytes(content[:-40])
    assert len(read_sweep(out).cells) == 2
    outcome = run_made_up(out)
    assert (outcome.measured, outcome.resumed) == (1, 2)
    assert any("torn" in note for note in outcome.notes)
    assert started(folder)[3:] == [CONTROL]
    assert cells.read_bytes() == content
    assert read_sweep(out).damaged_lines == ()


def test_another_recipe_or_a_second_writer_is_refused(behave: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = behave(), tmp_path / "out"
    run_made_up(out)
    other = RECIPE.replace("[1, 2, 4]", "[1, 2, 8]")
    with pytest.raises(InputError, match="another recipe"):
        run_made_up(out, other)
    assert len(read_sweep(out).cells) == 3
    run_made_up(out, RECIPE.replace("processes: 2", "processes: 3"))
    assert started(folder)[3:] == ["main-3-2"]
    run_made_up(out, other, fresh=True)
    assert len(read_sweep(out).cells) == 3
    assert (out / "cells.jsonl.previous").read_text().count("\n") == 4


def test_the_budget_leaves_cells_for_the_next_call(behave: Callable[..., Path], tmp_path: Path) -> None:
    behave()
    out = tmp_path / "out"
    outcome = run_made_up(out, time_budget_s=0.0)
    assert (outcome.measured, outcome.left) == (1, 2)
    assert read_sweep(out).finished_at is None
    assert run_made_up(out).measured == 2
    assert read_sweep(out).finished_at is not None


def test_an_unwritable_folder_is_refused_before_any_cell(behave: Callable[..., Path], tmp_path: Path) -> None:
    folder = behave()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        run_made_up(tmp_path / "file" / "out")
    assert started(folder) == []


def test_a_full_disk_stops_the_sweep_and_loses_nothing(
    behave: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = behave(main_2_2="disk_full"), tmp_path / "out"
    with pytest.raises(InputError, match="No space left on device") as caught:
        run_made_up(out)
    assert "resumes" in str(caught.value)
    assert statuses(out) == ["ok"]
    assert read_sweep(out).finished_at is None
    behave(main_2_2="ok")
    assert run_made_up(out).resumed == 1
    assert started(folder) == [MAIN_1, MAIN_2, MAIN_2, CONTROL]


def test_a_disk_full_while_storing_keeps_the_result_that_was_measured(
    behave: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = behave(), tmp_path / "out"

    def half_then_full(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("graphtune.store._write_all", half_then_full)
        with pytest.raises(InputError, match="No space left on device"):
            run_made_up(out)
    assert (out / CELLS_FILE).read_bytes() == b""
    outcome = run_made_up(out)
    assert (outcome.measured, outcome.resumed) == (2, 1)
    assert started(folder) == [MAIN_1, MAIN_2, CONTROL]


def test_little_space_is_refused(behave: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = behave()
    monkeypatch.setattr("graphtune.sweep.LEAST_FREE_BYTES", 1 << 62)
    with pytest.raises(InputError, match="are free on this disk"):
        run_made_up(tmp_path / "out")
    assert started(folder) == []


DRIVER = f"""
import signal, sys, types
# A shell lets its background jobs ignore Ctrl-C, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
page = types.ModuleType("graphtune.report")
page.write_report = lambda sweep, out: None
sys.modules["graphtune.report"] = page
from pathlib import Path
from tests.fake_worker import run_made_up
try:
    run_made_up(Path(sys.argv[1]))
except KeyboardInterrupt:
    sys.exit(130)
"""


def drive(out: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    return subprocess.Popen([sys.executable, "-c", DRIVER, str(out)], env=environment, stderr=subprocess.DEVNULL)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """True for a running process; one that has ended and waits to be collected by its parent is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def has_text(file: Path) -> bool:
    return file.exists() and file.read_text() != ""


def test_kill_of_the_parent_ends_the_worker_and_costs_the_running_cell(
    behave: Callable[..., Path], tmp_path: Path
) -> None:
    folder, out = behave(main_2_2="hang"), tmp_path / "out"
    parent = drive(out)
    wait_for(lambda: has_text(folder / "pid"))
    worker = int((folder / "pid").read_text())
    parent.kill()
    parent.wait()
    wait_for(lambda: not alive(worker))
    assert statuses(out) == ["ok"]
    behave(main_2_2="ok")
    outcome = run_made_up(out)
    assert (outcome.measured, outcome.resumed) == (2, 1)
    assert (out / CELLS_FILE).read_text().count("\n") == 3


def test_a_result_that_was_finished_when_the_parent_died_is_taken(behave: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = behave(main_2_2="wait"), tmp_path / "out"
    parent = drive(out)
    wait_for(lambda: has_text(folder / "pid"))
    parent.kill()
    parent.wait()
    outcome = run_made_up(out)
    assert (outcome.measured, outcome.resumed) == (1, 2)
    assert started(folder) == [MAIN_1, MAIN_2, CONTROL]


def test_one_ctrl_c_stops_the_worker_and_keeps_what_is_stored(behave: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = behave(main_2_2="hang"), tmp_path / "out"
    parent = drive(out)
    wait_for(lambda: has_text(folder / "pid"))
    parent.send_signal(signal.SIGINT)
    assert parent.wait(20) == 130
    assert not alive(int((folder / "pid").read_text()))
    assert statuses(out) == ["ok"]
    behave(main_2_2="ok")
    assert run_made_up(out).measured == 2


def test_kill_of_the_worker_costs_its_cell(behave: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = behave(main_2_2="hang"), tmp_path / "out"
    parent = drive(out)
    wait_for(lambda: has_text(folder / "pid"))
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    assert parent.wait(20) == 0
    assert statuses(out) == ["ok", "failed", "ok"]
    assert "SIGKILL" in str(read_sweep(out).cells[1].reason)


def test_a_result_for_another_cell_is_not_taken(behave: Callable[..., Path], tmp_path: Path) -> None:
    behave()
    out = tmp_path / "out"
    first, second = cells_of()[:2]
    running = out / "running"
    running.mkdir(parents=True)
    (running / f"{first.id}.result.json").write_text(encode_result(result_of(asdict(second), second.id)))
    outcome = run_made_up(out)
    assert (outcome.measured, outcome.resumed) == (2, 1)
    assert {cell.cell_id for cell in read_sweep(out).cells} == {cell.id for cell in cells_of()}
