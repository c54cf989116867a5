"""A study as a table: every run with its outcome, one row each, for notebooks and spreadsheets."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from proxies.core import canon
from proxies.core.hyperparameters import HPARAMS, warmup_of
from proxies.core.schedule import whole_warmup
from proxies.core.spec import Curve, Run, RunSpec
from sweeps.search.source import suggested
from sweeps.search.space import Params
from sweeps.store.curves import load_curve
from sweeps.store.errors import DiskFull, SweepError
from sweeps.store.ledger import IMPORTED, Ledger

if TYPE_CHECKING:
    import pyarrow

FORMATS = (".parquet", ".csv")
_SHAPE = ("width", "num_layers", "num_heads", "num_kv_heads", "ffn_width", "vocab_size", "seq_len")
_COLUMNS: dict[str, type] = {
    "run_id": str, "trial": int, "status": str, "loss_nats": float, "last_train_loss_nats": float,
    **dict.fromkeys(_SHAPE, int), "family": str, "base_width": int, **dict.fromkeys(HPARAMS, float),
    "schedule": str, "warmup_steps": int, "num_steps": int, "planned_steps": int, "batch_tokens": int, "tokens": int,
    "flops": float, "seconds": float, "seed": int, "dtype": str, "data_id": str, "imported": bool, "reason": str,
}  # fmt: skip


class StudyView:
    """A study's runs, as they were when it was read; a driver may be at work meanwhile."""

    def __init__(self, study_dir: Path) -> None:
        """Read the ledger.

        Raises:
            SweepError: no study there, or not a sound one (see `Ledger.read`).
        """
        self.study_dir = study_dir
        self.ledger = Ledger.read(study_dir)

    @property
    def runs(self) -> tuple[Run, ...]:
        """Every outcome, in the order of commitment: of a run that was pruned, then run whole, there are two."""
        return self.ledger.runs()

    def points(self) -> list[Params]:
        """What the search suggested, by index."""
        return suggested(self.ledger, "search")

    def run_of(self, point: Params) -> Run | None:
        """The search's run of a point; None while it has no outcome."""
        alike = self._by_rate.get(point["learning_rate"], [])
        return next((run for run in alike if _is_of(run.spec, point)), None)

    @functools.cached_property
    def _by_rate(self) -> dict[float, list[Run]]:
        """Runs that may be trials by learning rate: those of this study, then imported ones, which may be of another's
        numerics; the earliest first.
        """
        plan = cast(dict[str, Any], self.ledger.plan)
        asked = (plan["search"]["seed"], plan["proxy"]["num_steps"], plan["proxy"]["batch_tokens"])
        found: dict[float, list[Run]] = {}
        for run in sorted(self.runs, key=self._is_imported):
            spec = run.spec
            if spec.shape == spec.base_shape and (spec.seed, spec.schedule.num_steps, spec.batch_tokens) == asked:
                found.setdefault(spec.hparams.learning_rate, []).append(run)
        return found

    def curve(self, run_id: str) -> Curve:
        """What a run logged, the whole of it if there is more than the first steps of one that was pruned.

        Raises KeyError for a run without an outcome, CurveCorrupt as `load_curve`.
        """
        result = self.ledger.results().get(run_id) or self.ledger.first_results()[run_id]
        return load_curve(self.study_dir, result)

    def table(self) -> pyarrow.Table:
        """One row a run, in the order of commitment; units are in the columns' names."""
        import pyarrow

        found = enumerate(map(self.run_of, self.points()))
        trials = {(run.spec.id, run.result.status): index for index, run in found if run is not None}
        rows = [_row(run, trials.get((run.spec.id, run.result.status)), self._is_imported(run)) for run in self.runs]
        types = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()}
        schema = pyarrow.schema([(name, types[kind]) for name, kind in _COLUMNS.items()])
        return pyarrow.table({name: [row[name] for row in rows] for name in _COLUMNS}, schema=schema)

    def trials(self) -> Any:
        """`table` as a `pandas.DataFrame`."""
        return self.table().to_pandas()

    def write(self, path: Path) -> None:
        """Write `table` as .parquet or .csv, whole or not at all.

        Raises:
            SweepError: another ending, or the file cannot be written.
        """
        import pyarrow
        import pyarrow.csv
        import pyarrow.parquet

        if path.suffix not in FORMATS:
            raise SweepError(f"{path}: a name that ends in {' or '.join(FORMATS)} is wanted")
        buffer = pyarrow.BufferOutputStream()
        if path.suffix == ".csv":
            pyarrow.csv.write_csv(self.table(), buffer)
        else:
            pyarrow.parquet.write_table(self.table(), buffer)
        try:
            canon.write_atomic(path, buffer.getvalue().to_pybytes())
        except OSError as error:
            raise DiskFull(f"{path}: {error.strerror}: name a folder that exists and has room") from error

    def _is_imported(self, run: Run) -> bool:
        return run.result.status != "pruned" and self.ledger.find(IMPORTED, run.spec.id) is not None


def _is_of(spec: RunSpec, point: Params) -> bool:
    """Whether a run has a point's values."""
    schedule = spec.schedule
    if schedule.warmup_steps != whole_warmup(warmup_of(point), schedule.num_steps, schedule.decay_steps):
        return False
    # A search's 0.0 of the gradient norm is no clipping.
    return all((getattr(spec.hparams, name) or 0.0) == value for name, value in point.items() if name in HPARAMS)


def _row(run: Run, trial: int | None, imported: bool) -> dict[str, Any]:
    spec, result = run.spec, run.result
    return {
        "run_id": spec.id,
        "trial": trial,
        "status": result.status,
        "loss_nats": result.loss_nats,
        "last_train_loss_nats": result.last_train_loss_nats,
        **{name: getattr(spec.shape, name) for name in (*_SHAPE, "family")},
        "base_width": spec.base_shape.width,
        **{name: getattr(spec.hparams, name) for name in HPARAMS},
        "schedule": spec.schedule.kind,
        "warmup_steps": spec.schedule.warmup_steps,
        "num_steps": result.num_steps,
        "planned_steps": spec.schedule.num_steps,
        "batch_tokens": spec.batch_tokens,
        "tokens": result.tokens,
        "flops": result.flops,
        "seconds": result.seconds,
        "seed": spec.seed,
        "dtype": spec.numerics.dtype,
        "data_id": spec.data_id,
        "imported": imported,
        "reason": result.reason,
    }
