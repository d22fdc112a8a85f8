"""vLLM's mode table, cell by cell, and what forces a mode."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.engines.base import DeviceFacts
from graphtune.engines.vllm import modes
from graphtune.engines.vllm.modes import Facts, Mode, Support

ONE, UNIFORM = "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH"
# asked, support, width, result compiled piecewise, result otherwise ("error": refused)
TABLE: list[tuple[Mode, Support, int, str, str]] = [
    ("FULL", "ALWAYS", 1, "FULL", "FULL"),
    ("FULL", "ALWAYS", 3, "FULL", "FULL"),
    ("FULL", "UNIFORM_BATCH", 1, "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"),
    ("FULL", "UNIFORM_BATCH", 3, "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"),
    ("FULL", "UNIFORM_SINGLE_TOKEN_DECODE", 1, "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"),
    ("FULL", "UNIFORM_SINGLE_TOKEN_DECODE", 3, "PIECEWISE", "NONE"),
    ("FULL", "NEVER", 1, "error", "error"),
    ("FULL", "NEVER", 3, "error", "error"),
    *[
        (asked, support, width, piecewise or asked, whole or asked)
        for asked in ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
        for support, width, piecewise, whole in (
            ("ALWAYS", 1, "", ""),
            ("ALWAYS", 3, "", ""),
            ("UNIFORM_BATCH", 3, "", ""),
            ("UNIFORM_SINGLE_TOKEN_DECODE", 1, "", ""),
            ("UNIFORM_SINGLE_TOKEN_DECODE", 3, "PIECEWISE", "NONE"),
            ("NEVER", 1, "PIECEWISE", "NONE"),
            ("NEVER", 3, "PIECEWISE", "NONE"),
        )
    ],
    *[
        (asked, support, width, asked, asked)
        for asked in ("PIECEWISE", "NONE")
        for support in modes.SUPPORTS
        for width in (1, 3)
    ],
]  # type: ignore[list-item]


@pytest.mark.parametrize(("asked", "support", "width", "piecewise", "whole"), TABLE)
def test_support_table(asked: Mode, support: Support, width: int, piecewise: str, whole: str) -> None:
    for compiled, expected in ((True, piecewise), (False, whole)):
        found = modes.resolve_by_support(asked, support, piecewise=compiled, width=width)
        if expected == "error":
            assert found.error is not None
            continue
        assert found.error is None
        assert found.runs == expected
        assert (found.changes == ()) == (expected == asked)
        assert all(support in change.reason for change in found.changes)


@pytest.mark.parametrize(
    ("asked", "facts", "runs"),
    [
        ("FULL_AND_PIECEWISE", Facts(enforce_eager=True), "NONE"),
        ("FULL_AND_PIECEWISE", Facts(compile_mode=0), "FULL_DECODE_ONLY"),
        ("PIECEWISE", Facts(compile_mode=0), "NONE"),
        ("PIECEWISE", Facts(compile_mode=0, breakable=True), "PIECEWISE"),
        ("PIECEWISE", Facts(empty_splitting_ops=True), "NONE"),
        ("FULL_AND_PIECEWISE", Facts(empty_splitting_ops=True), "FULL"),
        ("FULL", Facts(pooling=True), "PIECEWISE"),
        ("FULL_AND_PIECEWISE", Facts(encoder_decoder=True), "FULL_DECODE_ONLY"),
        ("FULL", Facts(connector_needs_piecewise=True), "PIECEWISE"),
        ("PIECEWISE", Facts(deepep_high_throughput_dp=True), "NONE"),
        ("FULL", Facts(dynamic_speculation_v1=True), "PIECEWISE"),
        ("NONE", Facts(pooling=True, encoder_decoder=True), "NONE"),
        ("FULL_AND_PIECEWISE", Facts(compile_mode=0, support="UNIFORM_SINGLE_TOKEN_DECODE", width=3), "NONE"),
        ("FULL_AND_PIECEWISE", Facts(support="UNIFORM_SINGLE_TOKEN_DECODE", width=3), "PIECEWISE"),
    ],
)
def test_forced_changes(asked: Mode, facts: Facts, runs: str) -> None:
    found = modes.resolve(asked, facts)
    assert found.runs == runs
    assert found.asked == asked


@given(
    st.sampled_from(modes.MODES),
    st.builds(
        Facts,
        enforce_eager=st.booleans(),
        compile_mode=st.integers(0, 3),
        breakable=st.booleans(),
        empty_splitting_ops=st.booleans(),
        pooling=st.booleans(),
        encoder_decoder=st.booleans(),
        support=st.none() | st.sampled_from(modes.SUPPORTS),
        width=st.integers(1, 5),
    ),
)
def test_changes_form_a_chain_from_asked_to_runs(asked: Mode, facts: Facts) -> None:
    found = modes.resolve(asked, facts)
    mode: str = asked
    for change in found.changes:
        assert change.before == mode
        assert change.after != mode
        mode = change.after
    assert mode == found.runs
    assert found.runs in modes.MODES


@pytest.mark.parametrize(
    ("backend", "capability", "flash", "support"),
    [
        ("FLASHINFER", (12, 1), None, ONE),
        ("FLASHINFER", None, None, ONE),
        ("FLASHINFER", (10, 0), None, UNIFORM),
        ("FLASH_ATTN", (9, 0), None, "ALWAYS"),
        ("FLASH_ATTN", (8, 0), None, UNIFORM),
        ("FLASH_ATTN", (9, 0), 2, UNIFORM),
        ("FLASH_ATTN", None, None, None),
        ("flash_attn_vllm_v1", (9, 0), 3, "ALWAYS"),
        ("CUTLASS_MLA", None, None, ONE),
        ("TRITON_ATTN", None, None, "ALWAYS"),
        ("SOMETHING_NEW", None, None, None),
        (None, (9, 0), None, None),
    ],
)
def test_support_of_backends(
    backend: str | None, capability: tuple[int, int] | None, flash: int | None, support: str | None
) -> None:
    assert modes.support_of(backend, DeviceFacts(None, capability), flash) == support
