"""Whether wider is better, in words."""

from __future__ import annotations

from typing import Any

from launcher.views.numbers import interval, listed, number, words


def wider_text(body: Any) -> str:
    """One sentence: the outcome, over what, and the pair of widths that does worst."""
    pairs = body["pairs"]
    sizes = sorted({size for pair in pairs for size in (pair["small"], pair["large"])})
    rates = sorted({pair["learning_rate"] for pair in pairs})
    said = f"{words(body['outcome'])}: training loss over widths {listed([str(size) for size in sizes])}"
    said += f" at {len(rates)} learning rate{'s' * (len(rates) > 1)}"
    if body["outcome"] == "passes":
        return f"{said}, wider never worse by {body['margin_nats']:g} nats at any step"
    worst = max(pairs, key=lambda pair: (pair["outcome"] == "fails", pair["excess_nats"]))
    first, last = worst["steps"]
    return (
        f"{said}; width {worst['large']} is {worst['excess_nats']:+.4f} {interval(worst['interval'])} nats from width "
        f"{worst['small']} in steps {first} to {last} at {number(worst['learning_rate'])}"
    )
