"""`graphtune log summary` and `/server_info`, which is read like a log."""

# ruff: noqa: E501 - log lines are as long as servers print them

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graphtune.engines.base import GIB
from graphtune.errors import InputError
from graphtune.tune.log_records import LogSummary
from graphtune.tune.log_summary import contradictions, summarise, summarise_file


def gib(amount: float) -> int:
    return round(amount * GIB)


def summary(*lines: str) -> LogSummary:
    return summarise(io.BytesIO("\n".join(lines).encode()), "test.log")


def decode(requests: int, graph: bool | None, second: int = 7, rank: str = "TP0") -> str:
    field = "" if graph is None else f" cuda graph: {graph},"
    return (
        f"[2026-03-04 05:06:{second:02d} {rank}] Decode batch, #running-req: {requests}, #token: 600, token usage: 0.10,"
        f"{field} gen throughput (token/s): 1.0, #queue-req: 0"
    )


SGLANG_START = [
    "[2026-03-04 05:00:00] server_args=ServerArgs(model_path='/m', tp_size=2, max_running_requests=4096, mem_fraction_static=0.830)",
    "[2026-03-04 05:00:01 TP0] Init torch distributed begin.",
    "[2026-03-04 05:00:01 TP1] Init torch distributed begin.",
    "[2026-03-04 05:00:02 TP0] Load weight end. elapsed=0.1 s, type=X, avail mem=50.00 GB, mem usage=15.00 GB.",
    "[2026-03-04 05:00:03 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 1000, K size: 2.00 GB, V size: 2.00 GB",
    "[2026-03-04 05:00:03 TP1] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 1000, K size: 2.00 GB, V size: 2.00 GB",
    "[2026-03-04 05:00:04 TP0] Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[128, 256], avail mem=10.00 GB",
    "[2026-03-04 05:00:05 TP0] Capture target prefill CUDA graph end. elapsed=2.00 s, mem usage=0.50 GB, avail mem=9.50 GB.",
    "[2026-03-04 05:00:05 TP0] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2, 4, 8, 32], avail mem=9.50 GB",
    "[2026-03-04 05:00:05 TP1] Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2, 4, 8, 32], avail mem=9.00 GB",
    "[2026-03-04 05:00:06 TP0] Capture target decode CUDA graph end. elapsed=1.00 s, mem usage=0.25 GB, avail mem=9.25 GB.",
    "[2026-03-04 05:00:06 TP1] Capture target decode CUDA graph end. elapsed=3.00 s, mem usage=1.00 GB, avail mem=8.00 GB.",
]


def info(graph: object, tokens: int = 1000, running: int = 4096) -> str:
    state = {
        "memory_usage": {"weight": 15.0, "kvcache": 4.0, "token_capacity": tokens, "graph": graph},
        "effective_max_running_requests_per_dp": running,
    }
    return json.dumps({"model_path": "/secret", "tp_size": 2, "version": "0.5.23", "internal_states": [state]})


def test_server_info_is_read_like_a_log(tmp_path: Path) -> None:
    file = tmp_path / "info.json"
    file.write_text(info({"prefill": 0.5, "decode": 0.25, "draft_decode": 0.0}))
    found = summarise_file(str(file))
    last = found.boots[-1]
    assert (found.kind, last.version, last.kv_tokens) == ("server_info", "0.5.23", 1000)
    assert last.graph_bytes == gib(0.75)
    assert last.settings == {"tp_size": 2, "max_running_requests": 4096}
    assert "secret" not in repr(found).replace(str(tmp_path), "")


def test_contradictions_between_a_log_and_the_server_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "info.json"
    log = summary(*SGLANG_START)
    file.write_text(info({"prefill": 0.5, "decode": 0.5}))
    assert contradictions([log, summarise_file(str(file))]) == ()
    file.write_text(info(0.25, tokens=900, running=64))
    found = contradictions([log, summarise_file(str(file))])
    assert any("KV tokens: the log says 1,000, /server_info 900" in text for text in found)
    assert any("graph memory" in text and "one phase only" in text for text in found)
    assert any("max_running_requests" in text for text in found)


def run(*args: str, text: str | None = None) -> tuple[int, str]:
    from graphtune.cli.app import app

    result = CliRunner().invoke(app, ["log", "summary", *args], input=text)
    return result.exit_code, result.output


def test_the_command_prints_lines_and_json(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text("\n".join([*SGLANG_START, decode(67, False), 'INFO: 1.2.3.4:5 - "GET / HTTP/1.1" 200 OK']))
    code, text = run(str(file))
    assert code == 0
    assert "capture target decode full [TP1]: 5 graphs, sizes 1…32 requests, 1.00 GiB, 3.00 s" in text
    assert "graph memory: 1.00 GiB a rank" in text
    assert "KV cache: 1,000 tokens" in text
    assert "100.0% above the largest size 32" in text
    assert "1 http" in text
    code, text = run(str(file), "--json")
    data = json.loads(text)
    assert data["files"][0]["boots"][0]["graph_bytes"] == gib(1)
    assert "1.2.3.4" not in text


def test_gzip_and_standard_input_are_read(tmp_path: Path) -> None:
    file = tmp_path / "server.log.gz"
    file.write_bytes(gzip.compress("\n".join(SGLANG_START).encode()))
    assert summarise_file(str(file)).boots[-1].graph_bytes == gib(1)
    code, text = run("-", "--json", text="\n".join(SGLANG_START))
    assert code == 0
    assert json.loads(text)["files"][0]["lines"] == len(SGLANG_START)


@pytest.mark.parametrize("content", ["", "hello\nworld\n", "{}", "\x00\x01"])
def test_a_file_that_says_nothing_is_bad_input(tmp_path: Path, content: str) -> None:
    file = tmp_path / "other.txt"
    file.write_text(content)
    with pytest.raises(InputError, match="says anything of graphs"):
        summarise_file(str(file))
    assert run(str(file))[0] == 2
    assert run(str(tmp_path / "missing.log"))[0] == 2
    assert run(str(tmp_path))[0] == 2
