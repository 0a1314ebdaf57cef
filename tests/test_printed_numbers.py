"""Printed numbers: the printed value is within half a unit of its last digit, and only zero is printed as 0."""

from decimal import Decimal
from math import inf, nan

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clearhead.digits import fixed, percent, significant
from clearhead.textbook.trace import TokenTrace
from clearhead.watching.summary import Head, Summary
from clearhead.words import say

NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.floats(1e-9, 1) | st.floats(-1e5, 1e5)


def assert_says(text: str, number: float) -> None:
    read = Decimal(text)
    unit = Decimal(1).scaleb(int(read.as_tuple().exponent))
    assert abs(read - Decimal(number)) <= unit / 2, (text, number)
    assert (read == 0) == (number == 0), (text, number)
    assert text == "0" or number != 0


@given(NUMBERS, st.integers(1, 17))
def test_significant_digits_read_back_as_the_number(number, digits):
    text = significant(number, digits)
    assert_says(text, number)
    assert len(Decimal(text).as_tuple().digits) <= digits


@given(NUMBERS, st.integers(0, 6), st.integers(6, 12))
def test_digits_of_a_column_read_back_as_the_number(number, decimals, width):
    assert_says(fixed(number, decimals, width), number)


@given(NUMBERS, st.integers(0, 4))
def test_eight_characters_hold_every_number(number, decimals):
    text = fixed(number, decimals, 8)
    assert len(text) <= 8
    digits = Decimal(text).as_tuple().digits
    assert number == 0 or "e" in text or abs(number) >= 1 or len(digits) >= 2


@given(st.floats(0, 1))
def test_percentages_read_back_as_the_share(share):
    assert_says(percent(share).removesuffix("%"), 100 * share)


def test_nonfinite_numbers_are_printed_by_name():
    for way in (significant, lambda x: fixed(x, 2, 8)):
        assert [way(x) for x in (inf, -inf, nan, -0.0)] == ["∞", "-∞", "NaN", "0"]


@given(st.floats(1e-300, 1))
def test_sentences_print_numbers_the_same_way(weight):
    low = say("en", "legend plain", low=weight, high=1.0).split()[1]
    assert_says(low, weight)


@given(st.floats(1e-12, 1e-3))
def test_reports_of_heads_and_tokens_print_small_weights(weight):
    said = str(Summary([Head("0", 0, weight, weight, weight, 1.0, weight)]))
    sink, previous, local, _, entropy = said.splitlines()[1].split()[2:]
    for text in (sink, previous, local, entropy):
        assert_says(text, weight)
    row = np.array([1 - weight, weight])
    token = TokenTrace(0, row, row, row, row[:, None], np.array([weight]), 0.0)
    assert_says(token.written_out().split(" + ")[1].split("·")[0], weight)
