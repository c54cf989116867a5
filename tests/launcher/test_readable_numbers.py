"""Numbers of estimates are written as people read them."""

from launcher.answers.main_run_estimate import _format_estimate


def test_an_interval_of_hours_is_readable():
    assert _format_estimate({"value": 367.2, "interval": [92.4, 4812.0]}, 2) == "370 [92, 4,800]"
