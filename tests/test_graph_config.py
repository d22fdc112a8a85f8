"""Graph configuration: precedence, locks, diff-only writing, downgrades."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.engines.sglang.downgrades import RULES, Facts
from graphtune.errors import InputError
from graphtune.graph_config import (
    BACKENDS,
    KEYS,
    GraphConfig,
    Layer,
    Rule,
    combine,
    disabled,
    downgrade,
    parse,
    serialise,
)

numbers = st.integers(1, 9000)
values = {
    "backend": st.sampled_from(BACKENDS),
    "bs": st.lists(numbers, min_size=1, max_size=5).map(tuple),
}
layers = st.builds(
    lambda chosen: Layer("generated", chosen),
    st.fixed_dictionaries(
        {},
        optional={(phase, key): values.get(key, numbers) for phase, keys in KEYS.items() for key in keys},
    ),
)
facts = st.builds(
    Facts,
    pp=st.sampled_from([1, 2]),
    role=st.sampled_from([None, "prefill", "decode"]),
    device=st.sampled_from(["cuda", "hip", "xpu"]),
    attention_backend=st.sampled_from([None, "torch_native", "fa3"]),
    two_batch_overlap=st.booleans(),
    kv_sharding=st.booleans(),
    speculative=st.booleans(),
    memory_saver=st.booleans(),
    memory_saver_graphs=st.booleans(),
    deepep_mode=st.sampled_from([None, "normal", "low_latency"]),
)


def test_precedence_is_default_switch_flag_json() -> None:
    switch = disabled("--disable-cuda-graph", "decode", "prefill")
    flag = Layer("flag", {("decode", "backend"): "full"})
    inner = parse('{"decode":{"backend":"disabled"}}')
    assert combine([switch]).decode.backend == "disabled"
    assert combine([switch, flag]).decode.backend == "full"
    assert combine([switch, flag, inner]).decode.backend == "disabled"
    assert combine([switch, flag]).prefill.backend == "disabled"
    assert combine([]).locked == frozenset()
    assert combine([switch]).locked == {("decode", "backend"), ("prefill", "backend")}


@given(st.lists(layers, max_size=4))
def test_reading_back_what_was_written_locks_nothing_new(given_layers: list[Layer]) -> None:
    config = combine(given_layers)
    text = json.dumps(serialise(config))
    again = combine([parse(text)])
    assert (again.decode, again.prefill) == (config.decode, config.prefill)
    assert again.locked <= config.locked
    assert serialise(again) == serialise(config)


def test_only_differences_are_written() -> None:
    config = combine([Layer("flags", {("decode", "backend"): "full", ("decode", "max_bs"): 64})])
    assert serialise(config) == {"decode": {"max_bs": 64}}
    assert serialise(GraphConfig()) == {}
    # What a downgrade changed by itself is not written: it would be locked when read back.
    assert serialise(downgrade(GraphConfig(), Facts(pp=2), RULES).runs) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "not an object"),
        ('{"verify":{}}', "unknown phase 'verify'"),
        ('{"decode":3}', "not an object"),
        ('{"decode":{"max_context_size":4}}', "unknown key 'max_context_size' under decode"),
        ('{"decode":{"tc_compiler":"eager"}}', "unknown key 'tc_compiler'"),
        ('{"decode":{"backend":"tc_piecewise"}}', "'tc_piecewise' is no backend"),
        ('{"decode":{"bs":"abc"}}', "no list of sizes"),
        ('{"decode":{"bs":["1"]}}', "no list of sizes"),
        ('{"decode":{"bs":[]}}', "no list of sizes"),
        ('{"decode":{"max_bs":"8"}}', "no whole number"),
        ('{"decode":{"max_bs":true}}', "no whole number"),
    ],
)
def test_a_bad_object_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(InputError) as refused:
        parse(text)
    assert says in str(refused.value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_json_is_read_or_refused(value: Any) -> None:
    try:
        layer = parse(json.dumps(value))
    except InputError:
        return
    assert all(key[1] in KEYS[key[0]] for key in layer.values)


def test_a_downgrade_respects_a_lock_and_says_what_it_did() -> None:
    result = downgrade(GraphConfig(), Facts(pp=2), RULES)
    assert result.runs.prefill.backend == "disabled"
    assert [(fired.rule, fired.overrode_lock) for fired in result.fired] == [("pp", False)]
    explicit = combine([Layer("flag", {("prefill", "backend"): "breakable"})])
    assert downgrade(explicit, Facts(pp=2), RULES).fired == ()


def test_an_overriding_rule_ignores_a_lock() -> None:
    explicit = combine([Layer("flag", {("decode", "backend"): "full", ("prefill", "backend"): "full"})])
    result = downgrade(explicit, Facts(attention_backend="torch_native"), RULES)
    assert (result.runs.decode.backend, result.runs.prefill.backend) == ("disabled", "disabled")
    assert all(fired.overrode_lock for fired in result.fired)


@pytest.mark.parametrize(
    ("fact", "decode", "prefill"),
    [
        (Facts(role="prefill"), "disabled", "breakable"),
        (Facts(role="decode"), "full", "disabled"),
        (Facts(two_batch_overlap=True), "full", "disabled"),
        (Facts(decode_cp=2), "full", "disabled"),
        (Facts(moe_a2a="mooncake"), "full", "disabled"),
        (Facts(moe_a2a="deepep"), "full", "breakable"),
        (Facts(kda_linear_attention=True), "full", "disabled"),
        (Facts(multimodal=True, multimodal_allowed=False), "full", "disabled"),
        (Facts(deepseek_v3=True, attention_backend="trtllm_mla"), "full", "disabled"),
        (Facts(deepep_mode="normal"), "disabled", "disabled"),
        (Facts(deepep_v2=True), "full", "disabled"),
        (Facts(kv_sharding=True), "full", "disabled"),
        (Facts(kv_sharding=True, speculative=True), "disabled", "disabled"),
        (Facts(embedding_gemma=True), "disabled", "breakable"),
        (Facts(device="xpu"), "disabled", "disabled"),
        (Facts(device="hip"), "full", "disabled"),
        (Facts(attention_cp=2), "full", "disabled"),
        (Facts(attention_cp=2, attention_cp_breakable=True), "full", "breakable"),
    ],
)
def test_downgrades_of_the_defaults(fact: Facts, decode: str, prefill: str) -> None:
    result = downgrade(GraphConfig(), fact, RULES)
    assert (result.runs.decode.backend, result.runs.prefill.backend) == (decode, prefill)
    changed = {(fired.phase, fired.after) for fired in result.fired}
    assert (("decode", decode) in changed) == (decode != "full")
    assert all(fired.reason for fired in result.fired)


def test_unified_memory_needs_an_attention_backend_for_full_prefill() -> None:
    full = combine([Layer("flag", {("prefill", "backend"): "full"})])
    assert downgrade(full, Facts(unified_memory=True), RULES).runs.prefill.backend == "disabled"
    fine = downgrade(full, Facts(unified_memory=True, attention_backend="fa3"), RULES)
    assert fine.runs.prefill.backend == "full"


def test_the_memory_saver_refuses_breakable_graphs_only_with_its_own_capture() -> None:
    assert downgrade(GraphConfig(), Facts(memory_saver=True), RULES).refused is None
    both = Facts(memory_saver=True, memory_saver_graphs=True)
    assert "memory saver" in str(downgrade(GraphConfig(), both, RULES).refused)
    off = combine([Layer("flag", {("prefill", "backend"): "disabled"})])
    assert downgrade(off, both, RULES).refused is None


@given(st.lists(layers, max_size=3), facts)
def test_every_change_is_listed_and_locks_hold(given_layers: list[Layer], fact: Facts) -> None:
    config = combine(given_layers)
    result = downgrade(config, fact, RULES)
    assert result.asked == config
    assert result.runs.locked == config.locked
    after: dict[tuple[str, str], Any] = {}
    for fired in result.fired:
        after[(fired.phase, fired.key)] = fired.after
        rule = next(rule for rule in RULES if rule.name == fired.rule)
        locked = (fired.phase, fired.key) in config.locked
        assert fired.overrode_lock == locked
        assert not (locked and rule.respects_lock)
    for phase, keys in KEYS.items():
        for key in keys:
            before, now = getattr(config.phase(phase), key), getattr(result.runs.phase(phase), key)
            assert now == after.get((phase, key), before)


def test_rule_names_are_unique() -> None:
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names))
    assert all(isinstance(rule, Rule) for rule in RULES)
