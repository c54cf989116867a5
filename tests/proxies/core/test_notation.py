"""Tests of the notation in which numbers are shown to people."""

import math

import pytest

from forerun._proxies.core import notation


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (367.2, 2, "370"),
        (4812.0, 2, "4,800"),
        (92.3, 2, "92"),
        (0.01234, 3, "0.0123"),
        (123456.0, 2, "120,000"),
        (999.9, 3, "1,000"),
        (0.0, 3, "0"),
        (-4812.0, 2, "-4,800"),
        (2.4e6, 2, "2.4\u00a0M"),
        (3e-5, 2, "3e-05"),
        (1.23e9, 2, "1.2\u00a0B"),
        (None, 2, "-"),
        (math.inf, 3, "inf"),
    ],
)
def test_format_significant_rounds_and_groups_digits(value, digits, text):
    assert notation.format_significant(value, digits) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.856, "85.6"),
        (0.0783, "7.83"),
        (0.0035, "0.35"),
        (3.5e-5, "0.0035"),
        (1.0, "100"),
        (0.99996, "100"),
        (12.5, "1250"),
        (0.995, "99.5"),
        (-0.031, "-3.1"),
    ],
)
def test_format_percent_shows_three_digits(share, text):
    assert notation.format_percent(share) == f"{text}\u00a0%"


def test_shares_may_have_a_sign_no_decimals_or_a_noun():
    assert notation.format_percent(0.0307, is_signed=True) == "+3.07\u00a0%"
    assert notation.format_percent(0.0949, is_whole=True) == "9\u00a0%"
    assert notation.format_main_run_share(0.856) == "85.6\u00a0% of the main run's FLOPs"
    assert notation.format_main_run_share(1.002) == "100\u00a0% of the main run's FLOPs"
    assert notation.format_main_run_share(1.25) == "1.25 times the main run's FLOPs"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (7e-6, "0 s"),
        (0.2512, "0.25 s"),
        (0.97, "0.97 s"),
        (1.44, "1.4 s"),
        (5.0, "5 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7860, "2 h 11 min"),
        (1_051_200, "12 d 04 h"),
        (math.inf, "inf s"),
    ],
)
def test_format_duration_uses_two_units(seconds, text):
    assert notation.format_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "texts"),
    [
        ((43.2, 8.0), ("43 s", "8")),
        ((720, 480, 1200), ("12 min", "8", "20")),
        ((27_000,), ("7.5 h",)),
        ((400_000, 60_000), ("4.6 d", "0.69")),
        ((20_000_000,), ("231 d",)),
    ],
)
def test_format_rough_duration_uses_the_unit_of_the_first_value(seconds, texts):
    assert notation.format_rough_duration(*seconds) == texts


def test_each_quantity_has_its_own_format():
    assert [notation.format_loss(value) for value in (1.29437, 12345.6, None)] == [
        "1.294",
        "12,350",
        "-",
    ]
    assert (
        notation.format_nats(0.04207) == "0.0421"
        and notation.format_nats(-0.00001, is_signed=True) == "+0.0000"
    )
    assert [notation.format_learning_rate(rate) for rate in (0.017832, 0.0039, 3.2e-5)] == [
        "0.01783",
        "0.0039",
        "3.2e-05",
    ]
    assert [notation.format_usd(value) for value in (4.1032, 12345.0)] == ["USD 4.1", "USD 12,300"]
    assert notation.format_speed(12345.6, "tokens") == "12,300 tokens/s"
    assert [notation.format_count(value) for value in (999, 233952, 7.12e6, 999.6e6)] == [
        "999",
        "233,952",
        "7.12\u00a0M",
        "1,000\u00a0M",
    ]
    assert [notation.format_factor(value) for value in (1.2512, 1350.2, 1e12)] == [
        "1.25",
        "1,350",
        "1e+12",
    ]
    assert [notation.format_bytes(value) for value in (512, 25.2e6, 4.1e9)] == [
        "512 bytes",
        "25.2 MB",
        "4.1 GB",
    ]
    assert notation.format_interval((0.1, -0.00001), "+.2f") == "[+0.10, +0.00]"


def test_nouns_agree_with_their_number():
    assert [notation.format_counted(number, "run") for number in (0, 1, 1234)] == [
        "0 runs",
        "1 run",
        "1,234 runs",
    ]
    assert [notation.format_counted(2, noun) for noun in ("batch", "study", "day")] == [
        "2 batches",
        "2 studies",
        "2 days",
    ]
    assert [notation.format_counted(number, "GPU") for number in (1.0, 2.0, 0.5)] == [
        "1 GPU",
        "2 GPUs",
        "0.5 GPUs",
    ]
    assert [notation.add_article(noun) for noun in ("embedding", "readout")] == [
        "an embedding",
        "a readout",
    ]
