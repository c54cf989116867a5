"""Curves of runs, one parquet file per run, written whole and durably or not at all.

If a run's gradient noise is measured, the worker appends it to `curves/<run id>.noise.jsonl`. No
result depends on that file: a run that lacks the file, or some of its lines, only lacks its noise
scale.
"""

from __future__ import annotations

import array
import contextlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forerun._proxies.core import canon
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.noise_scale import NoiseLook
from forerun._proxies.core.plain_files import open_to_append, read_plain, require_plain
from forerun._proxies.core.spec import Curve, RunResult
from forerun._sweeps.store.errors import KEPT_ADVICE, CurveCorrupt, explain_write_errors

CURVES_DIR = "curves"

_RUN_ID = re.compile(r"[0-9a-f]{64}")


def is_run_id(text: str) -> bool:
    """Return whether `text` has the form of a run's id: 64 hex digits.

    Such a text cannot lead to a path outside the study.
    """
    return _RUN_ID.fullmatch(text) is not None


def require_run_id(run_id: str) -> str:
    """Return the id.

    Raises:
        ValueError: it is not a sha256 in hex; other text could lead to a path outside the study.
    """
    if not is_run_id(run_id):
        raise ValueError(f"run_id = {run_id!r}: must be 64 hex digits")
    return run_id


def get_curve_path(study_dir: Path, run_id: str, *, pruned: bool = False) -> Path:
    """Return the path of a run's curve: `curves/<run id>.parquet`.

    The curve of the first steps of a `pruned` run has a file of its own.

    Raises:
        ValueError: `run_id` is not a sha256 in hex.
    """
    return study_dir / CURVES_DIR / f"{require_run_id(run_id)}{'.pruned' if pruned else ''}.parquet"


def store_curve(study_dir: Path, run_id: str, curve: Curve, *, pruned: bool = False) -> Path:
    """Write `curve`, which survives a power loss on return; a reader sees the old file or the new
    one, never a part.

    The curve of a `pruned` run does not replace the curve of the whole run.

    The columns are, in this order: `step` (int64), `train_loss_nats` (float64) and, if the trainer
    logs it, `grad_norm` (float64). `load_curve` relies on the order.

    Raises:
        DiskFull: the file does not fit; an earlier file of this run is unchanged.
        ValueError: `run_id` is not an id.
    """
    import pyarrow  # imported here, so that only studies with curves load it
    import pyarrow.parquet

    path = get_curve_path(study_dir, run_id, pruned=pruned)
    columns: dict[str, array.array[int] | array.array[float]] = {
        "step": array.array("q", curve.steps),
        "train_loss_nats": array.array("d", curve.train_loss_nats),
    }
    if curve.grad_norm or not curve.steps:
        columns["grad_norm"] = array.array("d", curve.grad_norm)
    types = {"q": pyarrow.int64(), "d": pyarrow.float64()}
    # From buffers: given sequences, pyarrow loads pandas if it is installed, which takes 50 MB of
    # the driver's memory.
    arrays = [
        pyarrow.Array.from_buffers(
            types[column.typecode], len(column), [None, pyarrow.py_buffer(column)]
        )
        for column in columns.values()
    ]
    table = pyarrow.Table.from_arrays(arrays, names=list(columns))
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, buffer, write_page_checksum=True)
    with explain_write_errors(path, KEPT_ADVICE):
        canon.make_folder(path.parent)
        canon.write_atomic(path, buffer.getvalue().to_pybytes())
    return path


_NUM_WRITER_THREADS = 8
"""Number of files that are written at once, since a network file system takes ten milliseconds
for each.
"""


def store_curves(study_dir: Path, curves: Sequence[tuple[RunResult, Curve]]) -> None:
    """Write the curves of several runs at once; see `store_curve`.

    Raises:
        DiskFull, ValueError: see `store_curve`; some of the files may have been written.
    """

    def store(result: RunResult, curve: Curve) -> None:
        store_curve(study_dir, result.id, curve, pruned=result.status == "pruned")

    with ThreadPoolExecutor(_NUM_WRITER_THREADS) as executor:
        for future in [executor.submit(store, *pair) for pair in curves]:
            future.result()


def load_curve(study_dir: Path, result: RunResult) -> Curve:
    """Read the curve of `result`, and verify its content id.

    Raises:
        CurveCorrupt: the file is missing, unreadable, or its content id is not `result.curve_id`.
    """
    import pyarrow
    import pyarrow.parquet

    path = get_curve_path(study_dir, result.id, pruned=result.status == "pruned")
    advice = "restore it from a copy; the result itself is still in the ledger"
    try:
        require_plain(path)
        # Not `read_table`, which loads pyarrow's datasets and pandas: that would cost
        # every command seconds.
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
        columns = [tuple(table.column(i).to_pylist()) for i in range(table.num_columns)]
        curve = Curve(
            steps=columns[0],
            train_loss_nats=columns[1],
            grad_norm=columns[2] if len(columns) > 2 else (),
        )
        curve_id = canon.compute_content_id(curve)
    except (
        OSError,
        ValueError,
        TypeError,
        IndexError,
        pyarrow.ArrowException,
        SpecError,
    ) as error:
        raise CurveCorrupt(f"{path} cannot be read ({error}): {advice}") from error
    if curve_id != result.curve_id:
        raise CurveCorrupt(
            f"{path} has content id {curve_id[:12]}, but its result names {result.curve_id[:12]}: "
            f"{advice}"
        )
    return curve


def list_curve_ids(study_dir: Path, *, pruned: bool = False) -> tuple[str, ...]:
    """Return the sorted ids of the runs that have a curve of the whole run, or, if `pruned`, a
    curve of their first steps.
    """
    ending = ".pruned.parquet" if pruned else ".parquet"
    names = (path.name.removesuffix(ending) for path in (study_dir / CURVES_DIR).glob(f"*{ending}"))
    return tuple(sorted(filter(is_run_id, names)))


def get_noise_path(study_dir: Path, run_id: str) -> Path:
    """Return the path of a run's gradient noise. Raises ValueError if `run_id` is not an id."""
    return study_dir / CURVES_DIR / f"{require_run_id(run_id)}.noise.jsonl"


def append_noise(study_dir: Path, run_id: str, look: NoiseLook) -> None:
    """Append the gradient noise that was measured at a step of a run. Raises OSError,
    ValueError.
    """
    path = get_noise_path(study_dir, run_id)
    canon.make_folder(path.parent)
    with open_to_append(path) as file:
        file.write(f"{canon.to_canonical_json(look)}\n".encode())


def load_noise(study_dir: Path, run_id: str) -> tuple[NoiseLook, ...]:
    """Return the gradient noise that was measured in a run, ordered by step.

    A step that was measured again after a resume occurs once; a line that a killed worker left
    unfinished is skipped.

    Raises:
        ValueError: `run_id` is not an id.
    """
    try:
        lines = read_plain(get_noise_path(study_dir, run_id)).decode(errors="replace").splitlines()
    except OSError:
        return ()
    looks = {}
    for line in lines:
        with contextlib.suppress(canon.CanonError, SpecError):
            look = canon.decode(NoiseLook, canon.parse(line))
            looks[look.step] = look
    return tuple(looks[step] for step in sorted(looks))
