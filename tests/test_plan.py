"""What a recipe makes of its axes: lists, order of capture, what is timed where, controls and skips."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphtune.decode_cells import EVERY_BUCKET_UP_TO, EVERY_RAW_UP_TO, padded_steps
from graphtune.engines.base import DeviceFacts
from graphtune.errors import InputError
from graphtune.plan import Plan
from graphtune.planner import follow_up, plan_sweep
from graphtune.recipe import load_recipe, parse_recipe
from graphtune.store import decode_cell, encode_cell

ROOT = Path(__file__).resolve().parent.parent
H200 = DeviceFacts(143771, (9, 0), "NVIDIA H200")
HEAD = "name: mine\nmodel: configs/tiny-llama.json\n"


def plan(keys: str, device: Any = "cpu", facts: DeviceFacts | None = None, **options: Any) -> Plan:
    loaded = parse_recipe(HEAD + keys, "mine.yaml", ROOT / "recipes")
    return plan_sweep(loaded, device=device, device_facts=facts, **options)


def settings_of(made: Plan) -> list[tuple[str, str, str, str]]:
    return [(one.name, one.order, one.output, one.workspace) for cell in made.cells for one in cell.lists]


def names_of(made: Plan) -> list[list[str]]:
    return [[one.name for one in cell.lists] for cell in made.cells if cell.purpose == "main"]


NAMES = ("sglang", "vllm", "tensorrt_llm", "powers_of_two")
TWO = "decode:\n  lists: [{name: a, sizes: [1, 2, 8]}, {name: b, sizes: [1, 4]}]\n  contexts: [64]\n"


def test_latency_is_timed_once_on_the_union_of_all_lists() -> None:
    made = plan(TWO + "  order: [ascending, descending]\n")
    cell = made.cells[0]
    assert cell.lists[0].sizes == (1, 2, 4, 8)
    assert names_of(made) == [["union"], ["a", "a"], ["b", "b"]]
    assert settings_of(made)[:3] == [
        ("union", "descending", "shared", "shared"),
        ("a", "ascending", "shared", "shared"),
        ("a", "descending", "shared", "shared"),
    ]
    assert [(at.sizes, at.context_tokens, at.executions) for at in cell.latency] == [
        ((1, 2, 4, 8), 64, ("graph", "eager"))
    ]
    assert all(other.latency == () for other in made.cells[1:])


def test_a_list_that_is_the_union_is_captured_once_and_first() -> None:
    made = plan("decode: {lists: [{name: b, sizes: [1, 4]}, {name: all, sizes: [1, 2, 4]}], contexts: [64]}\n")
    assert names_of(made) == [["all"], ["b"]]


def test_one_list_needs_no_union_and_no_control() -> None:
    made = plan("decode: {lists: [{name: a, sizes: [1, 2]}], contexts: [64]}\n")
    assert [[one.name for one in cell.lists] for cell in made.cells] == [["a"]]


def test_without_contexts_nothing_is_timed() -> None:
    made = plan("decode: {lists: [{name: a, sizes: [1, 2]}, {name: b, sizes: [1]}], contexts: []}\n")
    assert names_of(made) == [["a"], ["b"]]
    assert made.cells[0].latency == ()


def test_sharing_together_pairs_and_product_combines() -> None:
    axes = "  output: [shared, per_size]\n  workspace: [shared, per_size]\n"
    one = "decode:\n  lists: [{name: a, sizes: [1, 2]}]\n"
    together = {setting[2:] for setting in settings_of(plan(one + axes))}
    product = {setting[2:] for setting in settings_of(plan(one + axes + "  sharing: product\n"))}
    assert together == {("shared", "shared"), ("per_size", "per_size")}
    assert product == together | {("shared", "per_size"), ("per_size", "shared")}


def test_equal_lists_are_captured_once_under_both_names() -> None:
    made = plan("decode: {lists: [{name: a, sizes: [2, 1]}, {name: b, sizes: [1, 2]}, {name: c, sizes: [1]}]}\n")
    assert names_of(made) == [["a+b"], ["c"]]
    assert made.notes == ("the lists a, b have the same sizes and are captured once",)


def test_sizes_timed_that_no_list_captures_are_said_to_have_no_replay() -> None:
    made = plan("decode: {lists: [{name: a, sizes: [1, 4]}], contexts: [{tokens: 64, sizes: [1, 3]}]}\n")
    assert [(skip.what, skip.reason) for skip in made.skips] == [
        ("replays of 3 requests at context 64", "no list captures them; add the sizes to one")
    ]
    assert made.cells[0].latency[0].sizes == (1, 3), "eager steps are timed all the same"


def test_repeated_sizes_are_accepted_with_a_note() -> None:
    made = plan("decode: {lists: [{name: a, sizes: [4, 1, 4, 1]}]}\n")
    assert made.cells[0].lists[0].sizes == (1, 4)
    assert made.notes == ("mine.yaml:3: decode.lists[0]: 1, 4 is written more than once and counts once",)


def test_lists_of_one_name_stay_apart() -> None:
    made = plan("decode: {lists: [{engine: sglang, max: 8}, {engine: sglang, max: 16}]}\n")
    assert names_of(made) == [["sglang-2"], ["sglang"]]


@pytest.mark.parametrize(
    ("choice", "device", "sizes"),
    [
        ("{engine: sglang, max: 256}", H200, (1, 2, 4, 8, 12, *range(16, 257, 8))),
        ("{engine: sglang, max: 100}", DeviceFacts(8192), (1, 2, 4, 8, 12, *range(16, 97, 8), 100)),
        ("sglang", DeviceFacts(24564), (1, 2, 4, 8, 12, 16, 24, 32, 40, 48)),
        ("powers_of_two", H200, (1, 2, 4, 8, 16, 32, 64, 128, 256)),
        ("{engine: powers_of_two, max: 24}", H200, (1, 2, 4, 8, 16)),
        ("{engine: vllm, max: 16}", H200, (1, 2, 4, 8, 16)),
    ],
)
def test_engine_lists(choice: str, device: DeviceFacts, sizes: tuple[int, ...]) -> None:
    made = plan(f"decode: {{lists: [{choice}], contexts: [64]}}\n", "cuda", device)
    assert made.cells[0].lists[0].sizes == sizes


def test_powers_of_two_reach_as_far_as_the_other_lists() -> None:
    made = plan("decode: {lists: [powers_of_two, {name: a, sizes: [1, 40]}], contexts: []}\n")
    by_name = {one.name: one.sizes for cell in made.cells for one in cell.lists}
    assert by_name["powers_of_two"] == (1, 2, 4, 8, 16, 32)


def test_a_recipes_processes_repeat_what_tells_the_noise() -> None:
    made = plan(TWO + "processes: 2\n")
    assert names_of(made) == [["union"], ["a"], ["b"], ["union"], ["a"]]
    # What padding takes is timed once.
    assert any(at.padded for at in made.cells[0].latency)
    assert made.cells[3].latency == tuple(replace(at, padded=()) for at in made.cells[0].latency)


@given(st.lists(st.integers(1, 600), min_size=1, max_size=60, unique=True).map(sorted))
def test_padded_steps_replay_measured_sizes_in_larger_ones(sizes: list[int]) -> None:
    made = padded_steps(tuple(sizes))
    pairs = {(one.raw_size, bucket) for one in made for bucket in one.buckets}
    assert all(raw < bucket and {raw, bucket} <= set(sizes) for raw, bucket in pairs)
    timed = {bucket for _, bucket in pairs}
    assert timed >= {size for size in sizes[1:] if size <= EVERY_BUCKET_UP_TO} | set(sizes[1:][-1:])
    assert all((sizes[0], size) in pairs for size in sizes[1:] if size <= EVERY_RAW_UP_TO)
    skipped = [size for size in sizes[1:] if size not in timed]
    assert all(sizes[sizes.index(size) + 1] in timed for size in skipped)


def test_a_large_bucket_is_timed_half_full_and_not_nearly_empty() -> None:
    by_raw = {one.raw_size: one.buckets for one in padded_steps((1, 2, 4, 8, 16, 32, 64, 96, 128, 136, 144, 152))}
    assert by_raw[4] == (8, 16, 32) and by_raw[8] == (16, 32, 64) and by_raw[16] == (32, 64, 96, 128)
    assert by_raw[64] == (96, 128, 136, 152) and by_raw[128] == (136, 152)


def test_rounds_repeat_whole_cells_and_controls_come_once() -> None:
    recipe = TWO + "  order: [descending, ascending]\n"
    made = plan(recipe, processes=3)
    kinds = [(cell.purpose, cell.process, len(cell.lists)) for cell in made.cells]
    assert kinds == [("main", n, lists) for n in (1, 2, 3) for lists in (1, 2, 2)] + [("control", 1, 1)]
    # Outputs are checked in the first process only.
    assert made.cells[0] == replace(made.cells[3], process=1, gate=True)
    assert [cell.gate for cell in made.cells] == [True] * 3 + [False] * 6 + [True]
    assert len({cell.id for cell in made.cells}) == 10
    control = made.cells[-1]
    assert control.lists[0] in (*made.cells[1].lists[1:], *made.cells[2].lists[1:])
    assert plan(recipe, processes=3) == made


def test_a_tenth_of_the_lists_is_measured_again_alone() -> None:
    lists = ", ".join(f"{{name: l{size}, sizes: [1, {size}]}}" for size in range(2, 18))
    axes = "order: [descending, ascending], output: [shared, per_size], workspace: [shared, per_size]"
    made = plan(f"decode: {{lists: [{lists}], {axes}, contexts: [64]}}\n")
    main = [cell for cell in made.cells if cell.purpose == "main"]
    controls = [cell for cell in made.cells if cell.purpose == "control"]
    assert [bool(cell.latency) for cell in main] == [True] + [False] * 16
    # A cell holds the four settings of one set of sizes; the list that is timed has a cell of its own here.
    assert [len(cell.lists) for cell in main] == [1] + [4] * 16
    assert all(len({one.sizes for one in cell.lists}) == 1 for cell in main)
    assert len(controls) == round(16 * 3 / 10)
    other_seed = plan(f"seed: 1\ndecode: {{lists: [{lists}], {axes}, contexts: [64]}}\n")
    assert [cell.lists for cell in other_seed.cells[-5:]] != [cell.lists for cell in controls]


def test_the_pool_holds_every_step_and_the_sink_page() -> None:
    made = plan(
        "page_size: 16\ndecode: {lists: [{name: a, sizes: [1, 8]}], contexts: [100, {tokens: 1000, sizes: [1]}]}"
    )
    assert made.cells[0].kv_tokens == (8 * 8 + 1) * 16  # 116 tokens take 8 pages
    assert plan("kv_tokens: 5000\npage_size: 16\ndecode: {lists: [{name: a, sizes: [1]}]}").cells[0].kv_tokens == 5008


def test_steps_that_do_not_fit_are_skipped_with_a_reason() -> None:
    made = plan("kv_tokens: 3000\ndecode: {lists: [{name: a, sizes: [1, 2, 4, 8]}], contexts: [64, 1000]}")
    assert [(at.sizes, at.context_tokens) for at in made.cells[0].latency] == [((1, 2, 4, 8), 64), ((1, 2), 1000)]
    assert [skip.what for skip in made.skips] == ["step times of 4, 8 requests at context 1000"]
    assert made.skips[0].reason == "4 requests take 4112 KV tokens; the recipe's 3000 KV tokens leaves 3008"


def test_the_devices_memory_bounds_the_pool() -> None:
    recipe = ROOT / "recipes/llama-3.1-8b.yaml"
    pools = {}
    for mib in (143771, 81559, 24564):
        made = plan_sweep(load_recipe(recipe), device="cuda", device_facts=DeviceFacts(mib, (9, 0)))
        pools[mib] = made.cells[0].kv_tokens
        weights, kv_token = 16_060_522_496, 131_072
        assert weights + made.cells[0].kv_tokens * kv_token < mib * 1024 * 1024
        assert bool(made.skips) == (mib < 100_000)
    assert pools[143771] > pools[81559] > pools[24564] > 50_000
    with pytest.raises(InputError, match="weights leave no room for a KV cache"):
        plan_sweep(load_recipe(recipe), device="cuda", device_facts=DeviceFacts(16376))
    with pytest.raises(InputError, match="kv_tokens: 999999999 KV tokens do not fit the device"):
        plan("kv_tokens: 999999999\n", "cuda", H200)


def test_attention_follows_the_device() -> None:
    assert plan("").cells[0].attention == "sdpa"
    assert plan("", "cuda", H200).cells[0].attention == "flashinfer"
    assert plan("attention: sdpa\n", "cuda", H200).cells[0].attention == "sdpa"


def test_a_shipped_recipe_plans_the_axes_it_names() -> None:
    made = plan_sweep(load_recipe(ROOT / "recipes/llama-3.1-8b.yaml"), device="cuda", device_facts=H200)
    first = made.cells[0]
    assert names_of(made)[:5] == [["union"]] + [[name] * 4 for name in NAMES]
    sglang = [one for one in made.cells[1].lists if one.name == "sglang"]
    assert {(one.order, one.output, one.workspace) for one in sglang} == {
        (order, sharing, sharing) for order in ("descending", "ascending") for sharing in ("shared", "per_size")
    }
    assert all(len(one.sizes) == 36 for one in sglang)
    assert [at.context_tokens for at in first.latency] == [1024, 512, 2048, 4096, 16384]
    assert [len(at.sizes) for at in first.latency] == [len(first.lists[0].sizes), 8, 6, 8, 8]
    rounds = [(cell.phase, cell.process) for cell in made.cells if cell.purpose == "main"]
    # The second process repeats what is timed and the first list.
    assert rounds == [("decode", 1)] * 5 + [("prefill", 1)] * 2 + [("decode", 2)] * 2 + [("prefill", 2)]
    assert [cell.purpose for cell in made.cells[10:]] == ["control", *["joint"] * 2, *["memory"] * 2]
    assert (made.skips, made.notes) == ((), ())


PREFILL = "phases: [prefill]\nprefill:\n  lists: [{name: a, sizes: [4, 8, 32]}]\n"


def test_both_ends_of_every_prefill_bucket_are_timed_beside_eager() -> None:
    (cell,) = plan(PREFILL).cells
    (of,) = cell.lists
    assert (of.phase, of.backend, of.sizes, of.waste_cap, of.request_slots) == (
        "prefill",
        "breakable",
        (4, 8, 32),
        2.0,
        None,
    )
    (at,) = cell.prefill_latency
    assert (at.tokens, at.requests, at.executions) == ((1, 4, 5, 8, 9, 32), 1, ("graph", "eager"))
    assert cell.gate and cell.phase == "prefill" and cell.latency == ()


def test_further_processes_time_breakable_buckets_alone() -> None:
    made = plan(PREFILL + "  backends: [eager, breakable, full]\nprocesses: 2\n")
    _, full, second = made.cells
    assert [cell.lists[0].backend for cell in made.cells] == ["breakable", "full", "breakable"]
    assert full.lists[0].request_slots == 1
    assert second.prefill_latency[0].tokens == (4, 8, 32) and not second.gate


def test_full_recordings_end_where_the_recipe_says() -> None:
    keys = "  backends: [breakable, full]\n  full_up_to: {}\n"
    lists = [of for cell in plan(PREFILL + keys.format(8)).cells for of in cell.lists]
    assert [(of.name, of.backend, of.sizes) for of in lists] == [
        ("a", "breakable", (4, 8, 32)),
        ("a-up-to-8", "full", (4, 8)),
    ]
    assert [cell.lists[0].backend for cell in plan(PREFILL + keys.format(2)).cells] == ["breakable"]


def test_long_prefills_in_full_recordings_are_not_timed_beside_eager() -> None:
    made = plan("phases: [prefill]\nprefill: {lists: [{name: a, sizes: [64, 2048]}], backends: [eager, full]}\n")
    assert [(at.tokens, at.executions) for at in made.cells[0].prefill_latency] == [
        ((1, 64, 65), ("graph", "eager")),
        ((2048,), ("graph",)),
    ]
    assert made.cells[0].lists[0].request_slots == 4


def test_both_phases_are_captured_into_one_pool_in_either_order() -> None:
    made = plan(PREFILL.replace("[prefill]", "[decode, prefill]") + TWO)
    joint = [cell for cell in made.cells if cell.purpose == "joint"]
    assert [[(of.phase, of.name) for of in cell.lists] for cell in joint] == [
        [("decode", "a"), ("prefill", "a")],
        [("prefill", "a"), ("decode", "a")],
    ]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("  batches: [{sizes: [64]}]\n", "64 is above the largest bucket, 32"),
        ("  profile_sizes: [33]\n", "33 is above the largest bucket, 32"),
        ("  batches: [{sizes: [32], prefix: 100000}]\n", "beyond the model's"),
        ("kv_tokens: 64\n", "bucket 32 is larger than the KV pool"),
    ],
)
def test_prefills_that_cannot_be_measured_are_refused(keys: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        plan(PREFILL + keys)


def test_breakable_decode_has_no_workspace_per_size() -> None:
    axes = "  backends: [eager, full, breakable]\n  output: [shared, per_size]\n  workspace: [shared, per_size]\n"
    made = plan("decode:\n  lists: [{name: a, sizes: [1, 2]}]\n" + axes)
    breakable = [of for cell in made.cells for of in cell.lists if of.backend == "breakable" and cell.purpose == "main"]
    assert {(of.output, of.workspace) for of in breakable} == {("shared", "shared"), ("per_size", "shared")}
    assert [bool(cell.latency) for cell in made.cells if cell.purpose == "main"] == [True, True]


def test_an_unsharded_and_a_sharded_model_have_different_cells() -> None:
    whole, part = plan(TWO), plan("shard: 2\n" + TWO)
    assert {cell.id for cell in whole.cells}.isdisjoint(cell.id for cell in part.cells)


def test_unknown_keys_of_a_model_are_noted() -> None:
    text = (ROOT / "recipes/configs/tiny-llama.json").read_text().replace("{", '{"my_own_key": 3, ', 1)
    loaded = parse_recipe(f"name: mine\nmodel: {' '.join(text.split())}\n", "mine.yaml", ROOT)
    made = plan_sweep(loaded, device="cpu", device_facts=None)
    assert made.notes == ("config.json: key my_own_key is not known and was not used",)


@settings(deadline=None)
@given(keep=st.integers(1, 4))
def test_a_follow_up_captures_the_rest_and_times_nothing(keep: int) -> None:
    axes = "  order: [ascending, descending]\n  output: [shared, per_size]\n  workspace: [shared, per_size]\n"
    cell = plan(TWO + axes + "  sharing: product\n").cells[1]
    rest = follow_up(cell, cell.lists[keep:])
    assert (rest.lists, rest.latency, rest.profile_sizes) == (cell.lists[keep:], (), ())
    assert rest.id != cell.id
    assert decode_cell(encode_cell(rest)) == rest
