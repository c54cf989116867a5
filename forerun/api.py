"""The commands of `forerun` as Python functions, which take the options as arguments and return the
output; `load` returns a study's runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from forerun._launcher.cli.verbs.explain import explain_fields
from forerun._launcher.main_run.frozen.config_names import find_frozen_config, find_study
from forerun._launcher.report.answers.fit_text import format_fit_body
from forerun._launcher.report.answers.report_text import format_verdict
from forerun._launcher.report.answers.transfer_verdict import judge_table
from forerun._proxies.core.tables.table_files import Source, read_memory_table
from forerun.answers import Allocation, Explanation, Fit, PathText, Prediction, Predictions, Verdict
from forerun.errors import RequestError, as_value_error

if TYPE_CHECKING:
    from forerun._launcher.report.answers.allocation_request import Options
    from forerun._scaling_fits.optima.optima_fit import FlopsSource
    from forerun._sweeps.store.view import StudyView
    from forerun._transfer.question import Axis, Hyperparameter


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
    """Return the path of a table file, or the columns of a table in memory."""
    return Path(table) if isinstance(table, str | os.PathLike) else read_memory_table(table)


@as_value_error
def fit(
    table: Table,
    *,
    form: str = "auto",
    bootstrap: int = 400,
    level: float = 0.9,
    seed: int = 0,
    columns: Mapping[str, str] | None = None,
    compute_from: FlopsSource | None = None,
) -> Fit:
    """Fit scaling laws to runs, as `forerun fit` does.

        fit = forerun.fit({"params": [...], "tokens": [...], "loss": [...]})

    Args:
        table: Columns params, tokens, and loss (nats per token); or a study folder, whose ladder is
            fitted.
        form: What to fit. `auto`: the laws of the loss against N parameters and D tokens that the
            runs and published studies leave possible; the name of a law: only this one; `isoflop`:
            the best N and D for each compute budget; `learning_rate` or `batch`: the optimum of
            this hyperparameter against N and D.
        bootstrap: Number of refits for the intervals; 0 for no intervals.
        level: Level of the intervals, between 0 and 1.
        seed: Seed of the bootstrap.
        columns: The table's column name by forerun's name, such as `{"loss": "val_bpb"}`.
        compute_from: Source of a run's FLOPs for the form isoflop: the column `flops`, the column
            `budget`, or `6nd` (6 * params * tokens). None for the first of these three that the
            table provides.

    Raises:
        ValueError: The table or the options are invalid; all problems are listed. A fit that the
            runs do not identify is not an error: its `status` is `unidentified`.
    """
    from forerun._launcher.report.answers.law_fits import fit_runs_or_study

    options = {"bootstrap": bootstrap, "level": level, "seed": seed}
    file, body = fit_runs_or_study(
        _to_source(table), form, options, columns=columns, compute_from=compute_from
    )
    return Fit(body=body, text=format_fit_body(body), file=file)


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
        params: Number of parameters: a number, or several in a list, a NumPy array, or a
            pandas.Series.
        tokens: Number of training tokens, in the same forms. If one of `params` and `tokens` is a
            number and the other an array, the number applies to each element.
        flops: Compute budget, instead of `params` and `tokens`, for a fit of form isoflop. The best
            size and number of tokens are in `body`.

    Raises:
        ValueError: The form of the fit needs other arguments, or the fit predicts nothing for these
            sizes.
    """
    from forerun._launcher.report.answers.predictions import predict_from
    from forerun._scaling_fits import fit_file

    law = fit_file.from_json(fit.file if isinstance(fit, Fit) else fit_file.read_fit(Path(fit)))
    sizes = {
        name: _read_sizes(name, size)
        for name, size in (("params", params), ("tokens", tokens), ("flops", flops))
    }
    lengths = {name: len(size) for name, size in sizes.items() if isinstance(size, list)}
    if len(set(lengths.values())) > 1:
        raise RequestError(
            "arrays of different lengths: "
            f"{', '.join(f'{name} has {length}' for name, length in lengths.items())}"
        )
    answers = (
        predict_from(
            law,
            {name: size[run] if isinstance(size, list) else size for name, size in sizes.items()},
        )
        for run in range(next(iter(lengths.values()), 1))
    )
    predictions = Predictions(Prediction(body=body, text=text) for body, text in answers)
    return predictions if lengths else predictions[0]


