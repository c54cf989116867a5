"""A study as a table for notebooks and spreadsheets: one row for each outcome of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun._proxies.core import canon
from forerun._proxies.core.hyperparameters import HPARAMS
from forerun._proxies.core.optimizers import has_hyperparameter
from forerun._proxies.core.spec import Run
from forerun._sweeps.store.errors import SweepError, explain_write_errors
from forerun._sweeps.store.ledger import Ledger
from forerun._sweeps.store.sites import DEVICE

if TYPE_CHECKING:
    import pyarrow

FORMATS = (".parquet", ".csv")
_SHAPE = ("width", "num_layers", "num_heads", "num_kv_heads", "ffn_width", "vocab_size", "seq_len")
_COLUMNS: dict[str, type] = {
    "run_id": str,
    "status": str,
    "loss_nats": float,
    "last_train_loss_nats": float,
    **dict.fromkeys(_SHAPE, int),
    "family": str,
    "base_width": int,
    "optimizer": str,
    **dict.fromkeys(HPARAMS, float),
    "schedule": str,
    "warmup_steps": int,
    "num_steps": int,
    "planned_steps": int,
    "batch_tokens": int,
    "tokens": int,
    "flops": float,
    "seconds": float,
    "seed": int,
    "dtype": str,
    "data_id": str,
    "device": str,
    "imported": bool,
    "reason": str,
}
"""Type of each column, by name. `_make_row` has the values; a test compares the names."""


class StudyView:
    """A snapshot of a study's runs; a driver may be running meanwhile."""

    def __init__(self, study_dir: Path) -> None:
        """Read the ledger.

        Raises:
            SweepError: there is no study, or its ledger is damaged (see `Ledger.read`).
        """
        self.ledger = Ledger.read(study_dir)

    def table(self) -> pyarrow.Table:
        """Return a table with one row for each outcome, in the order of commitment.

        A run that was pruned and later run whole has two rows. Units are in the columns' names.
        """
        import pyarrow

        imported = self.ledger.read_imported_ids()
        rows = [
            # An import has no pruned outcome: one of an imported run is the study's own
            _make_row(run, run.result.status != "pruned" and run.spec.id in imported)
            for run in self.ledger.read_runs()
        ]
        types = {
            str: pyarrow.string(),
            int: pyarrow.int64(),
            float: pyarrow.float64(),
            bool: pyarrow.bool_(),
        }
        schema = pyarrow.schema([(name, types[kind]) for name, kind in _COLUMNS.items()])
        return pyarrow.Table.from_pylist(rows, schema=schema)

    def trials(self) -> Any:
        """Return `table` as a `pandas.DataFrame`."""
        return self.table().to_pandas()

    def write(self, path: Path) -> None:
        """Write `table` as .parquet or .csv, whole or not at all.

        Raises:
            SweepError: the name has another ending, or the file cannot be written.
        """
        import pyarrow
        import pyarrow.csv
        import pyarrow.parquet

        if path.suffix not in FORMATS:
            raise SweepError(f"{path}: the name must end in {' or '.join(FORMATS)}")
        buffer = pyarrow.BufferOutputStream()
        if path.suffix == ".csv":
            pyarrow.csv.write_csv(self.table(), buffer)
        else:
            pyarrow.parquet.write_table(self.table(), buffer)
        with explain_write_errors(path, "name a folder that exists, on a disk with free space"):
            canon.write_atomic(path, buffer.getvalue().to_pybytes())


def _make_row(run: Run, imported: bool) -> dict[str, Any]:
    """Return the row of a run."""
    spec, result = run.spec, run.result
    return {
        "run_id": spec.id,
        "status": result.status,
        "loss_nats": result.loss_nats,
        "last_train_loss_nats": result.last_train_loss_nats,
        **{name: getattr(spec.shape, name) for name in (*_SHAPE, "family")},
        "base_width": spec.base_shape.width,
        "optimizer": spec.optimizer,
        **{
            name: getattr(spec.hparams, name) if has_hyperparameter(spec.optimizer, name) else None
            for name in HPARAMS
        },
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
        "device": result.environment.get(DEVICE),
        "imported": imported,
        "reason": result.reason,
    }
