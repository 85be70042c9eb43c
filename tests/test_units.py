"""Sizes and counts: every spelling that people use, and every one that must be refused."""

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memcalc.errors import UsageError
from memcalc.units import format_bytes, format_count, parse_parameters, parse_size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4B", 4_000_000_000),
        ("1.1b", 1_100_000_000),
        ("350M", 350_000_000),
        ("0.5B", 500_000_000),
        (".5B", 500_000_000),
        ("4e9", 4_000_000_000),
        ("4E+9", 4_000_000_000),
        ("7_000_000_000", 7_000_000_000),
        ("7,000,000,000", 7_000_000_000),
        ("8030261248", 8_030_261_248),
        ("1.5T", 1_500_000_000_000),
        ("125k", 125_000),
        ("70 B", 70_000_000_000),
        (" 6.7B ", 6_700_000_000),
        ("8,030,261,248", 8_030_261_248),
    ],
)
def test_parameter_counts(text: str, count: int) -> None:
    assert parse_parameters(text) == count


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4X", "unknown 'X'"),
        ("-3B", "not a positive number"),
        ("0", "smaller than any transformer"),
        ("0B", "smaller than any transformer"),
        ("0.0000001B", "smaller than any transformer"),
        ("4", "did you mean 4B?"),
        ("", "is empty"),
        ("  ", "is empty"),
        ("nan", "not a positive number"),
        ("inf", "not a positive number"),
        ("1e999", "larger than any model"),
        ("1e9999", "not a positive number"),
        ("9" * 5000, "not a positive number"),
        ("9" * 50, "larger than any model"),
        ("7GB", "size in bytes"),
        ("7GiB", "size in bytes"),
        ("8x7B", "46.7B"),
        ("30B-A3B", "30B parameters in total"),
        ("4B4B", "not a positive number"),
        ("4" + "x" * 500, "ends in the unknown"),
        ("4.", "not a positive number"),
        ("4 B B", "not a positive number"),
        ("٤B", "not a positive number"),
        ("4B\n--x", "not a positive number"),
        ("0x10", "not a positive number"),
        ("4,5B", "not a positive number"),
        ("1,00B", "not a positive number"),
        ("7000,000", "not a positive number"),
    ],
)
def test_what_is_no_parameter_count(text: str, says: str) -> None:
    with pytest.raises(UsageError, match="parameter count") as refusal:
        parse_parameters(text)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 250


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GB", 24_000_000_000),
        ("24 gb", 24_000_000_000),
        ("80GiB", 85_899_345_920),
        ("500MiB", 524_288_000),
        ("1.5TB", 1_500_000_000_000),
        ("0", 0),
        ("0B", 0),
        ("8_519_680", 8_519_680),
        ("8,519,680", 8_519_680),
        ("64KiB", 65_536),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["24G", "80m", "24XB", "-1GB", "GB", "", "nan", "1e40", "99999TB", "24GB x", "1 2GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="--cuda-context"):
        parse_size(text, "--cuda-context")


@pytest.mark.parametrize(
    ("nbytes", "gib", "gb"),
    [
        (0, "0 B", "0 B"),
        (99, "99 B", "99 B"),
        (512, "0.5 KiB", "0.5 KB"),
        (8_519_680, "8.1 MiB", "8.5 MB"),
        (736_296_960, "0.7 GiB", "0.7 GB"),
        (81_850_000_000, "76.2 GiB", "81.8 GB"),
        (85_520_809_984, "79.6 GiB", "85.5 GB"),
        (2_000_000_000_000, "1,862.6 GiB", "2,000.0 GB"),
        (-5_000_000_000, "-4.7 GiB", "-5.0 GB"),
    ],
)
def test_bytes_to_text(nbytes: int, gib: str, gb: str) -> None:
    assert format_bytes(nbytes) == gib
    assert format_bytes(nbytes, "GB") == gb


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (4_047_191_040, "4.05B"),
        (70_553_706_496, "70.6B"),
        (124_439_808, "124M"),
        (671_026_419_200, "671B"),
        (1_500_000_000_000, "1.50T"),
        (29_000, "29.0k"),
        (999, "999"),
    ],
)
def test_counts_to_text(count: int, text: str) -> None:
    assert format_count(count) == text


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(min_value=0, max_value=2**50))
def test_a_plain_number_of_bytes_is_itself(nbytes: int) -> None:
    assert parse_size(str(nbytes)) == nbytes
    assert parse_size(f"{nbytes:_}") == nbytes


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=20))
def test_no_text_crashes_the_parsers(text: str) -> None:
    for parse in (parse_size, parse_parameters):
        with suppress(UsageError):
            assert parse(text) >= 0
