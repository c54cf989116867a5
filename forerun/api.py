"""The commands as functions: each asks what its verb asks, and gives back what the verb prints."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from forerun.errors import RequestError, as_value_error
from launcher.answers.allocation_request import checked
from launcher.answers.law_fits import fit_of, law_in, read_fit
from launcher.answers.texts import verdict_text
from launcher.answers.transfer_verdict import judge_table
from launcher.base.study_names import frozen_named, study_named
from launcher.verbs import allocate as allocate_verb
from launcher.verbs import predict as predict_verb
from launcher.verbs.explain import explained_fields
from launcher.verbs.fits import body_text
from proxies.core.tables.table_files import Source, cells_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from proxies.core.canon import Json
    from scaling_fits.compute.optima import FlopsSource
    from scaling_fits.fit_file import Fit as FitRecord
    from sweeps.store.view import StudyView
    from transfer.question import Axis, Hyperparameter

_Interval = tuple[float, float]


class Frame(Protocol):
    """A pandas.DataFrame or a pyarrow.Table."""

    @property
    def columns(self) -> Any:
        """The columns, or their names."""


PathText = str | os.PathLike[str]
Sizes = float | Iterable[float]
"""A number, or several in a list, a NumPy array, or a pandas.Series."""
Table = PathText | Frame | Mapping[str, Iterable[object]] | Iterable[Mapping[str, object]]
"""A .csv, .jsonl or .parquet file, a frame, columns by name, or rows. Messages count rows in memory
from 0."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Answer:
    """What a command prints."""

    body: dict[str, Any]
    """The keys of its `--json`."""
    text: str
    """The same in words."""

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Fit(Answer):
    """A fit, with its intervals."""

    file: dict[str, Json] = field(hash=False)
    """The content of the file that `forerun fit --out` writes."""

    @property
    def form(self) -> str:
        """As asked: `auto`, a law, `isoflop`, `learning_rate` or `batch`."""
        return str(self.body["form"])

    @property
    def status(self) -> str:
        """`converged`, or what is wrong: of an `unidentified` fit nothing can be predicted."""
        return str(self.body["status"])

    @property
    def parameters(self) -> dict[str, float | None]:
        """By name; None: the runs do not identify it."""
        return dict(self.body["parameters"])

    @property
    def warnings(self) -> list[str]:
        """What to know before the numbers are used."""
        return list(self.body["warnings"])

    def write(self, path: PathText) -> None:
        """Write the file that `forerun predict` and `forerun allocate` read.

        Raises:
            OSError: naming the path.
        """
        from scaling_fits import fit_file

        fit_file.write(Path(path), self.file)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Prediction(Answer):
    """The loss of one new run; of a fit of another form `body` alone has what it predicts."""

    @property
    def loss_nats(self) -> float:
        """Nats per token."""
        if "loss" not in self.body:
            raise AttributeError(f"this fit predicts no loss: `body` has {', '.join(self.body)}")
        return float(self.body["loss"])

    @property
    def interval(self) -> _Interval | None:
        """Of the loss, or of the hyperparameter's value; None without a bootstrap."""
        return _pair(self.body.get("interval"))

    @property
    def warnings(self) -> list[str]:
        """What to know before the number is used."""
        return list(self.body["warnings"])


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Predictions(Sequence[Prediction]):
    """The predictions for several runs, in the order of the arguments."""

    each: tuple[Prediction, ...]

    @overload
    def __getitem__(self, place: int) -> Prediction: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Prediction, ...]: ...

    def __getitem__(self, place: int | slice) -> Prediction | tuple[Prediction, ...]:
        return self.each[place]

    def __len__(self) -> int:
        return len(self.each)

    def __repr__(self) -> str:
        return "\n".join(prediction.text for prediction in self.each)

    @property
    def loss_nats(self) -> NDArray[np.float64]:
        """Predicted losses in nats per token, [num_runs]."""
        import numpy as np

        return np.array([prediction.loss_nats for prediction in self.each])

    @property
    def interval(self) -> NDArray[np.float64]:
        """Lower and upper ends of the intervals, [num_runs, 2]; NaN without a bootstrap."""
        import numpy as np

        ends = [prediction.interval or (np.nan, np.nan) for prediction in self.each]
        return np.array(ends, dtype=np.float64).reshape(-1, 2)

    @property
    def body(self) -> list[dict[str, Any]]:
        """The keys of `--json` for each run."""
        return [prediction.body for prediction in self.each]

    @property
    def warnings(self) -> list[str]:
        """Warnings that apply to the numbers, each once."""
        return list(
            dict.fromkeys(warning for prediction in self.each for warning in prediction.warnings)
        )


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Allocation(Answer):
    """The best size and tokens for a budget."""

    @property
    def params(self) -> float:
        """Parameters, N."""
        return float(self.body["params"])

    @property
    def params_interval(self) -> _Interval | None:
        """None where the runs do not determine the size."""
        return _pair(self.body["params_interval"])

    @property
    def tokens(self) -> float:
        """Training tokens, D."""
        return float(self.body["tokens"])

    @property
    def tokens_interval(self) -> _Interval | None:
        """None where the runs do not determine it."""
        return _pair(self.body["tokens_interval"])

    @property
    def loss_nats(self) -> float:
        """Nats per token."""
        return float(self.body["loss"])

    @property
    def interval(self) -> _Interval | None:
        """Of the loss, nats per token; None without a bootstrap."""
        return _pair(self.body["interval"])

    @property
    def warnings(self) -> list[str]:
        """What to know before the numbers are used."""
        return list(self.body["warnings"])


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Verdict(Answer):
    """Whether a value tuned at the base size may be used at the target."""

    @property
    def outcome(self) -> str:
        """`holds`, `drifts` or `cannot_tell`."""
        return str(self.body["outcome"])

    @property
    def transferred_value(self) -> float | None:
        """The value at the target size; None if the runs give none."""
        return _number(self.body["transferred_value"])

    @property
    def regret_nats(self) -> float | None:
        """Cost at the target of the transferred value against the target's own optimum, nats per
        token.
        """
        return _number(self.body["regret_nats"]["value"])

    @property
    def interval(self) -> _Interval | None:
        """Of `regret_nats`."""
        return _pair(self.body["regret_nats"]["interval"])

    @property
    def drift(self) -> float | None:
        """Octaves by which the optimum moves per doubling of size."""
        return _number(self.body["drift_octaves_per_doubling"]["value"])

    @property
    def drift_interval(self) -> _Interval | None:
        """Of `drift`."""
        return _pair(self.body["drift_octaves_per_doubling"]["interval"])

    @property
    def reasons(self) -> list[str]:
        """Why the outcome is what it is."""
        return list(self.body["reasons"])


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Explanation(Answer):
    """Where fields of a frozen config come from."""

    @property
    def values(self) -> dict[str, Any]:
        """Value by name of the field; `body["fields"]` has their sources."""
        return {str(one["field"]): one["value"] for one in self.body["fields"]}


