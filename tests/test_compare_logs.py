"""`compare` of two server logs: starts are what counts, engines must be the same, a log with itself is silent."""

# ruff: noqa: E501 - log lines are as long as servers print them

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from graphtune.cli.app import app
from graphtune.compare.logs import ALONE, compare_logs
from graphtune.compare.model import Comparison, Row
from graphtune.compare.text import as_table
from graphtune.errors import InputError
from tests.test_compare_outputs import validate


def start(
    *,
    decode_gib: float = 0.69,
    seconds: float = 3.3,
    sizes: Sequence[int] = (1, 2, 4, 8),
    tokens: int = 1000,
    hour: int = 5,
) -> str:
    at = f"[2026-03-04 {hour:02d}:00:0"
    listed = ", ".join(str(size) for size in sizes)
    return "\n".join(
        [
            f"{at}0] server_args=ServerArgs(model_path='/m', tp_size=2, max_running_requests=4096, mem_fraction_static=0.830)",
            f"{at}1 TP0] Init torch distributed begin.",
            f"{at}2 TP0] Load weight end. elapsed=0.1 s, type=X, avail mem=50.00 GB, mem usage=15.00 GB.",
            f"{at}3 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: {tokens}, K size: 2.00 GB, V size: 2.00 GB",
            f"{at}4 TP0] Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[128, 256], avail mem=10.00 GB",
            f"{at}5 TP0] Capture target prefill CUDA graph end. elapsed=2.00 s, mem usage=0.50 GB, avail mem=9.50 GB.",
            f"{at}5 TP0] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[{listed}], avail mem=9.50 GB",
            f"{at}5 TP1] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[{listed}], avail mem=9.00 GB",
            f"{at}6 TP0] Capture target decode CUDA graph end. elapsed=1.00 s, mem usage=0.25 GB, avail mem=9.25 GB.",
            f"{at}6 TP1] Capture target decode CUDA graph end. elapsed={seconds:.2f} s, mem usage={decode_gib:.2f} GB, avail mem=8.00 GB.",
            f"{at}7 TP0] Decode batch, #running-req: 3, #token: 600, token usage: 0.10, cuda graph: True, gen throughput (token/s): 1.0, #queue-req: 0",
            "",
        ]
    )


VLLM = "\n".join(
    [
        "INFO 11-24 11:44:17 [core.py:93] Initializing a V1 LLM engine (v0.22.1) with config: model='/m', enforce_eager=False",
        "INFO 11-24 11:44:27 [gpu_model_runner.py:5] Graph capturing finished in 5 secs, took 0.65 GiB",
        "",
    ]
)


def compared(tmp_path: Path, base: str, new: str) -> Comparison:
    files = [tmp_path / "base.log", tmp_path / "new.log"]
    for file, text in zip(files, (base, new), strict=True):
        file.write_text(text)
    return compare_logs(str(files[0]), str(files[1]))


def row(comparison: Comparison, name: str) -> Row:
    (found,) = [one for one in comparison.rows if one.name == name]
    return found


def test_a_log_compared_with_itself_is_silent(tmp_path: Path) -> None:
    for text in (start(), start() + start(decode_gib=0.71, hour=6), VLLM):
        comparison = compared(tmp_path, text, text)
        assert comparison.rows and comparison.quiet and not comparison.findings("any")


def test_one_start_on_each_side_decides_nothing_and_what_changed_is_told(tmp_path: Path) -> None:
    comparison = compared(tmp_path, start(), start(decode_gib=0.99, sizes=(1, 2, 4, 8, 16), tokens=900))
    grown = row(comparison, "decode graph_bytes")
    assert (grown.verdict, grown.reason) == ("undecided", ALONE)
    assert grown.base == pytest.approx(0.69 * 2**30), "of the ranks the one with the most"
    changes = {change.what: (change.base, change.new) for change in comparison.changes}
    assert changes["decode full capture sizes"] == ("4 sizes 1…8", "5 sizes 1…16")
    assert changes["KV tokens"] == ("1,000", "900")
    text = as_table(comparison)
    assert max(map(len, text.splitlines())) <= 80
    assert "707 MiB → 1014 MiB" in text and "1 start)" in text and "process" not in text


