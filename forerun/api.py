"""The commands as Python functions, which take the commands' options and return their output."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from forerun.answers import Allocation, Explanation, Fit, PathText, Prediction, Predictions, Verdict
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
    from proxies.core.canon import Json
    from scaling_fits.compute.optima import FlopsSource
    from scaling_fits.fit_file import Fit as FitRecord
    from sweeps.store.view import StudyView
    from transfer.question import Axis, Hyperparameter


class Frame(Protocol):
    """A data frame: a pandas.DataFrame or a pyarrow.Table."""

    @property
    def columns(self) -> Any:
        """Columns, or their names."""


Sizes = float | Iterable[float]
"""A number, or several in a list, a NumPy array, or a pandas.Series."""
Table = PathText | Frame | Mapping[str, Iterable[object]] | Iterable[Mapping[str, object]]
"""A .csv, .jsonl, or .parquet file, a frame, columns by name, or rows. Messages number the rows in
memory from 0."""


def _to_source(table: Table) -> Source:
    return Path(table) if isinstance(table, str | os.PathLike) else cells_of(table)


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
    """Fit scaling laws to runs, as `forerun fit` does.

        fit = forerun.fit({"params": [...], "tokens": [...], "loss": [...]})

    Args:
        table: Columns params, tokens, and loss (nats per token); or a study folder, whose ladder is
            fitted.
        form: `auto` pools the laws of loss; a law by name; `isoflop`; `learning_rate` or `batch`.
        bootstrap: Number of refits for the intervals; 0 for no intervals.
        level: Level of the intervals, between 0 and 1.
        seed: Seed of the bootstrap.
        params_column: The column of N, like `columns={"params": ...}`; empty to recognize it by its
            name.
        columns: The table's column name by forerun's name, such as `{"loss": "val_bpb"}`.
        compute_from: Source of a run's FLOPs for the form isoflop; None for the first of the three
            that the table has.

    Raises:
        ValueError: The table or the options are invalid; all problems are listed. A fit that the
            runs do not identify is not an error: its `status` is `unidentified`.
    """
    options = {"bootstrap": bootstrap, "level": level, "seed": seed}
    file, body = fit_of(
        _to_source(table), form, params_column, options, columns=columns, compute_from=compute_from
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
    """Predict the loss of one new run, as `forerun predict` does, or of several runs, one for each
    element of an array.

        forerun.predict(fit, params=7e9, tokens=1.4e11).loss_nats
        forerun.predict(fit, params=[1e9, 7e9], tokens=[2e10, 1.4e11]).loss_nats

    Args:
        fit: A result of `fit`, or a file that it wrote.
        params: N: a number, or numbers in a list, a NumPy array, or a pandas.Series.
        tokens: D: likewise. A number beside an array applies to each of its elements.
        flops: Budget, instead of sizes, for a fit of form isoflop: the best size and tokens are in
            `body`.

    Raises:
        ValueError: The form of fit does not take these sizes, or the fit has no number there.
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
        return _predict_run(
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
    return Predictions(each=tuple(_predict_run(law, sizes) for sizes in each))


def _predict_run(law: FitRecord, sizes: dict[str, float | None]) -> Prediction:
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
    """Choose the best size and tokens for a budget, as `forerun allocate` does.

        forerun.allocate(fit, usd=50_000, gpu="H100").params

    Args:
        fit: A fit of a law; a file of one; or a study folder, whose plan has the budget.
        flops: Budget in FLOPs.
        gpu_hours: Budget in hours of `gpu`, instead of FLOPs.
        usd: Budget in dollars of `gpu` at `price_usd`, instead of FLOPs.
        gpu: Accelerator, such as H100.
        mfu: Share of its dense BF16 peak that training reaches; None for that of published runs.
        price_usd: Price of one GPU-hour; None for a published one.
        gpus: Number of GPUs that run at once.
        deadline_days: Days until the run must end, on `gpus`.
        batch_tokens: Tokens per step.
        inference_tokens: Tokens served over the model's life; the budget pays for them too.
        unique_tokens: Unique tokens available; training beyond them repeats data.
        shape: Whether to choose an integer shape, in `body`, by the next three options.
        tp: Tensor-parallel degree.
        vocab: Vocabulary size.
        seq_len: Context length.
        beyond: Whether to answer above 1e4 times the largest fitted FLOPs.

    Raises:
        ValueError: There is no budget, options conflict, or the fit determines nothing.
    """
    budget = {"flops": flops, "gpu_hours": gpu_hours, "usd": usd, "deadline_days": deadline_days}
    machine = {"gpu": gpu, "mfu": mfu, "price_usd": price_usd, "gpus": gpus}
    data = {"inference_tokens": inference_tokens, "unique_tokens": unique_tokens}
    run = {"batch_tokens": batch_tokens, "shape": shape, "tp": tp, "vocab": vocab}
    return _allocate_budget(
        fit, budget | machine | data | run | {"seq_len": seq_len, "beyond": beyond}
    )


def _allocate_budget(fit: Fit | PathText, options: dict[str, Any]) -> Allocation:
    for name in ("flops", "gpu_hours", "usd"):
        if isinstance(_read_sizes(name, options[name]), list):
            raise RequestError(f"{name}: must be one number; call allocate for each budget")
    if isinstance(fit, Fit):
        request, (law, template) = checked(options), law_in(fit.file)
    else:
        request = checked(allocate_verb.with_planned_budget(Path(fit), options))
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
    --runs` does.

        forerun.transfer("runs.csv", target_width=8192).outcome

    Args:
        table: Columns width, lr, loss (nats per token), and optionally seed; or width and
            lr_optimum. Other axes and hyperparameters go by their names.
        target_size: Size of the main run; None for twice the largest.
        target_width: Another name of `target_size`.
        base_size: Size where the value was tuned; None for the smallest.
        axis: Size that grows; None for the only size that varies.
        hyperparameter: Hyperparameter to judge; None for the learning rate, or the one that varies.
        power: Exponent of the rule value * (target / base)^power; `measured` for that of the
            optima.
        margin_nats: Regret that is allowed, nats per token.
        level: Level of every interval.
        columns: The table's column name by forerun's name, such as `{"loss": "val_bpb"}`.

    Raises:
        ValueError: The table or the options are invalid; all problems are listed.
    """
    if target_size is not None and target_width is not None:
        raise RequestError("target_size and target_width are one option: give one of them")
    target = target_width if target_size is None else target_size
    body = judge_table(
        _to_source(table),
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
    """Load a study's runs: `forerun.load("study").trials()` is a pandas.DataFrame, `.table()` a
    pyarrow.Table.

    Args:
        study: Folder of the study, or the name of a frozen config in it; None for `./study`.

    Raises:
        ValueError: There is no study, or it is damaged.
    """
    import sweeps

    return sweeps.load(study_named(None if study is None else os.fspath(study)))


def explain(frozen: PathText | None = None, field: str | None = None) -> Explanation:
    """Explain the sources of a frozen config's fields, as `forerun explain FROZEN FIELD` does.

        forerun.explain("study", "learning_rate").values

    Args:
        frozen: Folder of the config or `launch.json`, the first characters of its digest, a study
            with one config, or `latest`; None for the only one of `./study`.
        field: Name of a field, or a prefix; None for all fields.

    Raises:
        ValueError: There is no such config or field, or the config was edited.
    """
    body, text = explained_fields(
        frozen_named(None if frozen is None else os.fspath(frozen)), field
    )
    return Explanation(body=body, text=text)