def _source(table: Table) -> Source:
    return Path(table) if isinstance(table, str | os.PathLike) else cells_of(table)


def _pair(ends: Any) -> _Interval | None:
    return None if ends is None else (float(ends[0]), float(ends[1]))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


@as_value_error
def fit(
    table: Table,
    *,
    form: str = "auto",
    bootstrap: int = 400,
    level: float = 0.9,
    seed: int = 0,
    params_column: str = "",
    columns: Mapping[str, str] | None = None,
    compute_from: FlopsSource | None = None,
) -> Fit:
    """Fit scaling laws to runs, as `forerun fit`.

        fit = forerun.fit({"params": [...], "tokens": [...], "loss": [...]})

    Args:
        table: columns params, tokens and loss (nats per token); or a study folder: its ladder.
        form: `auto` pools the laws of loss; a law by name; `isoflop`; `learning_rate` or `batch`.
        bootstrap: refits for the intervals; 0: none.
        level: of the intervals, between 0 and 1.
        seed: of the bootstrap.
        params_column: the column of N, as `columns={"params": ...}`; empty: the one that its name
            tells.
        columns: the table's own names of columns by forerun's, such as `{"loss": "val_bpb"}`.
        compute_from: for the form isoflop, what a run's FLOPs are; None: the first of the three
            that there is.

    Raises:
        ValueError: all that is wrong with the table or the options. A fit that the runs do not
            identify is no error: its `status` is `unidentified`.
    """
    options = {"bootstrap": bootstrap, "level": level, "seed": seed}
    file, body = fit_of(
        _source(table), form, params_column, options, columns=columns, compute_from=compute_from
    )
    return Fit(body=body, text=body_text(body), file=file)


