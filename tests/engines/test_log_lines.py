"""Lines whatever carried them: prefixes, colour, JSON, gzip, very long ones; and what is never stored."""

# ruff: noqa: E501 - log lines are as long as servers print them

from __future__ import annotations

import gzip
import io
import json

import pytest

from graphtune.engines import events as ev
from graphtune.engines.log_lines import blocks, pieces, rank, stamp
from graphtune.engines.log_reader import LogReader
from tests.engines.log_messages import S, only

DECODE = "Decode batch, #running-req: 5, #token: 6, token usage: 0.1, cuda graph: True, gen throughput (token/s): 1.0, #queue-req: 0"


@pytest.mark.parametrize(
    ("prefix", "at", "who"),
    [
        ("sglang-1  | [2026-03-04 05:06:07 TP0] ", "2026-03-04 05:06:07", "TP0"),
        ("2026-07-08T22:40:04.437601673Z [2026-03-04 05:06:07 TP0] ", "2026-03-04 05:06:07", "TP0"),
        ("2026-07-08T22:40:04.437Z stdout F ", "2026-07-08 22:40:04", ""),
        ("Nov 30 02:24:29 node7 sglang[812]: [2026-03-04 05:06:07 PP1 TP0] ", "2026-03-04 05:06:07", "PP1 TP0"),
        (
            "\x1b[36m(RayWorkerWrapper pid=12, ip=10.0.0.9)\x1b[0m [2026-03-04 05:06:07 DP0 TP3 EP1] ",
            "2026-03-04 05:06:07",
            "DP0 TP3 EP1",
        ),
        ("\x1b[32m[2026-03-04 05:06:07 TP0]\x1b[0m ", "2026-03-04 05:06:07", "TP0"),
        ("", None, ""),
    ],
)
def test_prefixes(prefix: str, at: str | None, who: str) -> None:
    event = only(prefix + DECODE)
    assert isinstance(event, ev.Running)
    assert (event.at, event.rank, event.requests) == (at, who, 5)


@pytest.mark.parametrize(
    ("prefix", "who"),
    [
        ("(VllmWorkerProcess pid=90) INFO 01-02 03:04:05 [x.py:1] ", ""),
        ("(VllmWorker rank=0 pid=401) INFO 01-02 03:04:05 [x.py:1] ", "RANK0"),
        ("(EngineCore_0 pid=4) INFO 01-02 03:04:05 [x.py:1] ", ""),
        ("(EngineCore_DP0 pid=4) (Worker_TP0 pid=5) WARNING 01-02 03:04:05 [x.py:1] ", "DP0 TP0"),
        ("(Worker_DP1_TP1_EP3 pid=4) INFO 01-02 03:04:05 [x.py:1] ", "DP1 TP1 EP3"),
    ],
)
def test_vllm_prefixes(prefix: str, who: str) -> None:
    event = only(prefix + "Available KV cache memory: 1.00 GiB")
    assert isinstance(event, ev.KVSize)
    assert event.rank == who


def test_stamps_without_a_year_take_the_container_stamp() -> None:
    assert stamp("2026-07-08T22:40:04.43Z (EngineCore pid=542) INFO 07-08 22:40:04 [x.py:1] ") == "2026-07-08 22:40:04"
    assert stamp("INFO 07-08 22:40:04 [x.py:1] ") == "07-08 22:40:04"
    assert stamp("nothing") is None
    assert rank("TP3 DP1 ") == "DP1 TP3"


def test_a_runtime_that_wraps_lines_in_json() -> None:
    wrapped = json.dumps({"log": S + DECODE + "\n", "stream": "stderr", "time": "2026-01-01T00:00:00Z"})
    event = only(wrapped)
    assert isinstance(event, ev.Running)
    assert event.rank == "DP1 TP2"


def test_clients_and_prompts_are_not_stored() -> None:
    reader = LogReader()
    lines = [
        'INFO:     192.0.2.7:4242 - "POST /v1/completions HTTP/1.1" 200 OK',
        "INFO 01-02 03:04:05 [x.py:1] Received request: prompt: 'Decode batch, #running-req: 9, #token: 9, #queue-req: 0'",
        '[2026-03-04 05:06:07] Receive: obj=GenerateReqInput(text="Prefill batch, #new-seq: 1, #new-token: 5, ")',
    ]
    assert [event for line in lines for event in reader.line(line.encode())] == []
    assert reader.skipped == {"http": 1, "other": 2}


def test_gzip_and_very_long_lines() -> None:
    text = (S + DECODE + "\n") * 3
    packed = gzip.compress(text.encode())
    reader = LogReader()
    assert len(list(reader.events(gzip.GzipFile(fileobj=io.BytesIO(packed))))) == 3
    early = LogReader()
    list(early.events(gzip.GzipFile(fileobj=io.BytesIO(packed[:-12]))))
    assert early.lines <= 3
    long = b"x" * (5 << 20) + b"\n" + (S + DECODE).encode()
    reader = LogReader()
    assert len(list(reader.events(io.BytesIO(long)))) == 1
    assert reader.lines == 2
    assert max(len(line) for _, lines in blocks(io.BytesIO(long)) for line in lines) <= 1 << 20


def test_pieces_of_a_line() -> None:
    assert pieces(b"a\rb\r\n") == [b"a", b"b"]
    assert pieces(b"\x1b[31mred\x1b[0m") == [b"red"]
    assert pieces(b"{not json") == [b"{not json"]
