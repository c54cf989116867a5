"""What a plan may ask of the laws, apart from their numbers: a plan is read, and a config explained, without numpy."""

from __future__ import annotations

from typing import Literal

Form = Literal["chinchilla", "coupled", "power", "kaplan", "overtraining"]
"""A key of `forms.SHAPES`."""
FormChoice = Literal["auto", Form]
"""A form, or those that the runs support, pooled."""
