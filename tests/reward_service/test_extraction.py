"""What a completion answers."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_service.extraction import canonical_integer, last_integer, last_number, last_tag


@pytest.mark.parametrize(
    ("text", "integer"),
    [
        ("The answer is 12.", "12"),
        ("3 + 4 = 7", "7"),
        ("7-4", "4"),
        ("= -4", "-4"),
        ("-4", "-4"),
        ("(-4)", "-4"),
        ("**-4**", "-4"),
        (r"\boxed{-4}", "-4"),
        ("$-4$", "-4"),
        ("answer:\u22124", "-4"),
        ("- 4", "4"),
        ("+4", "4"),
        ("pages 3-5", "5"),
        ("0012", "12"),
        ("-0", "0"),
        ("5km", "5"),
        ("10:30", "30"),
    ],
)
def test_the_last_integer_is_read_with_its_sign(text: str, integer: str) -> None:
    assert last_integer(text) == integer


@pytest.mark.parametrize("text", ["", "none", "3.14", "0.5", ".5", "1e5", "2.0", "1.2.3", "-7.25"])
def test_a_number_with_decimals_or_an_exponent_is_no_integer(text: str) -> None:
    assert last_integer(text) is None


def test_decimals_are_passed_over_not_cut_into_integers() -> None:
    assert last_integer("12 (exactly 11.97)") == "12"


@pytest.mark.parametrize(
    ("text", "integer"),
    [
        ("1,234", "1234"),
        ("-1,234,567", "-1234567"),
        ("1,23", "23"),
        ("1,234,5", "5"),
        ("1234,567", "567"),
        ("1, 234", "234"),
    ],
)
def test_commas_are_separators_only_where_they_cut_exact_thousands(text: str, integer: str) -> None:
    assert last_integer(text) == integer


@pytest.mark.parametrize("text", ["\u0665", "\uff15", "\u00b2", "4\u0663", "\u06634", "\u0967\u0968"])
def test_digits_of_other_scripts_are_no_integers_nor_parts_of_one(text: str) -> None:
    assert last_integer(text) is None


@given(st.integers(), st.text(alphabet="abc .:=*$\n(", max_size=20), st.text(alphabet="abc :*$\n)", max_size=20))
def test_any_integer_is_found_between_words(number: int, before: str, after: str) -> None:
    sign_is_free = not before or before[-1] in " .:=*$\n("
    text = f"{before}{number}{after}" if sign_is_free else f"{before} {number}{after}"
    if before.endswith("."):
        text = f"{before} {number}{after}"
    assert last_integer(text) == str(number)


@given(st.integers())
def test_thousands_separators_change_nothing(number: int) -> None:
    assert last_integer(f"{number:,}") == str(number) == canonical_integer(f"{number:,}")


@given(st.text())
def test_any_text_gives_a_canonical_integer_or_none(text: str) -> None:
    found = last_integer(text)
    assert found is None or (found.isascii() and str(int(found)) == found)


def test_an_integer_longer_than_python_converts_is_compared_as_text() -> None:
    assert last_integer("9" * 20_000) == "9" * 20_000


@pytest.mark.parametrize(
    "text", ["1," * 200_000, "-" * 400_000, "1" * 400_000 + "\u0663", "1.1." * 100_000, "<answer>" * 50_000]
)
def test_hostile_text_takes_linear_time(text: str) -> None:
    began_s = time.monotonic()
    last_integer(text)
    last_tag(text, "answer")
    assert time.monotonic() - began_s < 3


@pytest.mark.parametrize("text", ["", "x", "1.5", "1 2", "1,2", "--1", "\u0665", "1e3"])
def test_what_is_not_exactly_one_integer_has_no_canonical_form(text: str) -> None:
    assert canonical_integer(text) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [("is 3.5", 3.5), ("1,000.25", 1000.25), ("-.5", -0.5), ("1e-3", 1e-3), ("2\u22121.5", 1.5), ("7", 7.0)],
)
def test_the_last_number_is_read_with_decimals_and_exponent(text: str, number: float) -> None:
    found = last_number(text)
    assert found is not None
    assert float(found) == number


def test_the_last_complete_tag_counts() -> None:
    assert last_tag("<answer>1</answer> no: <answer> 2 </answer>", "answer") == "2"
    assert last_tag("<answer>1</answer><answer>2", "answer") == "1"
    assert last_tag("</answer>", "answer") is None
    assert last_tag("1", "answer") is None
