"""Bytes, seconds and counts as people read and write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.system.units import format_bytes, format_count, format_enough, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64M", 64 * 2**20),
        (" 1.5 GiB ", 3 * 2**29),
        ("2kb", 2048),
        ("7 B", 7),
        ("1T", 2**40),
    ],
)
def test_bytes_that_are_read(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "M", "-1", "1e3", "64 miles", "1.5.2", "12X", "1 Gi B"])
def test_bytes_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write 4096, 64M or 1\.5GiB"):
        parse_bytes(text)


@given(st.integers(0, 2**60))
def test_a_count_of_bytes_reads_back(num_bytes: int) -> None:
    assert parse_bytes(str(num_bytes)) == pytest.approx(num_bytes, rel=1e-15)


@given(st.integers(0, 2**50))
def test_written_bytes_read_back_within_their_last_digit(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.05)


@given(st.integers(0, 2**50))
def test_what_is_said_to_be_enough_is(num_bytes: int) -> None:
    assert num_bytes <= parse_bytes(format_enough(num_bytes)) <= 1.1 * num_bytes + 1


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (-1536, "-1.5 KiB"),
        (2**30, "1.0 GiB"),
        (2**51, "2048.0 TiB"),
    ],
)
def test_bytes_that_are_written(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12 ms"), (1, "1.0 s"), (75.2, "1m15s"), (3600, "1h00m"), (7325, "2h02m")],
)
def test_seconds_that_are_written(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0 K"), (33_700_000, "33.7 M"), (-2e9, "-2.0 G"), (1.5e12, "1.5 T")],
)
def test_counts_that_are_written(count: float, text: str) -> None:
    assert format_count(count) == text
