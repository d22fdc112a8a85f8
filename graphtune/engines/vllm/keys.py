"""vLLM's flags and compilation keys as tables: what its parser takes and what it refuses by name."""

from __future__ import annotations

from graphtune.engines.options import Rejected, Spec

SUFFIXES: dict[str, float] = {
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "K": 1024,
    "M": 1024**2,
    "G": 1024**3,
    "T": 1024**4,
}
_INT, _SWITCH, _TEXT = Spec("int"), Spec("switch"), Spec("text")

TABLE: dict[str, Spec] = {
    "--cudagraph-capture-sizes": Spec("ints"),
    "--max-cudagraph-capture-size": _INT,
    "--speculative-config": Spec("json"),
    "-sc": Spec("json", "speculative_config"),
    "--spec-tokens": _INT,
    "--spec-method": _TEXT,
    "--spec-model": _TEXT,
    "--enforce-eager": _SWITCH,
    "--gpu-memory-utilization": Spec("float"),
    "--kv-cache-memory-bytes": Spec("size"),
    "--kv-cache-memory": Spec("size", "kv_cache_memory_bytes"),
    "--max-num-seqs": Spec("size"),
    "--max-num-batched-tokens": Spec("size"),
    "--max-model-len": Spec("text"),
    "--performance-mode": Spec("text", choices=("balanced", "interactivity", "throughput")),
    "--optimization-level": _INT,
    "--tensor-parallel-size": Spec("int", "tp"),
    "-tp": Spec("int", "tp"),
    "--pipeline-parallel-size": Spec("int", "pp"),
    "-pp": Spec("int", "pp"),
    "--data-parallel-size": Spec("int", "dp"),
    "-dp": Spec("int", "dp"),
    "--attention-backend": _TEXT,
    "--attention-config": Spec("json"),
    "-ac": Spec("json", "attention_config"),
    "--enable-lora": _SWITCH,
    "--runner": _TEXT,
    "--cudagraph-metrics": _SWITCH,
}
REJECTED: dict[str, Rejected] = {
    "--cuda-graph-sizes": Rejected("the flag is unknown", "--cudagraph-capture-sizes"),
    "--max-seq-len-to-capture": Rejected("the flag is gone; graphs are sized in tokens of a step"),
}
COMPILATION_KEYS = frozenset(
    {
        "mode",
        "debug_dump_path",
        "cache_dir",
        "compile_cache_save_format",
        "backend",
        "custom_ops",
        "ir_enable_torch_wrap",
        "splitting_ops",
        "compile_mm_encoder",
        "compile_sizes",
        "compile_ranges_endpoints",
        "inductor_compile_config",
        "inductor_passes",
        "cudagraph_mode",
        "cudagraph_num_of_warmups",
        "cudagraph_capture_sizes",
        "cudagraph_copy_inputs",
        "cudagraph_specialize_lora",
        "use_inductor_graph_partition",
        "pass_config",
        "max_cudagraph_capture_size",
        "dynamic_shapes_config",
        "local_cache_dir",
        "fast_moe_cold_start",
        "static_all_moe_layers",
        "cudagraph_mm_encoder",
        "encoder_cudagraph_token_budgets",
        "encoder_cudagraph_max_vision_items_per_batch",
        "encoder_cudagraph_max_frames_per_batch",
    }
)
GONE_KEYS: dict[str, str] = {
    "level": "use mode",
    "use_cudagraph": "use cudagraph_mode",
    "full_cuda_graph": "use cudagraph_mode FULL",
    "cudagraph_num_of_warmup": "use cudagraph_num_of_warmups",
}
COMPILE_MODES = {"NONE": 0, "STOCK_TORCH_COMPILE": 1, "DYNAMO_TRACE_ONCE": 2, "VLLM_COMPILE": 3}