if TYPE_CHECKING:

    @overload
    def predict(
        fit: Fit | PathText,
        *,
        params: float | None = None,
        tokens: float | None = None,
        flops: float | None = None,
    ) -> Prediction: ...

    @overload
    def predict(
        fit: Fit | PathText,
        *,
        params: Sizes | None = None,
        tokens: Sizes | None = None,
        flops: Sizes | None = None,
    ) -> Prediction | Predictions: ...


@as_value_error
def predict(
    fit: Fit | PathText,
    *,
    params: Sizes | None = None,
    tokens: Sizes | None = None,
    flops: Sizes | None = None,
) -> Prediction | Predictions:
    """Predict the loss of one new run, as `forerun predict`; or of several runs, one for each
    element of an array.

        forerun.predict(fit, params=7e9, tokens=1.4e11).loss_nats
        forerun.predict(fit, params=[1e9, 7e9], tokens=[2e10, 1.4e11]).loss_nats

    Args:
        fit: of `fit`, or a file that it wrote.
        params: N; a number, or numbers in a list, a NumPy array or a pandas.Series.
        tokens: D; likewise. A number beside an array counts for each of its elements.
        flops: for a fit of form isoflop, instead: the best size and tokens are in `body`.

    Raises:
        ValueError: sizes that this form of fit does not take, or a fit that gives no number there.
    """
    from scaling_fits import fit_file

    file: Json = fit.file if isinstance(fit, Fit) else fit_file.read(Path(fit))
    law = fit_file.from_file(file)
    read = {
        name: _read_sizes(name, size)
        for name, size in (("params", params), ("tokens", tokens), ("flops", flops))
    }
    lengths = {name: len(size) for name, size in read.items() if isinstance(size, list)}
    if not lengths:
        return _predict_one(
            law, {name: size for name, size in read.items() if not isinstance(size, list)}
        )
    if len(set(lengths.values())) > 1:
        raise RequestError(
            f"arrays of different lengths: {', '.join(f'{n} has {k}' for n, k in lengths.items())}"
        )
    each = [
        {name: size[place] if isinstance(size, list) else size for name, size in read.items()}
        for place in range(next(iter(lengths.values())))
    ]
    return Predictions(each=tuple(_predict_one(law, sizes) for sizes in each))


def _predict_one(law: FitRecord, sizes: dict[str, float | None]) -> Prediction:
    body, text = predict_verb.predicted(law, sizes)
    return Prediction(body=body, text=text)


def _read_sizes(name: str, size: Any) -> float | list[float | None] | None:
    """Convert a number to a float, and an array of one dimension to a list of floats."""
    if size is None:
        return None
    plain = size.tolist() if hasattr(size, "tolist") else size
    if isinstance(plain, Iterable) and not isinstance(plain, str | bytes | Mapping):
        return [_read_size(f"{name}[{place}]", element) for place, element in enumerate(plain)]
    return _read_size(name, plain)


def _read_size(name: str, size: Any) -> float:
    plain = size.item() if hasattr(size, "item") and getattr(size, "ndim", 0) == 0 else size
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        raise RequestError(
            f"{name} = {size!r}: must be a number, or an array of numbers with one dimension"
        )
    try:
        return float(plain)
    except OverflowError as error:
        raise RequestError(f"{name}: an integer too large for a float") from error


