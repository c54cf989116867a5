"""How a fit of this room lies in a file: its fields as plain JSON data, floats in full. Both kinds go through here."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from proxies.core import canon
from proxies.core.canon import Json
from scaling_fits.compute.compute_fit import ComputeFit
from scaling_fits.compute.hyperparameter_laws import HyperparameterFit
from scaling_fits.compute.options import OptimaError
from scaling_fits.compute.power_laws import PowerLawError

Fit = TypeVar("Fit", ComputeFit, HyperparameterFit)


def write(fit: Fit) -> dict[str, Json]:
    """The fit as data."""
    return {field.name: canon.to_json(getattr(fit, field.name)) for field in dataclasses.fields(fit)}


def read(kind: type[Fit], data: Json) -> Fit:
    """The fit that `write` gave.

    Raises:
        OptimaError: no such fit, or one that was changed; the message says what is wrong with it.
    """
    try:
        return canon.decode(kind, data)
    except (canon.CanonError, PowerLawError, OptimaError) as error:
        raise OptimaError([f"this fit cannot be read: {error}"]) from error