def _read_sizes(name: str, size: Any) -> float | list[float | None] | None:
    """Convert a number to a float, and an array of one dimension to a list of floats."""
    value = size.tolist() if hasattr(size, "tolist") else size
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        return [_read_size(f"{name}[{index}]", element) for index, element in enumerate(value)]
    return None if value is None else _read_size(name, value)


def _read_size(name: str, size: Any) -> float:
    """Convert a number of Python or NumPy to a float; `name` is its name in messages."""
    value = size.item() if hasattr(size, "item") else size
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(
            f"{name} = {size!r}: must be a number, or an array of numbers with one dimension"
        )
    try:
        return float(value)
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
        fit: A fit of a loss law, a file that holds one, or a study folder with a planned budget.
        flops: Budget in FLOPs.
        gpu_hours: Budget in hours of `gpu`, instead of FLOPs.
        usd: Budget in dollars of `gpu` at `price_usd`, instead of FLOPs.
        gpu: Accelerator, such as H100.
        mfu: Share of the GPU's dense BF16 peak that training reaches; None for a published share.
        price_usd: Price of one hour of one GPU in dollars; None for a published price.
        gpus: Number of GPUs that run at once.
        deadline_days: Days until the run must end, on `gpus`.
        batch_tokens: Tokens per step.
        inference_tokens: Tokens served over the model's life; the budget pays for them too.
        unique_tokens: Unique tokens available; training beyond them repeats data.
        shape: Whether `body` gets a model shape too, which the next three arguments restrict.
        tp: Tensor-parallel degree.
        vocab: Vocabulary size.
        seq_len: Context length.
        beyond: Whether to answer for a budget above 1e4 times the FLOPs of the largest fitted run.

    Raises:
        ValueError: There is no budget, arguments conflict, or the fit gives no best size.
    """
    # Read first: `locals()` holds only the arguments here. They are the verb's options, by name.
    options: Options = {name: value for name, value in locals().items() if name != "fit"}
    from forerun._launcher.report.answers import allocation, allocation_request, law_fits

    for name in ("flops", "gpu_hours", "usd"):
        if isinstance(_read_sizes(name, options[name]), list):
            raise RequestError(f"{name}: must be one number; call allocate for each budget")
    if not isinstance(fit, Fit):
        options = allocation_request.add_planned_budget(Path(fit), options)
    request = allocation_request.check_request(options)
    fitted = law_fits.parse_fit(fit.file) if isinstance(fit, Fit) else law_fits.read_fit(Path(fit))
    body = allocation.build_allocation_body(*fitted, request)
    return Allocation(body=body, text=allocation.format_allocation(body))


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
        power: Exponent of the transfer rule value * (target / base)^power; `measured` for the
            exponent that is fitted to the optima.
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
    return Verdict(body=body, text=format_verdict(body))


def load(study: PathText | None = None) -> StudyView:
    """Load a study's runs: `forerun.load("study").trials()` is a pandas.DataFrame, `.table()` a
    pyarrow.Table.

    Args:
        study: Folder of the study, or the name of a frozen config in it; None for `./study`.

    Raises:
        ValueError: There is no study, or it is damaged.
    """
    from forerun._sweeps.store.view import StudyView

    return StudyView(find_study(None if study is None else os.fspath(study)))


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
    body, text = explain_fields(
        find_frozen_config(None if frozen is None else os.fspath(frozen)), field
    )
    return Explanation(body=body, text=text)
