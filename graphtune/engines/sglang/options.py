"""SGLang's flags: what its parser takes, and the settings they come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from graphtune.engines.base import Serving, version_tuple
from graphtune.engines.launch import Launch
from graphtune.engines.options import Reading, Rejected, Spec, read_options
from graphtune.engines.sglang.downgrades import Facts
from graphtune.engines.sglang.rules import Layout
from graphtune.errors import InputError
from graphtune.graph_config import BACKENDS, GraphConfig, Layer, combine, disabled, parse

SUFFIXES: dict[str, float] = {
    "k": 1000,
    "M": 1000**2,
    "G": 1000**3,
    "T": 1000**4,
    "Ki": 1024,
    "Mi": 1024**2,
    "Gi": 1024**3,
    "Ti": 1024**4,
}

NO_PADDING = "--disable-cuda-graph-padding"

_BACKEND = Spec("text", choices=BACKENDS)
_SWITCH = Spec("switch")
_INT = Spec("int")
_TEXT = Spec("text")

TABLE: dict[str, Spec] = {
    "--cuda-graph-config": _TEXT,
    "--cuda-graph-backend-decode": _BACKEND,
    "--cuda-graph-backend-prefill": _BACKEND,
    "--cuda-graph-max-bs-decode": _INT,
    "--cuda-graph-max-bs-prefill": _INT,
    "--cuda-graph-bs-decode": Spec("ints"),
    "--cuda-graph-bs-prefill": Spec("ints"),
    "--cuda-graph-max-seq-len-prefill": _INT,
    "--cuda-graph-prefill-max-context": Spec("size"),
    "--context-bucket": Spec("size", "cuda_graph_prefill_max_context"),
    "--disable-prefill-cuda-graph": _SWITCH,
    "--disable-decode-cuda-graph": _SWITCH,
    "--disable-cuda-graph": _SWITCH,
    NO_PADDING: _SWITCH,
    "--debug-cuda-graph": _SWITCH,
    "--enable-torch-compile": _SWITCH,
    "--torch-compile-max-bs": _INT,
    "--mem-fraction-static": Spec("float"),
    "--max-running-requests": _INT,
    "--chunked-prefill-size": _INT,
    "--prefill-max-requests": _INT,
    "--max-total-tokens": Spec("size"),
    "--max-prefill-tokens": Spec("size"),
    "--enable-memory-saver": _SWITCH,
    "--enable-two-batch-overlap": _SWITCH,
    "--enable-dp-attention": _SWITCH,
    "--enable-pdmux": _SWITCH,
    "--enable-lora": _SWITCH,
    "--lora-paths": _TEXT,
    "--tp-size": Spec("int", "tp"),
    "--tp": _INT,
    "--tensor-parallel-size": Spec("int", "tp"),
    "--pp-size": Spec("int", "pp"),
    "--pp": _INT,
    "--pipeline-parallel-size": Spec("int", "pp"),
    "--dp-size": Spec("int", "dp"),
    "--dp": _INT,
    "--data-parallel-size": Spec("int", "dp"),
    "--context-length": _INT,
    "--device": _TEXT,
    "--model-path": _TEXT,
    "--model": Spec("text", "model_path"),
    "--attention-backend": _TEXT,
    "--prefill-attention-backend": _TEXT,
    "--speculative-algorithm": _TEXT,
    "--speculative-algo": Spec("text", "speculative_algorithm"),
    "--speculative-num-draft-tokens": _INT,
    "--moe-a2a-backend": _TEXT,
    "--deepep-mode": _TEXT,
    "--disaggregation-mode": Spec("text", choices=("null", "prefill", "decode")),
}

_TWO = "it is the start of two flags, one per phase"
_GONE = "the flag is gone"
REJECTED: dict[str, Rejected] = {
    "--cuda-graph-max-bs": Rejected(_TWO, "--cuda-graph-max-bs-decode"),
    "--cuda-graph-bs": Rejected(_TWO, "--cuda-graph-bs-decode"),
    "--disable-piecewise-cuda-graph": Rejected(_GONE, "--disable-prefill-cuda-graph"),
    "--enable-piecewise-cuda-graph": Rejected(f"{_GONE}; use --cuda-graph-backend-prefill"),
    "--piecewise-cuda-graph-max-tokens": Rejected(_GONE, "--cuda-graph-max-bs-prefill"),
    "--piecewise-cuda-graph-tokens": Rejected(_GONE, "--cuda-graph-bs-prefill"),
    "--enable-breakable-cuda-graph": Rejected(f"{_GONE}; use --cuda-graph-backend-prefill breakable"),
}

OLD_NAMES_UNTIL = (0, 5, 16)
"""The last version known to take the old names below, as aliases with a warning; 0.5.23 takes none of them."""
_OLD_NAMES: dict[str, tuple[str, ...]] = {
    "--cuda-graph-max-bs": ("--cuda-graph-max-bs-decode",),
    "--cuda-graph-bs": ("--cuda-graph-bs-decode",),
    "--piecewise-cuda-graph-max-tokens": ("--cuda-graph-max-bs-prefill",),
    "--piecewise-cuda-graph-tokens": ("--cuda-graph-bs-prefill",),
    "--enable-breakable-cuda-graph": ("--cuda-graph-backend-prefill", "breakable"),
    "--disable-piecewise-cuda-graph": ("--cuda-graph-backend-prefill", "disabled"),
}

_PHASE_FLAGS: dict[str, tuple[str, str]] = {
    "cuda_graph_backend_decode": ("decode", "backend"),
    "cuda_graph_backend_prefill": ("prefill", "backend"),
    "cuda_graph_max_bs_decode": ("decode", "max_bs"),
    "cuda_graph_max_bs_prefill": ("prefill", "max_bs"),
    "cuda_graph_bs_decode": ("decode", "bs"),
    "cuda_graph_bs_prefill": ("prefill", "bs"),
    "cuda_graph_max_seq_len_prefill": ("prefill", "max_seq_len"),
    "cuda_graph_prefill_max_context": ("prefill", "max_context_size"),
}


@dataclass(frozen=True)
class Settings:
    """What the flags come to. ``where`` gives the flag or the file's line of a setting for messages."""

    config: GraphConfig
    serving: Serving
    layout: Layout
    facts: Facts
    where: Mapping[str, str]
    attention_dp: bool = False
    torch_compile: bool = False
    max_total_tokens: int | None = None
    max_prefill_tokens: int = 16384
    model: str = ""


