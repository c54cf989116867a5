"""What each run logged, as one parquet file per run: written whole and durably, or not at all.

Beside it, of the runs where that was asked for, `curves/<run id>.noise.jsonl`: the gradient noise,
added by the worker as it measures it. No result names that file; a run that lacks it, or some of
its lines, lacks its noise scale and nothing else.
"""

from __future__ import annotations

import array
import contextlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from proxies.core import canon
from proxies.core.checks import SpecError
from proxies.core.noise_scale import NoiseLook
from proxies.core.plain_files import open_to_append, read_plain, require_plain
from proxies.core.spec import Curve, RunResult
from sweeps.store.errors import CurveCorrupt, DiskFull

CURVES_DIR = "curves"

_RUN_ID = re.compile(r"[0-9a-f]{64}")


def is_run_id(text: str) -> bool:
    """Whether `text` has the form of a run's id: 64 hex digits, and so names nothing but a run."""
    return _RUN_ID.fullmatch(text) is not None


def checked_id(run_id: str) -> str:
    """The id. Raises ValueError if it is not a sha256 in hex (and so could name another place)."""
    if not is_run_id(run_id):
        raise ValueError(f"run_id = {run_id!r}: must be 64 hex digits")
    return run_id


def curve_path(study_dir: Path, run_id: str, *, pruned: bool = False) -> Path:
    """Where the curve of a run lies: `curves/<run id>.parquet`; of a `pruned` one's first steps:
    its own file.

    Raises:
        ValueError: `run_id` is not a sha256 in hex (and so could name another place).
    """
    return study_dir / CURVES_DIR / f"{checked_id(run_id)}{'.pruned' if pruned else ''}.parquet"


def store_curve(study_dir: Path, run_id: str, curve: Curve, *, pruned: bool = False) -> Path:
    """Write `curve`; on return it survives a power loss. A reader sees the old file or the new,
    never a part.

    That of a `pruned` run does not stand in the way of the whole run's.

    Columns: `step` (int64), `train_loss_nats` and, if the trainer logs it, `grad_norm` (float64).

    Raises:
        DiskFull: it does not fit; an earlier file of this run is untouched.
        ValueError: `run_id` is no id.
    """
    import pyarrow  # only studies with curves pay for it
    import pyarrow.parquet

    path = curve_path(study_dir, run_id, pruned=pruned)
    columns: dict[str, array.array[int] | array.array[float]] = {
        "step": array.array("q", curve.steps),
        "train_loss_nats": array.array("d", curve.train_loss_nats),
    }
    if curve.grad_norm or not curve.steps:
        columns["grad_norm"] = array.array("d", curve.grad_norm)
    types = {"q": pyarrow.int64(), "d": pyarrow.float64()}
    # From buffers: given sequences, pyarrow loads pandas where there is one, for 50 MB of a
    # driver's memory.
    arrays = [
        pyarrow.Array.from_buffers(
            types[column.typecode], len(column), [None, pyarrow.py_buffer(column)]
        )
        for column in columns.values()
    ]
    table = pyarrow.Table.from_arrays(arrays, names=list(columns))
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, buffer, write_page_checksum=True)
    try:
        canon.make_folder(path.parent)
        canon.write_atomic(path, buffer.getvalue().to_pybytes())
    except OSError as error:
        raise DiskFull(
            f"{path}: {error.strerror}: free some space and resume; recorded results are kept"
        ) from error
    return path


_NUM_WRITERS = 8
"""On a file system of a network a file takes ten milliseconds, in which others can be written."""


def store_curves(study_dir: Path, curves: Sequence[tuple[RunResult, Curve]]) -> None:
    """`store_curve` of several runs at once. Raises as it does; some may be there then."""
    write = [
        partial(store_curve, study_dir, r.id, curve, pruned=r.status == "pruned")
        for r, curve in curves
    ]
    if len(write) == 1:
        write[0]()
    else:
        with ThreadPoolExecutor(_NUM_WRITERS) as writers:
            for written in [writers.submit(each) for each in write]:
                written.result()


def load_curve(study_dir: Path, result: RunResult) -> Curve:
    """The curve of `result`, proven to be the one it names.

    Raises:
        CurveCorrupt: the file is missing, unreadable, or its content id is not `result.curve_id`.
    """
    import pyarrow
    import pyarrow.parquet

    path = curve_path(study_dir, result.id, pruned=result.status == "pruned")
    advice = "restore it from a copy; the result itself is still in the ledger"
    try:
        require_plain(path)
        # Not `read_table`, which loads pyarrow's datasets and with them pandas, for seconds of
        # every verb.
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
        columns = [tuple(table.column(i).to_pylist()) for i in range(table.num_columns)]
        curve = Curve(
            steps=columns[0],
            train_loss_nats=columns[1],
            grad_norm=columns[2] if len(columns) > 2 else (),
        )
        found = canon.content_id(curve)
    except (OSError, ValueError, TypeError, IndexError, pyarrow.ArrowException, SpecError) as error:
        raise CurveCorrupt(f"{path} cannot be read ({error}): {advice}") from error
    if found != result.curve_id:
        raise CurveCorrupt(
            f"{path} has content id {found[:12]}, but its result names {result.curve_id[:12]}: "
            f"{advice}"
        )
    return curve


def curve_ids(study_dir: Path, *, pruned: bool = False) -> tuple[str, ...]:
    """Ids of the runs that have left a whole curve here, or one of their first steps as they were
    `pruned`; sorted.
    """
    ending = ".pruned.parquet" if pruned else ".parquet"
    names = (path.name.removesuffix(ending) for path in (study_dir / CURVES_DIR).glob(f"*{ending}"))
    return tuple(sorted(filter(is_run_id, names)))


def noise_path(study_dir: Path, run_id: str) -> Path:
    """Where the gradient noise of a run lies. Raises ValueError: `run_id` is no id."""
    return study_dir / CURVES_DIR / f"{checked_id(run_id)}.noise.jsonl"


def append_noise(study_dir: Path, run_id: str, look: NoiseLook) -> None:
    """Add what was measured at a step of a run. Raises OSError, ValueError."""
    path = noise_path(study_dir, run_id)
    canon.make_folder(path.parent)
    with open_to_append(path) as file:
        file.write(f"{canon.canonical(look)}\n".encode())


def load_noise(study_dir: Path, run_id: str) -> tuple[NoiseLook, ...]:
    """What was measured of a run, by its steps; a step measured again after a resume is there once,
    and a line that a killed worker left unfinished is not. Raises ValueError: `run_id` is no id.
    """
    try:
        lines = read_plain(noise_path(study_dir, run_id)).decode(errors="replace").splitlines()
    except OSError:
        return ()
    looks = {}
    for line in lines:
        with contextlib.suppress(canon.CanonError, SpecError):
            look = canon.decode(NoiseLook, canon.parse(line))
            looks[look.step] = look
    return tuple(looks[step] for step in sorted(looks))