@as_value_error
def allocate(
    fit: Fit | PathText,
    *,
    flops: float | None = None,
    gpu_hours: float | None = None,
    usd: float | None = None,
    gpu: str | None = None,
    mfu: float | None = None,
    price_usd: float | None = None,
    gpus: int | None = None,
    deadline_days: float | None = None,
    batch_tokens: int | None = None,
    inference_tokens: float | None = None,
    unique_tokens: float | None = None,
    shape: bool = False,
    tp: int | None = None,
    vocab: int | None = None,
    seq_len: int | None = None,
    beyond: bool = False,
) -> Allocation:
    """Give the best size and tokens for a budget, as `forerun allocate`.

        forerun.allocate(fit, usd=50_000, gpu="H100").params

    Args:
        fit: of a law, from `fit`; a file that it wrote; or a study folder, whose plan has the
            budget.
        flops: budget in FLOPs; or
        gpu_hours: in hours of `gpu`; or
        usd: in dollars of `gpu` at `price_usd`.
        gpu: accelerator, e.g. H100.
        mfu: share of its dense BF16 peak that training reaches; None: by published runs.
        price_usd: of one GPU-hour; None: a published one.
        gpus: that run at once.
        deadline_days: days until the run must end, on `gpus`.
        batch_tokens: tokens per step.
        inference_tokens: to serve over the model's life; the budget pays for them too.
        unique_tokens: available; training beyond them repeats data.
        shape: also choose a shape in whole numbers, in `body`, by the next three.
        tp: tensor-parallel degree.
        vocab: vocabulary.
        seq_len: context.
        beyond: answer even above 1e4 times the largest fitted FLOPs.

    Raises:
        ValueError: no budget, options that do not go together, or a fit that determines nothing.
    """
    for name, amount in (("flops", flops), ("gpu_hours", gpu_hours), ("usd", usd)):
        if isinstance(_read_sizes(name, amount), list):
            raise RequestError(f"{name}: must be one number; call allocate for each budget")
    typed = {
        "flops": flops,
        "gpu_hours": gpu_hours,
        "usd": usd,
        "gpu": gpu,
        "mfu": mfu,
        "price_usd": price_usd,
        "gpus": gpus,
        "deadline_days": deadline_days,
        "batch_tokens": batch_tokens,
        "inference_tokens": inference_tokens,
        "unique_tokens": unique_tokens,
        "shape": shape,
        "tp": tp,
        "vocab": vocab,
        "seq_len": seq_len,
        "beyond": beyond,
    }
    if isinstance(fit, Fit):
        request, (law, template) = checked(typed), law_in(fit.file)
    else:
        request = checked(allocate_verb.with_planned_budget(Path(fit), typed))
        law, template = read_fit(Path(fit))
    body = allocate_verb.allocation_body(law, request, template)
    return Allocation(body=body, text=allocate_verb.allocation_text(body))


@as_value_error
def transfer(
    table: Table,
    *,
    target_size: int | None = None,
    target_width: int | None = None,
    base_size: int | None = None,
    axis: Axis | None = None,
    hyperparameter: Hyperparameter | None = None,
    power: float | Literal["measured"] = 0.0,
    margin_nats: float = 0.01,
    level: float = 0.9,
    columns: Mapping[str, str] | None = None,
) -> Verdict:
    """Judge from runs whether a hyperparameter transfers to a larger size, as `forerun transfer
    --runs`.

        forerun.transfer("runs.csv", target_width=8192).outcome

    Args:
        table: columns width, lr, loss (nats per token) and optionally seed, or width and
            lr_optimum; other axes and hyperparameters by their names.
        target_size: the main run's size; None: twice the largest.
        target_width: another name of `target_size`.
        base_size: where the value was tuned; None: the smallest.
        axis: what grows; None: the only size that varies.
        hyperparameter: None: the learning rate, or what varies.
        power: the value moves as (target / base)^power; `measured`: as the optima do.
        margin_nats: the cost allowed, nats per token.
        level: of every interval.
        columns: the table's own names of columns by forerun's, such as `{"loss": "val_bpb"}`.

    Raises:
        ValueError: all that is wrong with the table or the options.
    """
    if target_size is not None and target_width is not None:
        raise RequestError("target_size and target_width are one option: give one of them")
    target = target_width if target_size is None else target_size
    body = judge_table(
        _source(table),
        axis=axis,
        hyperparameter=hyperparameter,
        target_size=target,
        base_size=base_size,
        power=power if power == "measured" else float(power),
        margin_nats=margin_nats,
        level=level,
        columns=columns,
    )
    return Verdict(body=body, text=verdict_text(body))


def load(study: PathText | None = None) -> StudyView:
    """A study's runs: `forerun.load("study").trials()` is a pandas.DataFrame, `.table()` a
    pyarrow.Table.

    Args:
        study: its folder, or the name of a frozen config in it; None: `./study`.

    Raises:
        ValueError: no study there, or not a sound one.
    """
    import sweeps

    return sweeps.load(study_named(None if study is None else os.fspath(study)))


def explain(frozen: PathText | None = None, field: str | None = None) -> Explanation:
    """Where fields of a frozen config come from, as `forerun explain FROZEN FIELD`.

        forerun.explain("study", "learning_rate").values

    Args:
        frozen: its folder or `launch.json`, the first characters of its digest, a study that holds
            one, or `latest`; None: the only one of `./study`.
        field: its name, or a prefix; None: all.

    Raises:
        ValueError: no such config or field, or one that was edited.
    """
    body, text = explained_fields(
        frozen_named(None if frozen is None else os.fspath(frozen)), field
    )
    return Explanation(body=body, text=text)
