"""Numbers of estimates are written as people read them."""

import pytest

from launcher.answers.main_run_estimate import _span
from launcher.views.numbers import significant


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (367.2, 2, "370"), (4812.0, 2, "4,800"), (92.3, 2, "92"), (0.01234, 3, "0.0123"), (123456.0, 2, "120,000"),
        (999.9, 3, "1,000"), (0.0, 3, "0"), (-4812.0, 2, "-4,800"), (2.4e6, 2, "2.4\u00a0M"), (3e-5, 2, "3e-05"),
        (None, 2, "-"),
    ],
)  # fmt: skip
def test_significant_digits_have_no_exponent(value, digits, text):
    assert significant(value, digits) == text


def test_an_interval_of_hours_is_readable():
    assert _span({"value": 367.2, "interval": [92.4, 4812.0]}, 2) == "370 [92, 4,800]"
