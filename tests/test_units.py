from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtune.errors import InputError
from graphtune.units import (
    ASSUMED_OVERHEAD_BYTES,
    GIB,
    MIB,
    NOMINAL_CARDS,
    UNIT_BYTES,
    format_bytes,
    format_duration_s,
    format_us,
    parse_bytes,
    parse_duration_s,
    parse_gpu_memory,
    swept_gpu_memory,
)
from tests.synthetic import environment


@pytest.mark.parametrize(
    ("text", "count"),
    [("1GiB", GIB), ("512 MiB", 512 * MIB), ("80GB", 80 * 10**9), ("1.5gib", 3 * GIB // 2), ("7B", 7), (".5KiB", 512)],
)
def test_sizes_are_read_with_their_unit(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "80", "80G", "-1GiB", "nanGiB", "1e3MiB", "GiB", "1 GiB 2", "1GiBs", "infB", "١GiB"]
)
def test_sizes_without_a_clear_meaning_are_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_bytes(text, where="--max-graph-mem")
    assert caught.value.where == "--max-graph-mem"
    assert caught.value.action


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNIT_BYTES)))
def test_whole_numbers_are_exact(number: int, unit: str) -> None:
    assert parse_bytes(f"{number}{unit}") == number * UNIT_BYTES[unit]


@given(st.decimals(0, 10**6, places=3), st.sampled_from(sorted(UNIT_BYTES)))
def test_fractions_round_down_to_a_byte(number: object, unit: str) -> None:
    exact = Fraction(str(number)) * UNIT_BYTES[unit]
    assert 0 <= exact - parse_bytes(f"{number}{unit}") < 1


@given(st.integers(0, 2**45))
def test_formatted_bytes_read_back_within_their_last_figure(count: int) -> None:
    text = format_bytes(count)
    assert len(text) <= 14
    assert abs(parse_bytes(text.replace(",", "")) - count) <= max(0.06 * count, 1)
    if count >= GIB:
        assert abs(parse_bytes(text.replace(",", "")) - count) <= 0.006 * GIB


def test_negative_bytes_keep_their_sign() -> None:
    assert format_bytes(-126 * MIB) == "-126 MiB"


@pytest.mark.parametrize(
    ("text", "seconds"), [("20s", 20.0), ("500ms", 0.5), ("10m", 600.0), ("10min", 600.0), ("1.5h", 5400.0)]
)
def test_durations_are_read_with_their_unit(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "20", "-1s", "1d", "s", "1h30m"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_duration_s(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0004, "0.4 ms"),
        (0.035, "35 ms"),
        (0.9996, "1.00 s"),
        (1.02, "1.02 s"),
        (59.97, "1 min 00 s"),
        (3599.7, "1 h 00 min"),
    ],
)
def test_durations_are_written_short(seconds: float, text: str) -> None:
    assert format_duration_s(seconds) == text


@pytest.mark.parametrize(
    ("us", "text"),
    [(4.25, "4.2 µs"), (870.2, "870 µs"), (999.7, "1.00 ms"), (4774.0, "4.77 ms"), (123456.0, "123.5 ms")],
)
def test_step_times_are_written_short(us: float, text: str) -> None:
    assert format_us(us) == text


@pytest.mark.parametrize("nominal", sorted(NOMINAL_CARDS))
def test_a_nominal_size_is_the_card_that_nvidia_smi_shows(nominal: int) -> None:
    card = NOMINAL_CARDS[nominal]
    memory = parse_gpu_memory(str(nominal))
    assert memory.nvml_total_mib == card.nvml_total_mib
    assert memory.cuda_total_bytes == card.nvml_total_mib * MIB - ASSUMED_OVERHEAD_BYTES
    assert memory.cuda_total_assumed
    assert memory.card == card.name and card.name in memory.rule and "assumed" in memory.rule
    assert memory.compute_capability == card.compute_capability


@pytest.mark.parametrize(
    ("text", "count"), [("40", 40 * GIB), ("80GiB", 80 * GIB), ("81559MiB", 81559 * MIB), ("80GB", 80 * 10**9)]
)
def test_other_sizes_are_gib_or_literal(text: str, count: int) -> None:
    memory = parse_gpu_memory(text)
    assert memory.nvml_total_bytes == count
    assert memory.card is None


def test_the_swept_card_lends_its_measured_total() -> None:
    swept = environment()
    memory = parse_gpu_memory("141", swept)
    assert memory.cuda_total_bytes == swept.cuda_total_bytes
    assert not memory.cuda_total_assumed and "measured" in memory.rule
    assert (memory.card, memory.compute_capability) == (swept.device_name, (9, 0))
    assert parse_gpu_memory("80", swept).cuda_total_assumed
    assert parse_gpu_memory("141GiB", swept).cuda_total_assumed


def test_without_a_size_the_swept_card_counts() -> None:
    swept = environment()
    memory = swept_gpu_memory(swept)
    assert memory is not None
    assert memory.nvml_total_bytes == swept.nvml_total_bytes
    assert swept_gpu_memory(replace(swept, nvml_total_bytes=None, cuda_total_bytes=None)) is None


@pytest.mark.parametrize("text", ["", "0", "-80", "81559", "eighty", "80G", "100MiB", "nan", "inf"])
def test_sizes_no_card_has_are_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_gpu_memory(text)
    assert caught.value.where == "--gpu-mem"


@given(st.fractions(1, 1024))
def test_bare_numbers_never_exceed_what_was_written(number: Fraction) -> None:
    text = f"{float(number):.3f}"
    memory = parse_gpu_memory(text)
    if memory.card is None:
        assert memory.nvml_total_bytes == int(Fraction(text) * GIB)
    assert memory.cuda_total_bytes < memory.nvml_total_bytes