def renamed(launch: Launch, version: str) -> Launch:
    """The launch in the newer names, where the version takes the older ones as well."""
    if version_tuple(version) > OLD_NAMES_UNTIL:
        return launch
    options = [
        replace(option, name=new[0], values=new[1:] or option.values)
        if (new := _OLD_NAMES.get(option.name)) is not None
        else option
        for option in launch.options
    ]
    return replace(launch, options=tuple(options))


def read(launch: Launch) -> tuple[Settings, Reading]:
    """Settings of a launch; refusals are what the engine's parser or its check of the settings would stop at."""
    reading = read_options(launch.options, TABLE, REJECTED, SUFFIXES)
    config = combine(_layers(reading))
    width = reading.get("speculative_num_draft_tokens")
    speculative = reading.get("speculative_algorithm") is not None
    if speculative and width is None:
        width = 4
    role = reading.get("disaggregation_mode")
    serving = Serving(
        tp=_positive(reading, "tp"),
        pp=_positive(reading, "pp"),
        dp=_positive(reading, "dp"),
        max_running_requests=reading.get("max_running_requests"),
        chunked_prefill_size=reading.get("chunked_prefill_size"),
        context_len=reading.get("context_length"),
        spec_tokens=max((width or 1) - 1, 0) if speculative else 0,
        padding=False if reading.get("disable_cuda_graph_padding") else None,
        role=role if role in ("prefill", "decode") else None,
        mem_fraction=reading.get("mem_fraction_static"),
    )
    environment = launch.environment
    facts = Facts(
        pp=serving.pp,
        role=serving.role,
        device=reading.get("device", "cuda"),
        attention_backend=reading.get("attention_backend"),
        prefill_attention_backend=reading.get("prefill_attention_backend"),
        two_batch_overlap=bool(reading.get("enable_two_batch_overlap")),
        moe_a2a=reading.get("moe_a2a_backend", "none"),
        deepep_mode=reading.get("deepep_mode"),
        speculative=speculative,
        memory_saver=bool(reading.get("enable_memory_saver")),
        memory_saver_graphs=environment.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "").lower() in ("1", "true", "yes"),
    )
    layout = Layout(two_batch_overlap=facts.two_batch_overlap, deepep=facts.moe_a2a == "deepep")
    settings = Settings(
        config,
        serving,
        layout,
        facts,
        {name: given.where for name, given in reading.values.items()},
        attention_dp=bool(reading.get("enable_dp_attention")),
        torch_compile=bool(reading.get("enable_torch_compile")),
        max_total_tokens=reading.get("max_total_tokens"),
        max_prefill_tokens=reading.get("max_prefill_tokens", 16384),
        model=reading.get("model_path", ""),
    )
    return _checked(settings, reading), reading


def _layers(reading: Reading) -> list[Layer]:
    """Sources in rising precedence: legacy switches, convenience flags, JSON."""
    layers = []
    for switch, phases in (
        ("disable_cuda_graph", ("decode", "prefill")),
        ("disable_prefill_cuda_graph", ("prefill",)),
        ("disable_decode_cuda_graph", ("decode",)),
    ):
        if reading.get(switch):
            layers.append(disabled(f"--{switch.replace('_', '-')}", *phases))
    layers.append(
        Layer("flags", {key: reading.get(name) for name, key in _PHASE_FLAGS.items() if name in reading.values})
    )
    text = reading.get("cuda_graph_config")
    if text is not None:
        try:
            layers.append(parse(text, reading.where("cuda_graph_config") or "--cuda-graph-config"))
        except InputError as error:
            reading.refuse(error.where or "--cuda-graph-config", error.message, error.action)
    return layers


def _positive(reading: Reading, name: str) -> int:
    value = reading.get(name, 1)
    if value < 1:
        reading.refuse(reading.where(name) or name, f"{name} is {value}", "at least 1")
        return 1
    return int(value)


def _checked(settings: Settings, reading: Reading) -> Settings:
    """Checks the engine makes after parsing, and those it leaves out and fails on later."""
    running = settings.serving.max_running_requests
    if running is not None and running < 1:
        reading.refuse(settings.where["max_running_requests"], f"max_running_requests is {running}", "at least 1")
        settings = replace(settings, serving=replace(settings.serving, max_running_requests=None))
    for phase in ("decode", "prefill"):
        largest = settings.config.phase(phase).max_bs
        if largest is not None and largest < 1:
            name = f"cuda_graph_max_bs_{phase}"
            reading.refuse(
                settings.where.get(name, "--cuda-graph-config"), f"{phase} max_bs is {largest}", "at least 1"
            )
            settings = replace(settings, config=settings.config.with_value((phase, "max_bs"), None))
    if settings.torch_compile and settings.serving.padding is False:
        reading.refuse(
            settings.where["enable_torch_compile"],
            "--enable-torch-compile with --disable-cuda-graph-padding is an assertion error",
            "one of the two",
        )
    return settings
