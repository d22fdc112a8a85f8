"""SGLang's automatic changes of the graph configuration, as one table in the order they apply.

``Facts`` is what the rules look at. A fact that the launch does not tell is at its default, which fires nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphtune.graph_config import GraphConfig, Key, Rule

DECODE: Key = ("decode", "backend")
PREFILL: Key = ("prefill", "backend")
OFF = "disabled"

# MoE all-to-all back ends under which a breakable graph can be captured.
BREAKABLE_MOE_A2A = frozenset({"none", "deepep", "megamoe", "flashinfer"})
EAGER_ATTENTION = frozenset({"torch_native", "flex_attention"})


@dataclass(frozen=True)
class Facts:
    """The parts of a launch that decide downgrades."""

    pp: int = 1
    role: str | None = None
    device: str = "cuda"
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_cp: int = 1
    attention_cp: int = 1
    attention_cp_breakable: bool = False
    two_batch_overlap: bool = False
    moe_a2a: str = "none"
    deepep_mode: str | None = None
    deepep_v2: bool = False
    speculative: bool = False
    kv_sharding: bool = False
    unified_memory: bool = False
    memory_saver: bool = False
    memory_saver_graphs: bool = False
    multimodal: bool = False
    multimodal_allowed: bool = True
    kda_linear_attention: bool = False
    deepseek_v4: bool = False
    deepseek_v3: bool = False
    dsa_or_mla: bool = False
    embedding_gemma: bool = False
    never_graph_arch: bool = False
    cp_tp_sharing_arch: bool = False
    layernorm_sp_arch: bool = False
    diffusion_llm: bool = False
    multi_item_scoring: bool = False
    tensor_dump: bool = False
    ms_probe: bool = False


Condition = Callable[[Facts, GraphConfig], bool]


def _breakable(condition: Callable[[Facts], bool]) -> Condition:
    return lambda facts, config: config.prefill.backend == "breakable" and condition(facts)


def _always(condition: Callable[[Facts], bool]) -> Condition:
    return lambda facts, config: condition(facts)


def _respecting(name: str, condition: Condition, effect: dict[Key, str], reason: str) -> Rule[Facts]:
    return Rule(name, condition, effect, True, reason, frozenset({OFF}))


def _overriding(name: str, condition: Callable[[Facts], bool], effect: dict[Key, str], reason: str) -> Rule[Facts]:
    return Rule(name, _always(condition), effect, False, reason, frozenset({OFF}))


BOTH_OFF = {DECODE: OFF, PREFILL: OFF}
PREFILL_OFF = {PREFILL: OFF}

RULES: tuple[Rule[Facts], ...] = (
    Rule(
        "not-cuda",
        lambda f, c: f.device != "cuda" and c.prefill.backend == "breakable",
        PREFILL_OFF,
        True,
        "breakable prefill graphs are the default on CUDA only",
    ),
    _respecting("pp", _breakable(lambda f: f.pp > 1), PREFILL_OFF, "pipeline parallelism; breakable must be asked for"),
    _respecting("kda", _breakable(lambda f: f.kda_linear_attention), PREFILL_OFF, "KDA linear attention cannot be cut"),
    _respecting(
        "deepseek-v4",
        _breakable(lambda f: f.deepseek_v4 and not f.attention_cp_breakable),
        PREFILL_OFF,
        "DeepSeek-V4 without context parallelism that supports breakable graphs",
    ),
    _respecting(
        "attention-cp",
        _breakable(lambda f: f.attention_cp > 1 and not f.attention_cp_breakable),
        PREFILL_OFF,
        "attention context parallelism does not support breakable graphs here",
    ),
    _respecting("decode-cp", _breakable(lambda f: f.decode_cp > 1), PREFILL_OFF, "decode context parallelism"),
    _respecting("tbo", _breakable(lambda f: f.two_batch_overlap), PREFILL_OFF, "two-batch overlap"),
    _respecting(
        "moe-a2a",
        _breakable(lambda f: f.moe_a2a not in BREAKABLE_MOE_A2A),
        PREFILL_OFF,
        "this MoE all-to-all back end cannot be cut out of a graph",
    ),
    _respecting(
        "multimodal",
        _breakable(lambda f: f.multimodal and not f.multimodal_allowed),
        PREFILL_OFF,
        "a multimodal model that is not on the engine's list",
    ),
    _respecting(
        "trtllm-mla",
        _always(lambda f: f.deepseek_v3 and "trtllm_mla" in (f.prefill_attention_backend, f.attention_backend)),
        PREFILL_OFF,
        "DeepSeek-V3 with trtllm_mla prefill attention",
    ),
    _respecting(
        "role-prefill", _always(lambda f: f.role == "prefill"), {DECODE: OFF}, "a prefill server never decodes"
    ),
    _respecting("role-decode", _always(lambda f: f.role == "decode"), PREFILL_OFF, "a decode server never prefills"),
    Rule(
        "prefill-cp",
        lambda f, c: f.attention_cp > 1 and f.attention_cp_breakable,
        {PREFILL: "breakable"},
        True,
        "prefill context parallelism that supports breakable graphs",
        frozenset({"full"}),
    ),
    _respecting("xpu", _always(lambda f: f.device == "xpu"), {DECODE: OFF}, "decode graphs on XPU must be asked for"),
    _overriding(
        "eager-attention",
        lambda f: f.attention_backend in EAGER_ATTENTION,
        BOTH_OFF,
        "this attention backend cannot be captured",
    ),
    _overriding("multi-item-scoring", lambda f: f.multi_item_scoring, BOTH_OFF, "multi-item scoring"),
    _overriding("tensor-dump", lambda f: f.tensor_dump, BOTH_OFF, "tensors are dumped from eager code"),
    _overriding("ms-probe", lambda f: f.ms_probe, BOTH_OFF, "msProbe reads eager code"),
    _overriding(
        "deepep-normal", lambda f: f.deepep_mode == "normal", BOTH_OFF, "DeepEP mode normal cannot be captured"
    ),
    _overriding("deepep-v2", lambda f: f.deepep_v2, PREFILL_OFF, "DeepEP v2"),
    _overriding(
        "mla-cp",
        lambda f: f.dsa_or_mla and f.attention_cp > 1 and not f.attention_cp_breakable,
        PREFILL_OFF,
        "MLA or DSA attention with context parallelism",
    ),
    _overriding(
        "diffusion-hip",
        lambda f: f.diffusion_llm and f.device == "hip",
        BOTH_OFF,
        "a diffusion language model on HIP",
    ),
    _overriding("never-graph", lambda f: f.never_graph_arch, BOTH_OFF, "an architecture the engine never captures"),
    _overriding("embedding-gemma", lambda f: f.embedding_gemma, {DECODE: OFF}, "an embedding model does not decode"),
    Rule(
        "embedding-gemma-prefill",
        lambda f, c: f.embedding_gemma,
        {PREFILL: "breakable"},
        False,
        "an embedding model's prefill is captured as breakable",
        frozenset({OFF}),
    ),
    _overriding("kv-sharding", lambda f: f.kv_sharding, PREFILL_OFF, "the KV cache is sharded"),
    _overriding(
        "kv-sharding-speculative",
        lambda f: f.kv_sharding and f.speculative,
        {DECODE: OFF},
        "the KV cache is sharded and decoding is speculative",
    ),
    Rule(
        "unified-memory",
        lambda f, c: (
            f.unified_memory
            and c.prefill.backend == "full"
            and (f.prefill_attention_backend or f.attention_backend) not in ("fa3", "fa4")
        ),
        PREFILL_OFF,
        False,
        "unified memory with full prefill graphs needs the fa3 or fa4 attention backend",
    ),
    _overriding("cp-tp-sharing", lambda f: f.cp_tp_sharing_arch, PREFILL_OFF, "this architecture shares CP and TP"),
    _overriding("layernorm-sp", lambda f: f.layernorm_sp_arch, PREFILL_OFF, "this architecture splits LayerNorm"),
    Rule(
        "xpu-breakable",
        lambda f, c: f.device == "xpu" and c.decode.backend == "breakable",
        {DECODE: OFF},
        False,
        "XPU records full decode graphs only",
    ),
    # The memory saver alone is fine: only with graph capture of its own a breakable graph cannot be built.
    Rule(
        "memory-saver",
        lambda f, c: f.memory_saver and f.memory_saver_graphs and "breakable" in (c.decode.backend, c.prefill.backend),
        {},
        False,
        "breakable graphs cannot be built with the memory saver and SGLANG_MEMORY_SAVER_CUDA_GRAPH=1",
        refuses=True,
    ),
)
