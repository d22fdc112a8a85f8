from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.errors import InputError
from graphtune.tune.workload import DecodeShare, Workload, parse_workload, steady, uniform
from graphtune.tune.workloads.presets import batch, interactive, ramp
from graphtune.tune.workloads.trace import Trace
from graphtune.tune.workloads.traffic import read_traffic

rows = st.lists(
    st.fixed_dictionaries(
        {"requests": st.integers(1, 4096), "weight": st.floats(0, 1e9)},
        optional={"mean_kv_tokens": st.none() | st.floats(1, 1e6)},
    ),
    min_size=1,
)


@given(rows)
def test_a_histogram_reads_back_what_was_written(decode: list[dict[str, Any]]) -> None:
    text = json.dumps({"kind": "histogram", "decode": decode})
    if not any(row["weight"] for row in decode):
        with pytest.raises(InputError):
            parse_workload(text, "w.json")
        return
    workload = parse_workload(text, "w.json")
    assert [share.requests for share in workload.decode] == [row["requests"] for row in decode]
    assert workload.max_running_requests == max(row["requests"] for row in decode)
    assert parse_workload(json.dumps(workload.as_dict()), "w.json") == workload


@given(rows, st.integers(1, 4096))
def test_cutting_traffic_keeps_exactly_the_steps_that_can_occur(decode: list[dict[str, Any]], top: int) -> None:
    shares = tuple(DecodeShare(row["requests"], row["weight"]) for row in decode)
    workload = Workload(shares, (), max(s.requests for s in shares), None, "test", "per_step")
    cut = workload.up_to(top)
    assert [s for s in shares if s.requests <= top] == list(cut.decode)
    assert cut.max_running_requests <= top


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"kind": "trace"}, "kind"),
        ({"schema": 2}, "schema"),
        ({"decode": []}, "decode"),
        ({"decode": {"requests": 1}}, "decode"),
        ({"decode": [3]}, "decode[0]"),
        ({"decode": [{"requests": 0, "weight": 1}]}, "decode[0].requests"),
        ({"decode": [{"requests": 1.5, "weight": 1}]}, "decode[0].requests"),
        ({"decode": [{"requests": True, "weight": 1}]}, "decode[0].requests"),
        ({"decode": [{"requests": 4, "weight": -1}]}, "decode[0].weight"),
        ({"decode": [{"requests": 4, "weight": "1"}]}, "decode[0].weight"),
        ({"decode": [{"requests": 4}]}, "decode[0].weight"),
        ({"decode": [{"requests": 4, "weight": 1, "mean_kv_tokens": 0}]}, "decode[0].mean_kv_tokens"),
        ({"decode": [{"requests": 4, "weight": 1, "tokens": 3}]}, "decode[0]"),
        ({"decode": [{"requests": 4, "weight": 0}]}, "decode"),
        ({"prefill": [{"tokens": 0, "weight": 1}]}, "prefill[0].tokens"),
        ({"max_running_requests": 2}, "max_running_requests"),
        ({"weighting": "per_day"}, "weighting"),
        ({"lines_skipped": -1}, "lines_skipped"),
        ({"sizes": []}, "w.json"),
    ],
)
def test_bad_files_are_refused_with_file_and_key(change: dict[str, Any], where: str) -> None:
    good = {"kind": "histogram", "decode": [{"requests": 4, "weight": 1}]}
    with pytest.raises(InputError) as caught:
        parse_workload(json.dumps({**good, **change}), "w.json")
    assert caught.value.where is not None
    assert caught.value.where.startswith("w.json") and caught.value.where.endswith(where)


@pytest.mark.parametrize(
    "text", ["[1]", "{", '{"kind": "histogram", "decode": [{"requests": 1, "weight": NaN}]}', "\xff"]
)
def test_text_that_is_no_histogram_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_workload(text.encode("latin-1"), "w.json")


def test_presets() -> None:
    assert read_traffic("uniform", 3) == uniform(3)
    assert read_traffic("uniform 5", 3) == uniform(5)
    assert read_traffic("steady 32", 3) == read_traffic("steady:32", 3) == steady(32)
    assert [read_traffic(name, 8) for name in ("ramp", "interactive", "batch")] == [ramp(8), interactive(8), batch(8)]


@pytest.mark.parametrize(
    "text",
    ["steady", "steady x", "steady 0", "steady -3", "no/such/file.json", "steady 1 2", "ramp 0", "batch many", "", "."],
)
def test_what_is_no_preset_and_no_file_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        read_traffic(text, 8)
    assert caught.value.where in ("--workload", None)


@pytest.mark.parametrize("name", ["traffic.json", "traffic"])
def test_the_content_of_a_file_says_what_it_is(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(uniform(4).as_dict()))
    assert read_traffic(str(path), 99) == uniform(4)
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,5,7\n1.5,6,8\n")
    if name == "traffic":
        found = read_traffic(str(path), 99)
        assert isinstance(found, Trace) and found.arrivals_s.tolist() == [0.0, 1.5]
        path.write_text(json.dumps(found.as_dict()))
    else:
        path.write_text(json.dumps({"schema": 1, "kind": "trace", "arrivals_s": [0], "prompt_tokens": [1]}))
        with pytest.raises(InputError, match="must be a list"):
            read_traffic(str(path), 99)
        return
    assert isinstance(read_traffic(str(path), 99), Trace)
    path.write_text("requests,steps\n4,10\n9,1\n")
    histogram = read_traffic(str(path), 99)
    assert isinstance(histogram, Workload) and [share.requests for share in histogram.decode] == [4, 9]