def test_several_starts_in_a_log_show_how_far_they_disagree(tmp_path: Path) -> None:
    before = "".join(start(seconds=3.3 + 0.01 * i, hour=i) for i in range(4))
    after = "".join(start(decode_gib=0.99, seconds=3.32 - 0.01 * i, hour=i) for i in range(4))
    comparison = compared(tmp_path, before, after)
    assert (comparison.base.processes, comparison.new.processes) == (4, 4)
    assert row(comparison, "decode graph_bytes").verdict == "larger"
    assert row(comparison, "decode capture_s").verdict in ("same", "undecided")
    assert {one.name for one in comparison.findings("memory")} == {"decode graph_bytes", "all phases graph_bytes"}


def test_what_an_engine_rounds_away_is_no_difference(tmp_path: Path) -> None:
    before = "".join(start(hour=i) for i in range(3))
    after = "".join(start(decode_gib=0.70, seconds=3.31, hour=i) for i in range(3))
    comparison = compared(tmp_path, before, after)
    assert {one.verdict for one in comparison.rows} == {"same"}
    assert row(comparison, "decode graph_bytes").ratio == pytest.approx(0.70 / 0.69, rel=1e-6)


def test_earlier_starts_with_other_lists_are_left_out(tmp_path: Path) -> None:
    comparison = compared(tmp_path, start(sizes=(1, 2)) + start(hour=6), start())
    assert comparison.base.processes == 1
    assert comparison.notes == ("baseline: 1 earlier start with other lists left out",)
    assert {one.verdict for one in comparison.rows} == {"same"}


def test_a_list_with_the_same_ends_is_told_by_what_it_lacks(tmp_path: Path) -> None:
    (change,) = [
        one
        for one in compared(tmp_path, start(sizes=(1, 2, 4, 8)), start(sizes=(1, 3, 4, 8))).changes
        if one.what == "decode full capture sizes"
    ]
    assert (change.base, change.new) == ("4 sizes 1…8, with 2", "4 sizes 1…8, with 3")


def test_logs_of_different_engines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="different engines: sglang against vllm"):
        compared(tmp_path, start(), VLLM)


def run(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["compare", *(str(one) for one in arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_the_command_takes_logs_and_says_what_it_cannot_compare(tmp_path: Path) -> None:
    base, new, other, folder = (tmp_path / name for name in ("base.log", "new.log", "other.txt", "folder"))
    base.write_text("".join(start(hour=i) for i in range(3)))
    new.write_text("".join(start(decode_gib=0.99, hour=i) for i in range(3)))
    other.write_text("nothing of interest\n")
    folder.mkdir()
    assert run(base, base)[0] == 0 and "No difference" in run(base, base)[1]
    code, out, _ = run(base, new, "--json", "-o", tmp_path / "page.html")
    told = validate(out)
    assert (code, told["compared"], told["status"]) == (1, "logs", "findings")
    assert "start" in (tmp_path / "page.html").read_text()
    for arguments, message in (
        ((base, other), "says anything of graphs"),
        ((base, folder), "a server log cannot be compared with a sweep"),
        ((folder, base), "a server log cannot be compared with a sweep"),
        ((base, tmp_path / "none.log"), "no such file"),
    ):
        code, out, error = run(*arguments)
        assert (code, out) == (2, "") and message in error and "Traceback" not in error


@given(text=st.text(max_size=200), cut=st.integers(0, 2000))
@settings(max_examples=40, deadline=None)
def test_any_text_and_any_cut_is_compared_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    try:
        comparison = compared(folder, start()[:cut] + text, start())
    except InputError as error:
        assert error.exit_code == 2
    else:
        assert all(len(line) <= 80 for line in as_table(comparison).splitlines())
