from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from graphtune.engines import ENGINES
from graphtune.engines.base import DeviceFacts, Flags, GraphPlan, Serving
from graphtune.stats import Ratio
from graphtune.tune import bucket_worth
from graphtune.tune.recommend import Question, recommend
from graphtune.tune.recommendation_text import _compared, as_text, bucket_words, flag_lines, warnings_text
from tests.synthetic import MIB, cpu_sweep, h200_sweep, small_sweep

RICH = h200_sweep()
size_lists = st.lists(st.integers(1, 4096), min_size=1, max_size=120, unique=True).map(lambda s: tuple(sorted(s)))


@pytest.mark.parametrize(
    "question",
    [
        Question(),
        Question(gpu_mem="80", eager_overhead_us=8000.0),
        Question(gpu_mem="16"),
        Question(gpu_mem="80", max_graphs=3, max_running_requests=300),
        Question(gpu_mem="80", max_graph_bytes=MIB),
    ],
    ids=str,
)
def test_text_fits_eighty_columns(question: Question) -> None:
    answer = recommend(RICH, question)
    for line in (as_text(answer) + warnings_text(answer.warnings)).splitlines():
        assert len(line) <= 80, line
        assert "\x1b" not in line


def test_the_first_line_names_model_gpu_date_and_path() -> None:
    first = as_text(recommend(RICH)).splitlines()[0]
    assert first == "synthetic-8b on NVIDIA H200, 2026-01-02, reports/synthetic-8b-nvidia-h200"


def test_every_engine_shows_its_list_beside_its_default_and_no_graphs() -> None:
    text = as_text(recommend(RICH, Question(gpu_mem="80")))
    for name in ("SGLang", "vLLM", "TensorRT-LLM"):
        assert f"\n{name} " in text
    heads = [line for line in text.splitlines() if "engine default" in line]
    assert len(heads) == 3 and all("recommended" in line and "no graphs" in line for line in heads)
    assert "no graphs: graphtune's own eager path, a lower bound of a server's" in text
    assert "engine's reserve" in text and "--mem-fraction-static" in text


def test_figures_of_a_part_of_the_steps_say_of_which() -> None:
    of = small_sweep((1, 2, 4, 8))
    assert "all figures are of 50% of the steps asked for" in as_text(recommend(of, Question(max_running_requests=16)))
    assert "all figures are of" not in as_text(recommend(of, Question(max_running_requests=8)))


def test_what_does_not_fit_says_what_it_needs() -> None:
    text = " ".join(as_text(recommend(RICH, Question(gpu_mem="16", engines=("sglang",)))).split())
    assert "needed, KV for 1,024 tokens included, of 15.41 GiB: context" in text


def test_only_the_top_is_kept_for_coverage() -> None:
    for answer in recommend(RICH, Question(gpu_mem="80")).engines:
        decode = answer.decode
        assert decode is not None and decode.buckets
        idle = {"pays_back_s": bucket_worth.NEVER}
        buckets = tuple(replace(one, pays_back_s=None, absent=idle) for one in decode.buckets)
        words = " ".join(bucket_words(replace(answer, decode=replace(decode, buckets=buckets))))
        kept = words.split("as a server's is not: ")[1].split()[0]
        assert kept == str(decode.capture_sizes[-1])
        assert (
            f"of this list that do not pay back their capture in 30 days of serving: {decode.capture_sizes[0]}" in words
        )


def test_interpolated_and_bounded_figures_are_marked() -> None:
    text = as_text(recommend(RICH, Question(gpu_mem="80", max_running_requests=100, engines=("vllm",))))
    assert "~7." in text and "<= 108 MiB" in text


def test_a_cpu_answer_is_headed_as_no_advice() -> None:
    lines = as_text(recommend(cpu_sweep())).splitlines()
    assert "not advice" in lines[1]
    assert "not advice" not in as_text(recommend(RICH))


def test_warnings_carry_their_action() -> None:
    answer = recommend(RICH, Question(gpu_mem="80"))
    text = " ".join(warnings_text(answer.warnings).split())
    for one in answer.warnings:
        assert " ".join(f"warning: {one.message} {one.action}".split()) in text


@given(size_lists, st.none() | st.integers(1, 9999), st.sampled_from(sorted(ENGINES)), st.none() | st.just(0.8123))
def test_flags_survive_being_broken_into_lines(
    sizes: tuple[int, ...], limit: int | None, engine: str, fraction: float | None
) -> None:
    """A shell reads the printed lines as the very arguments, and YAML as the very values."""
    plan = GraphPlan(decode=sizes, mem_fraction=fraction)
    flags = ENGINES[engine].flags(plan, Serving(max_running_requests=limit), DeviceFacts(81559))
    lines = flag_lines(flags, 80)
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    if flags.yaml is not None:
        assert yaml.safe_load(text) == yaml.safe_load(flags.yaml)
        return
    read = [word for word in shlex.split(text.replace("\\\n", " "))]
    assert len(read) == len(flags.args)
    for word, asked in zip(read, flags.args, strict=True):
        assert (json.loads(word) == json.loads(asked)) if asked.startswith("{") else (word == asked)


def test_words_that_a_shell_would_split_are_quoted() -> None:
    lines = flag_lines(Flags(args=("--name", "it's a 'test'", "--flag")), 80)
    assert shlex.split("\n".join(lines).replace("\\\n", " ")) == ["--name", "it's a 'test'", "--flag"]


def test_a_workload_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "traffic.json"
    path.write_text(json.dumps({"kind": "histogram", "decode": [{"requests": 4, "weight": 1}], "lines_skipped": 3}))
    text = as_text(recommend(RICH, Question(workload=str(path))))
    assert "traffic.json" in text and "3 lines skipped" in text


def test_assumed_traffic_says_how_to_give_ones_own() -> None:
    text = " ".join(as_text(recommend(RICH, Question(gpu_mem="80"))).split())
    assert "That is assumed, the largest measured size" in text
    assert "--workload FILE or 'steady N', --max-running N, --context-len N" in text
    given = as_text(recommend(RICH, Question(gpu_mem="80", workload="steady 8", context_tokens=1024)))
    assert "assumed:" not in given and "always 8 running" in given


def test_gains_are_shown_as_each_process_saw_them() -> None:
    text = as_text(recommend(RICH, Question(gpu_mem="80", workload="steady 1", engines=("sglang",))))
    row = next(line for line in text.splitlines() if line.strip().startswith("recommended is"))
    assert "same within 1.0%" in row and "% shorter" in row


@pytest.mark.parametrize(
    ("by_process", "combined", "shown"),
    [
        ((1.097, 1.115), 1.106, "9.7-11.5% longer"),
        ((0.976,), 0.97, "2.4-3.0% shorter"),
        ((0.95, 0.95), 0.95, "5.0% shorter"),
        ((), 1.2, "20.0% longer"),
    ],
)
def test_a_range_of_gains_ascends_and_holds_what_the_figures_show(
    by_process: tuple[float, ...], combined: float, shown: str
) -> None:
    answer = recommend(h200_sweep(), Question(gpu_mem="80", engines=("sglang",))).engine("sglang")
    assert answer.eager is not None
    assert _compared(replace(answer.eager, chosen_over_this=Ratio(combined, by_process))) == shown
