"""Recipes are read strictly: every fault is one InputError that names file, line and key."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import event, given, settings
from hypothesis import strategies as st

from graphtune.engines.base import DeviceFacts
from graphtune.errors import InputError
from graphtune.plan import STEP_TOKENS
from graphtune.planner import plan_sweep
from graphtune.recipe import load_recipe, model_name_of, parse_recipe, recipe_schema
from graphtune.yaml_source import parse_yaml

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
HEAD = "name: mine\nmodel: configs/tiny-llama.json\n"


def read(text: str, *overrides: str) -> Any:
    return parse_recipe(text, "mine.yaml", ROOT / "recipes", overrides)


def fault(text: str, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        loaded = read(text, *overrides)
        plan_sweep(loaded, device="cpu", device_facts=None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("nme: x", "mine.yaml:3: nme: unknown key\n  Did you mean name?"),
        ("decode:\n  list: [vllm]", "mine.yaml:4: decode.list: unknown key\n  Did you mean lists?"),
        ("decode:\n  lists:\n    - sglan", "mine.yaml:5: decode.lists[0].engine: must be 'sglang', 'vllm'"),
        (
            "decode:\n  lists:\n    - name: a\n      sizes: [1, 0]",
            "mine.yaml:6: decode.lists[0].sizes[1]: must be at least 1",
        ),
        (
            "decode:\n  lists:\n    - name: a\n      sizes:\n        - 1\n        - -3",
            "mine.yaml:8: decode.lists[0].sizes[1]: must",
        ),
        (
            "decode: {lists: [{name: a, sizes: [1, many]}]}",
            'decode.lists[0].sizes[1]: must be a whole number, not "many"',
        ),
        ("decode: {lists: [{name: a, sizes: [1, '2']}]}", 'decode.lists[0].sizes[1]: must be a whole number, not "2"'),
        ("decode: {lists: [{name: a, sizes: [true]}]}", "decode.lists[0].sizes[0]: must be a whole number, not true"),
        ("decode: {lists: [{name: a, sizes: [1.5]}]}", "decode.lists[0].sizes[0]: must be a whole number, not 1.5"),
        ("decode: {lists: [{name: a, sizes: []}]}", "decode.lists[0].sizes: must not be empty"),
        ("decode: {lists: [{name: a}]}", "decode.lists[0]: a named list needs its sizes"),
        ("decode: {lists: [{engine: vllm, sizes: [1]}]}", "decode.lists[0].sizes: an engine's list has no sizes"),
        ("decode: {lists: [{}]}", "decode.lists[0]: must be an engine's list, or a name with sizes"),
        ("decode: {lists: [{name: union, sizes: [1]}]}", "decode.lists[0].name: the name 'union' is taken"),
        ("decode: {lists: vllm}", 'mine.yaml:3: decode.lists: must be a list, not "vllm"\n  Write ["vllm"].'),
        ("decode: 3", "mine.yaml:3: decode: must be a mapping of keys, not 3"),
        ("decode: {order: [sideways]}", "decode.order[0]: must be 'descending' or 'ascending'"),
        ("decode: {output: [shared, per_size]}", "decode.workspace: varies together with output, so it needs 2 values"),
        ("decode: {backends: [eager]}", "decode.backends: a sweep without graphs has nothing to choose"),
        ("decode: {contexts: [9000]}", "decode.contexts[0].tokens: 9000 tokens, and 16 more while steps are timed"),
        (
            "decode: {lists: [{name: a, sizes: [4]}], contexts: [{tokens: 8, sizes: [5]}]}",
            "contexts[0].sizes[0]: 5 is above the",
        ),
        (
            "kv_tokens: 64\ndecode:\n  lists:\n    - {name: a, sizes: [1, 8]}",
            "mine.yaml:6: decode.lists[0].sizes[1]: bucket 8 is larger than",
        ),
        ("kv_tokens: lots", 'mine.yaml:3: kv_tokens: must be a whole number, not "lots"'),
        ("kv_tokens:", "mine.yaml:3: kv_tokens: must not be empty; write auto or leave the key out"),
        ("page_size: 7", "mine.yaml:3: page_size: must be 1, 16 or 64, not 7"),
        ("phases: [both]", "mine.yaml:3: phases[0]: must be 'decode' or 'prefill', not \"both\""),
        ("prefill: {waste_cap: some}", 'mine.yaml:3: prefill.waste_cap: must be a number, not "some"'),
        ("prefill: {waste_cap: 0.5}", "mine.yaml:3: prefill.waste_cap: must be at least 1.0, not 0.5"),
        ("prefill: {batches: [{size: [4]}]}", "mine.yaml:3: prefill.batches[0].size: unknown key"),
        ("attention: flashinfer", "mine.yaml:3: attention: flashinfer needs a CUDA device"),
        ("shard: 3", "mine.yaml:3: shard: num_attention_heads = 4 cannot be split over 3 ranks"),
        ("load: safetensors", "mine.yaml:3: load: no .safetensors in"),
        ("measure: {noise: .nan}", "measure.noise: input should be a finite number"),
        ("measure: {min_samples: 21}", "measure.min_samples: must be at most 20, not 21"),
        ("limits: {cell_timeout_s: 0}", "limits.cell_timeout_s: must be above 0"),
        ("name: again", "mine.yaml:3: name: this key is written twice"),
        ("seed: &here 1\nshard: *here", "mine.yaml:3: shard: anchors and aliases"),
        ("seed: [", "mine.yaml:4: is not YAML"),
        ("1: 2", "mine.yaml:3: a key must be text"),
        ("seed: 99999999999999999999", "mine.yaml:3: seed: the number is too large"),
    ],
)
def test_a_fault_names_file_line_and_key(keys: str, expected: str) -> None:
    message = fault(HEAD + keys + "\n")
    assert message.startswith("mine.yaml:")
    assert expected in message


def test_missing_keys_models_and_files_are_named(tmp_path: Path) -> None:
    assert fault("name: mine\n").startswith("mine.yaml:1: model: this key is missing\n  `graphtune recipe")
    assert "mine.yaml:2: model: there is no model at" in fault("name: mine\nmodel: nowhere/config.json\n")
    assert "mine.yaml:1: a recipe is a list of keys" in fault("")
    with pytest.raises(InputError, match=r"gone\.yaml: cannot be read: No such file"):
        load_recipe(tmp_path / "gone.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: mine\nmodel: caf\xe9\n")
    with pytest.raises(InputError, match=r"latin\.yaml:2: is not UTF-8"):
        load_recipe(tmp_path / "latin.yaml")


def test_a_malformed_config_json_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{\n  "model_type": "llama",\n  "hidden_size": 8,,\n}\n')
    (tmp_path / "mine.yaml").write_text("name: mine\nmodel: config.json\n")
    with pytest.raises(InputError, match=r"config\.json:3"):
        load_recipe(tmp_path / "mine.yaml")
    facts = json.loads((ROOT / "recipes/configs/tiny-llama.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(facts | {"hidden_size": "wide"}))
    with pytest.raises(InputError, match=r"config\.json:1: hidden_size"):
        load_recipe(tmp_path / "mine.yaml")


def test_a_model_can_be_a_folder_or_written_out() -> None:
    inline = (ROOT / "recipes/configs/tiny-llama.json").read_text()
    written = read(f"name: mine\nmodel: {' '.join(inline.split())}\n")
    assert (written.model_name, written.model.num_layers, written.weights) == ("mine", 3, None)
    assert "num_attention_heads" in fault("name: mine\nmodel: {model_type: llama}\n")
    assert "mine.yaml:2: model" in fault("name: mine\nmodel: {model_type: llama}\n")
    assert "mine.yaml:3: load: a model that is written out has no weights" in fault(
        f"name: mine\nmodel: {' '.join(inline.split())}\nload: safetensors\n"
    )


def test_safetensors_come_from_the_model_folder(tmp_path: Path) -> None:
    model = tmp_path / "small-model"
    model.mkdir()
    (model / "config.json").write_text((ROOT / "recipes/configs/tiny-llama.json").read_text())
    (model / "model.safetensors").write_bytes(b"")
    loaded = parse_recipe("name: mine\nmodel: small-model\nload: safetensors\n", "mine.yaml", tmp_path)
    assert (loaded.weights, loaded.model_name) == (model.resolve(), "small-model")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("configs/llama-3.1-8b.json", "llama-3.1-8b"),
        ("/models/Qwen3-0.6B/config.json", "Qwen3-0.6B"),
        ("/cache/models--Qwen--Qwen3-8B/snapshots/0123abc/config.json", "Qwen3-8B"),
    ],
)
def test_models_are_named_after_their_file_or_folder(file: str, name: str) -> None:
    assert model_name_of(Path(file)) == name


def test_overrides_are_checked_like_the_file() -> None:
    loaded = read(HEAD, "measure.max_seconds=0.1", "decode.lists=[{name: a, sizes: [1, 2]}]", "processes=3")
    assert loaded.recipe.measure.max_seconds == 0.1
    assert loaded.recipe.decode.lists[0].sizes == (1, 2)
    assert loaded.recipe.processes == 3
    assert fault(HEAD, "decode.list=1").startswith("--set decode.list=1: decode.list: unknown key")
    assert fault(HEAD, "measure").startswith("--set measure: is not key=value")
    assert fault(HEAD, "seed.x=1", "seed=[").startswith("--set seed=[")
    assert fault(HEAD + "seed: 1\n", "seed.x=1").startswith("--set seed.x=1: seed holds no keys")


def test_the_sha_follows_the_content_and_not_the_limits() -> None:
    sha = read(HEAD).sha
    assert read(HEAD + "processes: 4\nlimits: {cell_timeout_s: 5}\n").sha == sha
    assert read("# a comment\n" + HEAD + "seed: 0\n").sha == sha
    assert read(HEAD + "seed: 1\n").sha != sha
    assert read(HEAD + "dtype: float32\n").sha != sha


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_shipped_recipes_are_valid_and_named_after_their_file(file: Path) -> None:
    loaded = load_recipe(file)
    assert loaded.recipe.name == file.stem
    jsonschema.validate(yaml.safe_load(file.read_text()), recipe_schema())


def test_the_published_schema_is_current_and_refuses_what_is_refused() -> None:
    published = json.loads((ROOT / "docs/recipe.schema.json").read_text())
    assert published == recipe_schema(), "run: python -m graphtune.recipe > docs/recipe.schema.json"
    jsonschema.Draft202012Validator.check_schema(published)
    ok = {"name": "a", "model": "b", "decode": {"lists": ["vllm", {"engine": "sglang", "max": 8}], "contexts": [1]}}
    jsonschema.validate(ok, published)
    for wrong in ({"nme": 1}, {"page_size": 2}, {"kv_tokens": "lots"}, {"decode": {"lists": [{"sizes": [0]}]}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(ok | wrong, published)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
engine_names = st.sampled_from(["sglang", "vllm", "tensorrt_llm", "powers_of_two"])
sizes = st.lists(st.integers(1, 600), min_size=1, max_size=5)
list_choices = (
    engine_names
    | st.fixed_dictionaries({"engine": engine_names}, optional={"max": st.integers(1, 600)})
    | st.fixed_dictionaries({"name": st.sampled_from(["a", "b"]), "sizes": sizes})
)
context_choices = st.integers(1, 2000) | st.fixed_dictionaries({"tokens": st.integers(1, 1800), "sizes": sizes})


def some_of(*words: str) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(words), min_size=1, max_size=2)


recipes = st.fixed_dictionaries(
    {"name": st.just("mine"), "model": st.just("configs/tiny-llama.json")},
    optional={
        "dtype": st.sampled_from(["bfloat16", "float32"]),
        "shard": st.sampled_from([1, 2, 4]),
        "attention": st.sampled_from(["auto", "sdpa", "flashinfer"]),
        "page_size": st.sampled_from([1, 16, 64]),
        "kv_tokens": st.just("auto") | st.integers(2, 500_000),
        "processes": st.integers(1, 4),
        "decode": st.fixed_dictionaries(
            {},
            optional={
                "lists": st.lists(list_choices, min_size=1, max_size=4),
                "backends": st.just(["full"]) | st.just(["eager", "full"]),
                "order": some_of("descending", "ascending"),
                "output": some_of("shared", "per_size"),
                "workspace": some_of("shared", "per_size"),
                "sharing": st.sampled_from(["together", "product"]),
                "contexts": st.lists(context_choices, max_size=3),
                "profile_sizes": st.lists(st.integers(1, 8), max_size=3),
            },
        ),
        "measure": st.fixed_dictionaries({}, optional={"noise": st.floats(0.01, 0.5)}),
    },
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


@st.composite
def spoilt(draw: st.DrawFn) -> Any:
    """A recipe of which one value, at any depth, is replaced by something else, or to which a key is added."""
    # A copy: sampled_from hands out the same objects again, and what is spoilt here would be drawn spoilt later.
    recipe = copy.deepcopy(draw(recipes))
    path = draw(st.sampled_from(places(recipe)))
    if not path:
        return draw(plain) if draw(st.booleans()) else recipe | {draw(st.text(max_size=5)): draw(plain)}
    target = recipe
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = draw(st.integers(-2, 2) | plain)
    return recipe


@settings(max_examples=200, deadline=None)
@given(
    values=recipes | spoilt(), device=st.sampled_from(["cpu", "cuda"]), total_mib=st.none() | st.integers(1, 200_000)
)
def test_any_recipe_gives_a_plan_or_an_input_error(values: Any, device: Any, total_mib: int | None) -> None:
    text = yaml.safe_dump(values, allow_unicode=True, default_flow_style=True)
    try:
        plan = plan_sweep(read(text), device=device, device_facts=DeviceFacts(total_mib))
    except InputError as error:
        event("refused")
        assert str(error).startswith(("mine.yaml:", str(ROOT)))
        return
    event("planned")
    assert plan.cells
    assert len({cell.id for cell in plan.cells}) == len(plan.cells)
    for cell in plan.cells:
        assert cell.kv_tokens % cell.page_size == 0
        for one in cell.lists:
            assert list(one.sizes) == sorted(set(one.sizes))
        for at in cell.latency:
            pages = -(-(at.context_tokens + STEP_TOKENS) // cell.page_size)
            assert (at.sizes[-1] * pages + 1) * cell.page_size <= cell.kv_tokens
            assert at.sizes[-1] <= cell.lists[0].sizes[-1]


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60) | st.text(alphabet="ab:-[]{},&*!|>'\"#%@? \n\t01.", max_size=40))
def test_any_text_reads_as_plain_values_or_an_input_error(text: str) -> None:
    try:
        value, source = parse_yaml(text, "mine.yaml")
    except InputError as error:
        assert str(error).startswith("mine.yaml:")
        return
    assert source.where(()).startswith("mine.yaml:")
    json.dumps(value)
