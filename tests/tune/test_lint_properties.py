"""What holds for the verdicts on any launch."""

from __future__ import annotations

import shlex
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from graphtune.engines import ENGINES
from graphtune.engines.base import DeviceFacts
from graphtune.engines.launch import Launch, split_options
from graphtune.tune.lint import DENSE_SHARE, lint_launch, thinned
from graphtune.tune.verdict import FAILING, MEANING, LintReport, Verdict, edit_text
from graphtune.yaml_source import parse_yaml

H100 = DeviceFacts(81559)


def lint(engine: str, flags: str, device: DeviceFacts = H100, yaml: str | None = None) -> LintReport:
    values, source = parse_yaml(yaml, "file.yaml") if yaml else (None, None)
    launch = Launch(options=split_options(shlex.split(flags))[1], settings=values, source=source)
    return lint_launch(ENGINES[engine], launch, device)


def of(report: LintReport, code: str) -> list[Verdict]:
    return [verdict for verdict in report.verdicts if verdict.code == code]


numbers = st.integers(-1, 700).map(str)
lists = st.lists(numbers, min_size=1, max_size=8)
vllm_flags = st.fixed_dictionaries(
    {},
    optional={
        "--max-num-seqs": numbers.map(lambda n: [n]),
        "--spec-tokens": st.integers(0, 8).map(lambda n: [str(n)]),
        "--max-cudagraph-capture-size": numbers.map(lambda n: [n]),
        "--cudagraph-capture-sizes": lists,
        "--max-num-batched-tokens": numbers.map(lambda n: [n]),
        "-cc.cudagraph_mode": st.sampled_from([["FULL"], ["NONE"], ["PIECEWISE"], ["FULL_DECODE_ONLY"]]),
        "--attention-backend": st.sampled_from([["FLASHINFER"], ["CUTLASS_MLA"], ["TRITON_ATTN"]]),
        "--enforce-eager": st.just([]),
    },
)
sglang_flags = st.fixed_dictionaries(
    {},
    optional={
        "--max-running-requests": numbers.map(lambda n: [n]),
        "--cuda-graph-max-bs-decode": numbers.map(lambda n: [n]),
        "--cuda-graph-bs-decode": lists,
        "--cuda-graph-bs-prefill": lists,
        "--chunked-prefill-size": numbers.map(lambda n: [n]),
        "--speculative-algorithm": st.just(["EAGLE"]),
        "--disable-cuda-graph-padding": st.just([]),
        "--pp-size": st.just(["2"]),
    },
)
launches = st.one_of(st.tuples(st.just("vllm"), vllm_flags), st.tuples(st.just("sglang"), sglang_flags))


@settings(max_examples=60, deadline=None)
@given(launches)
def test_an_edit_mends_what_it_says_it_mends(case: tuple[str, dict[str, list[str]]]) -> None:
    engine, flags = case
    text = shlex.join([token for name, values in flags.items() for token in (name, *values)])
    report = lint(engine, text)
    order = [list(MEANING).index(verdict.code) for verdict in report.verdicts]
    assert order == sorted(order)
    assert report.exit_code == int(any(verdict.code in FAILING for verdict in report.verdicts))
    for verdict in report.verdicts:
        assert verdict.message
        if verdict.mended is None:
            assert verdict.edit == ()
            continue
        assert verdict.edit
        after = lint(engine, shlex.join(verdict.mended.args))
        alike = [
            v
            for v in of(after, verdict.code)
            if (v.phase, v.message, v.runner) == (verdict.phase, verdict.message, verdict.runner)
        ]
        assert alike == []


@given(st.lists(st.integers(1, 600), max_size=40), st.floats(0.001, 0.5))
def test_thinning_leaves_no_dense_neighbours_and_keeps_the_top(sizes: list[int], share: float) -> None:
    given_sizes = tuple(sorted(set(sizes)))
    kept = thinned(given_sizes, share)
    assert set(kept) <= set(given_sizes)
    assert kept[-1:] == given_sizes[-1:]
    assert all((b - a) / b >= share for a, b in pairwise(kept))


def test_edits_are_described_option_by_option() -> None:
    before = Launch(options=split_options(["--a", "1", "--b"])[1], settings={"k": {"x": 1}})
    after = Launch(options=split_options(["--a", "2", "--c"])[1], settings={"k": {"x": 2}, "n": 3})
    assert edit_text(before, after) == ("drop --b", "--a 1 → --a 2", "add --c", "k.x: 1 → 2", "add n: 3")


def test_the_default_share_is_a_share() -> None:
    assert 0 < DENSE_SHARE < 1
