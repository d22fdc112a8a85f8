"""A server's log against the recommendation it runs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from graphtune.cli.app import app
from graphtune.errors import Finding
from graphtune.tune.log_summary import summarise_file
from graphtune.tune.recommend import Question, recommend
from graphtune.tune.recommendation_json import as_json
from graphtune.tune.verify_log import LogVerification, verify_log
from graphtune.tune.verify_text import log_text
from tests.tune.answers import SPARSE

DATA: dict[str, Any] = json.loads(json.dumps(as_json(recommend(SPARSE, Question(gpu_mem="80", engines=("sglang",))))))
SIZES = DATA["engines"]["sglang"]["decode"]["capture_sizes"]
TOP = DATA["workload"]["max_running_requests"]
KV = DATA["engines"]["sglang"]["memory"]["kv_tokens"]


def log(folder: Path, *, sizes: list[int] = SIZES, kv_tokens: int = KV, running: str = "uniform") -> Path:
    """A server's log of one start. ``running``: batches as recommended for, all at one size, or off graph."""
    stamp = "[2026-07-01 10:00:00 TP0]"
    lines = [
        f"{stamp} KV Cache is allocated. #tokens: {kv_tokens}, K size: 3.00 GB, V size: 3.00 GB",
        f"{stamp} Capture cuda graph begin. This can take up to several minutes. avail mem=9.00 GB",
        f"{stamp} Capture cuda graph bs {sizes}",
        f"{stamp} Capture cuda graph end. Time elapsed: 3.28 s. mem usage=0.69 GB. avail mem=8.31 GB.",
    ]
    batches = range(1, TOP + 1) if running != "steady" else [max(SIZES)] * 40
    graph = running != "eager"
    lines += [
        f"{stamp} Decode batch. #running-req: {n}, #token: {n * 100}, token usage: 0.10, cuda graph: {graph}, "
        f"gen throughput (token/s): 900.00, #queue-req: 0"
        for n in batches
    ]
    file = folder / "server.log"
    file.write_text("\n".join(lines) + "\n")
    return file


def verified(file: Path, data: dict[str, Any] = DATA) -> LogVerification:
    return verify_log(data, None, summarise_file(str(file)))


def outside(found: LogVerification) -> set[str]:
    return {check.name for check in found.checks if check.verdict == "outside"}


def test_a_server_that_does_as_recommended_passes(tmp_path: Path) -> None:
    found = verified(log(tmp_path))
    assert found.engine == "sglang" and outside(found) == set()
    names = {check.name for check in found.checks if check.verdict == "ok"}
    assert names == {"captured sizes", "KV tokens", "steps on graphs", "traffic in other buckets"}
    shown = {check.name: check.measured for check in found.checks}
    assert shown["seconds of capture"] == 3.28


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"sizes": [*SIZES, 200]}, {"captured sizes"}),
        ({"sizes": SIZES[1:]}, {"captured sizes"}),
        ({"kv_tokens": int(KV * 0.97)}, {"KV tokens"}),
        ({"running": "eager"}, {"steps on graphs"}),
        ({"running": "steady"}, {"traffic in other buckets"}),
    ],
)
def test_what_differs_is_named(tmp_path: Path, change: dict[str, Any], names: set[str]) -> None:
    assert outside(verified(log(tmp_path, **change))) == names


def test_the_sizes_that_differ_are_listed(tmp_path: Path) -> None:
    found = verified(log(tmp_path, sizes=[*SIZES[1:], 200]))
    assert found.checks[0].reason == f"missing {SIZES[0]}; beyond it 200"


def test_a_log_of_another_engine_is_a_finding(tmp_path: Path) -> None:
    data = copy.deepcopy(DATA)
    data["engines"] = {"vllm": data["engines"]["sglang"]}
    with pytest.raises(Finding, match="no list for sglang"):
        verified(log(tmp_path), data)


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "rec.json"
    file.write_text(json.dumps(DATA))
    done = CliRunner().invoke(app, ["verify", str(file), "--log", str(log(tmp_path))])
    assert done.exit_code == 0 and "Everything is as stated." in done.stdout
    done = CliRunner().invoke(app, ["verify", str(file), "--log", str(log(tmp_path, kv_tokens=9)), "--json"])
    assert done.exit_code == 1 and json.loads(done.stdout)["passed"] is False
    done = CliRunner().invoke(app, ["verify", str(file), "--log", str(tmp_path / "none.log")])
    assert done.exit_code == 2 and "Traceback" not in done.output


def test_reasons_stand_below_the_row_they_are_of(tmp_path: Path) -> None:
    text = log_text(verified(log(tmp_path, sizes=SIZES[:1])))
    row = next(number for number, line in enumerate(text.splitlines()) if "captured sizes" in line)
    assert text.splitlines()[row].endswith("outside")
    assert text.splitlines()[row + 1].startswith("      missing ")
