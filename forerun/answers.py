"""Results of the Python functions: numbers as attributes, the JSON, and the text of a command."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from forerun._proxies.core.canon import Json

_Interval = tuple[float, float]
PathText = str | os.PathLike[str]
"""A path, as text or as a path object."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Answer:
    """The output of a command."""

    body: dict[str, Any]
    """Keys of the command's `--json`."""
    text: str
    """Text that the command prints."""

    @property
    def warnings(self) -> list[str]:
        """Warnings to read before the numbers are used."""
        return list(self.body.get("warnings", ()))

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Fit(Answer):
    """A fit of scaling laws, with its intervals."""

    file: dict[str, Json] = field(hash=False)
    """Content of the file that `forerun fit --out` writes."""

    @property
    def form(self) -> str:
        """Requested form: `auto`, a law, `isoflop`, `learning_rate`, or `batch`."""
        return str(self.body["form"])

    @property
    def status(self) -> str:
        """`converged`, or the problem. An `unidentified` fit predicts nothing."""
        return str(self.body["status"])

    @property
    def parameters(self) -> dict[str, float | None]:
        """Parameters by name; None if the runs do not identify one."""
        return dict(self.body["parameters"])

    def write(self, path: PathText) -> None:
        """Write the file that `forerun predict` and `forerun allocate` read.

        Raises:
            OSError: The file cannot be written; the error names the path.
        """
        from forerun._scaling_fits import fit_file

        fit_file.write_fit(Path(path), self.file)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Prediction(Answer):
    """The prediction for one new run: its loss, if the fit is a law of the loss.

    A fit of the form `isoflop`, `learning_rate`, or `batch` predicts other values; `body` has them.
    """

    @property
    def loss_nats(self) -> float:
        """Predicted loss in nats per token."""
        if "loss" not in self.body:
            raise AttributeError(f"this fit predicts no loss: `body` has {', '.join(self.body)}")
        return float(self.body["loss"])

    @property
    def interval(self) -> _Interval | None:
        """Interval of the loss, or of the hyperparameter's value; None without a bootstrap."""
        return _to_interval(self.body.get("interval"))


class Predictions(tuple[Prediction, ...]):
    """The predictions for several runs, in the order of the arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(prediction.text for prediction in self)

    @property
    def loss_nats(self) -> NDArray[np.float64]:
        """Predicted losses in nats per token, [num_runs]."""
        import numpy as np

        return np.array([prediction.loss_nats for prediction in self])

    @property
    def interval(self) -> NDArray[np.float64]:
        """Lower and upper ends of the intervals, [num_runs, 2]; NaN without a bootstrap."""
        import numpy as np

        ends = [prediction.interval or (np.nan, np.nan) for prediction in self]
        return np.array(ends, dtype=np.float64).reshape(-1, 2)

    @property
    def body(self) -> list[dict[str, Any]]:
        """The keys of `--json` for each run."""
        return [prediction.body for prediction in self]

    @property
    def warnings(self) -> list[str]:
        """Warnings that apply to the numbers, each once."""
        return list(
            dict.fromkeys(warning for prediction in self for warning in prediction.warnings)
        )


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Allocation(Answer):
    """The best size and tokens for a budget, with their loss."""

    @property
    def params(self) -> float:
        """Number of parameters."""
        return float(self.body["params"])

    @property
    def params_interval(self) -> _Interval | None:
        """Interval of the parameters; None if the runs do not determine the size."""
        return _to_interval(self.body["params_interval"])

    @property
    def tokens(self) -> float:
        """Number of training tokens."""
        return float(self.body["tokens"])

    @property
    def tokens_interval(self) -> _Interval | None:
        """Interval of the tokens; None if the runs do not determine them."""
        return _to_interval(self.body["tokens_interval"])

    @property
    def loss_nats(self) -> float:
        """Predicted loss in nats per token."""
        return float(self.body["loss"])

    @property
    def interval(self) -> _Interval | None:
        """Interval of the loss, nats per token; None without a bootstrap."""
        return _to_interval(self.body["interval"])


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Verdict(Answer):
    """A verdict on whether a value tuned at the base size may be used at the target."""

    @property
    def outcome(self) -> str:
        """Outcome: `holds`, `drifts`, or `cannot_tell`."""
        return str(self.body["outcome"])

    @property
    def transferred_value(self) -> float | None:
        """Value at the target size; None if the runs give none."""
        return _to_number(self.body["transferred_value"])

    @property
    def regret_nats(self) -> float | None:
        """Regret of the transferred value against the target's own optimum, nats per token."""
        return _to_number(self.body["regret_nats"]["value"])

    @property
    def interval(self) -> _Interval | None:
        """Interval of `regret_nats`."""
        return _to_interval(self.body["regret_nats"]["interval"])

    @property
    def drift(self) -> float | None:
        """Octaves by which the optimum moves per doubling of size."""
        return _to_number(self.body["drift_octaves_per_doubling"]["value"])

    @property
    def drift_interval(self) -> _Interval | None:
        """Interval of `drift`."""
        return _to_interval(self.body["drift_octaves_per_doubling"]["interval"])

    @property
    def reasons(self) -> list[str]:
        """Sentences with the reasons for the outcome."""
        return list(self.body["reasons"])


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Explanation(Answer):
    """The sources of the fields of a frozen config."""

    @property
    def values(self) -> dict[str, Any]:
        """Value of each field by name; `body["fields"]` has the sources."""
        return {str(entry["field"]): entry["value"] for entry in self.body["fields"]}


def _to_interval(ends: Any) -> _Interval | None:
    """Convert the two ends in a body of JSON to an interval."""
    return None if ends is None else (float(ends[0]), float(ends[1]))


def _to_number(value: Any) -> float | None:
    """Convert a number in a body of JSON, which may be null."""
    return None if value is None else float(value)
