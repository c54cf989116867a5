"""The check that wider models have a lower training loss at every step, in words."""

from __future__ import annotations

from typing import Any

from launcher.views.numbers import listed, words
from proxies.core.notation import counted, format_interval, format_learning_rate, format_nats


def wider_text(body: Any) -> str:
    """Describe the outcome, the widths compared, and the worst pair of widths, in one sentence."""
    pairs = body["pairs"]
    sizes = sorted({size for pair in pairs for size in (pair["small"], pair["large"])})
    rates = sorted({pair["learning_rate"] for pair in pairs})
    summary = (
        f"{words(body['outcome'])}: training loss over widths "
        f"{listed([str(size) for size in sizes])}"
    )
    summary += f" at {counted(len(rates), 'learning rate')}"
    if body["outcome"] == "passes":
        return f"{summary}, wider never worse by {body['margin_nats']:g} nats at any step"
    worst = max(pairs, key=lambda pair: (pair["outcome"] == "fails", pair["excess_nats"]))
    first, last = worst["steps"]
    return (
        f"{summary}; width {worst['large']} is {format_nats(worst['excess_nats'], is_signed=True)} "
        f"{format_interval(worst['interval'], '+.4f')} nats from width {worst['small']} in steps "
        f"{first} to {last} "
        f"at learning rate {format_learning_rate(worst['learning_rate'])}"
    )
