"""Test of the notation of estimates: few digits, with thousands separators."""

from forerun._launcher.report.answers.estimate_text import _format_estimate


def test_interval_of_hours_is_rounded():
    assert _format_estimate({"value": 367.2, "interval": [92.4, 4812.0]}, 2) == "370 [92, 4,800]"
