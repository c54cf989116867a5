"""Tests of harmful files: no reader of a study's files runs them, and each raises a named error.

Each reader gets each payload under the name of its own file. A payload that runs creates a folder.
"""

import contextlib
import io
import json
import math
import os
import pickle
import sqlite3
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from command_cases import make_command
from main_run import make_tiny_decision, write_corpus
from sweep_fakes import make_outcome, make_spec

from forerun._launcher.main_run.checkpoint_folders import CheckpointError
from forerun._launcher.main_run.frozen.frozen import FrozenError, TamperedError
from forerun._launcher.main_run.frozen.launch_file import (
    attest,
    read_attestation,
    read_launch,
    write_launch,
)
from forerun._launcher.main_run.trainer.checkpoints import find_newest_good
from forerun._launcher.study.plan.file import PlanError, load_plan
from forerun._proxies.core import canon
from forerun._proxies.core.tables import table_files
from forerun._proxies.data.tokenizer import load_tokenizer
from forerun._proxies.data.tokens import CorruptCorpusError, DataError, TokenStore, read_manifest
from forerun._proxies.external.growing_file import MetricsError
from forerun._proxies.external.metric_files import MetricFiles
from forerun._proxies.training.slot_state import load_newest_state
from forerun._scaling_fits import fit_file
from forerun._sweeps.store.curves import load_curve
from forerun._sweeps.store.errors import CurveCorrupt, LedgerCorrupt, LedgerTooNew, StudyMissing
from forerun._sweeps.store.ledger import Ledger
from forerun._sweeps.store.live_state import read_live
from forerun._sweeps.store.lock import DriverLock
from forerun._transfer.tables import cells

SPEC = make_spec()
RESULT, CURVE = make_outcome(SPEC)
DEEP = (10_000, 950, 600, 300)
"""Levels of nesting. The first is beyond Python's limit of recursion. The others are below it, but
the functions of a reader, which call each other at every level, could still reach the limit."""


class FolderMaker:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, made_folder):
        self.made_folder = str(made_folder)

    def __reduce__(self):
        return os.mkdir, (self.made_folder,)


def make_parquet(table):
    """Return an Arrow table as the bytes of a Parquet file."""
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue().to_pybytes()


def make_extension_parquet(made_folder):
    """Return a Parquet file with a column whose type is a pickle.

    pyarrow before 14.0.1 loaded such pickles.
    """
    payload = pickle.dumps(FolderMaker(made_folder))
    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": payload,
    }
    columns = [
        pyarrow.field(name, pyarrow.int64(), metadata=metadata)
        for name in ("step", "train_loss_nats")
    ]
    return make_parquet(
        pyarrow.table([pyarrow.array([1]), pyarrow.array([2])], schema=pyarrow.schema(columns))
    )


def make_database(*statements):
    """Return the bytes of an SQLite database after these statements."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        for statement in statements:
            connection.execute(statement)
        return connection.serialize()


def make_torch_file(made_folder):
    """Return a file as torch.save writes it: a pickle in a zip archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(FolderMaker(made_folder), protocol=2))
        archive.writestr("archive/version", "3")
    return buffer.getvalue()


def make_numpy_file(made_folder):
    """Return a file as numpy.save writes an array of objects: a header and a pickle."""
    buffer = io.BytesIO()
    np.save(buffer, np.array([FolderMaker(made_folder)], dtype=object), allow_pickle=True)
    return buffer.getvalue()


PAYLOADS = {
    **{
        f"pickle {n}": lambda made_folder, n=n: pickle.dumps(FolderMaker(made_folder), protocol=n)
        for n in (0, 2, 4)
    },
    "torch file": make_torch_file,
    "numpy file": make_numpy_file,
    "yaml tag": lambda made_folder: f"!!python/object/apply:os.mkdir [{made_folder}]\n".encode(),
    "python": lambda made_folder: f"__import__('os').mkdir({str(made_folder)!r})\n".encode(),
    "nan": lambda _: b'{"a": NaN, "b": Infinity, "c": 1e999}\n',
    "a key twice": lambda _: b'{"kind": 1, "kind": 2}\n',
    **{f"{n} lists": lambda _, n=n: b"[" * n + b"]" * n + b"\n" for n in DEEP},
    **{f"{n} objects": lambda _, n=n: b'{"a":' * n + b"1" + b"}" * n + b"\n" for n in DEEP},
    "a long number": lambda _: b'{"a": ' + b"9" * 10_000 + b"}\n",
    "not UTF-8": lambda _: b"\xff\xfe{}\n",
    "zero bytes": lambda _: bytes(4096),
    "nothing": lambda _: b"",
    "a python type in parquet": make_extension_parquet,
    "texts in parquet": lambda _: make_parquet(
        pyarrow.table({"step": ["1"], "train_loss_nats": [b"\x80\x04."]})
    ),
    "nests in parquet": lambda _: make_parquet(
        pyarrow.table({"step": [[[1]]], "train_loss_nats": [{"a": 1}]})
    ),
    "not finite in parquet": lambda _: make_parquet(
        pyarrow.table({"step": [1], "train_loss_nats": [math.nan]})
    ),
    "another database": lambda _: make_database("CREATE TABLE t (x)"),
    "a view for a table": lambda _: make_database(
        "PRAGMA application_id = 1718579813",
        "PRAGMA user_version = 1",
        "CREATE VIEW records AS SELECT 0 AS seq, 'plan' AS kind, '' AS key, '{}' AS body, '' AS "
        "prev_hash, '' AS hash",
        "CREATE VIEW head AS SELECT 1 AS one, 0 AS seq, '' AS hash",
    ),
}
"""Functions that return a harmful or damaged content, given the folder that it would create."""


def make_metrics_reader(format):
    """Return a function that reads metrics of a format and raises the description of the file.

    The reader itself raises no error for a file without metrics. The error of a run shows this
    description.
    """

    def read(path):
        metric_files = MetricFiles(
            make_command(metrics_format=format), path if format == "jsonl" else path.parent
        )
        while metric_files.read(100):
            pass
        metric_files.end(100)
        logged = metric_files.merge_metrics()
        assert not logged.train_loss and not logged.validation_loss, (
            "the payload was read as metrics"
        )
        raise MetricsError(metric_files.describe_contents())

    return read


def read_slot_state(path):
    """Check that a damaged state is set aside with a note, and raise the note.

    The state's file name must contain the hash of its content, or it would not be read.
    """
    named = path.with_name(f"step-00000001-{canon.hash_file(path)}.safetensors")
    path.rename(named)
    notes = []
    assert load_newest_state(path.parent, SPEC.id, {}, notes) is None and len(notes) == 1
    raise DataError(*notes)


def read_live_state(path):
    """Check that a damaged live state counts as absent, and raise an error in its place."""
    assert read_live(path.parent) is None
    raise DataError("there is no live state")


def read_lock(path):
    """Check that the content of a lock is replaced without being read; raise an error then."""
    with DriverLock(path.parent):
        assert json.loads(path.read_bytes())["pid"] == os.getpid()
    raise DataError("overwritten")


def read_curve(path):
    """Read the curve of the run, given the path of its file."""
    path.parent.mkdir(exist_ok=True)
    return load_curve(path.parents[1], RESULT)


def read_checkpoint(path):
    """Read the manifest of a checkpoint of the main run.

    `test_checkpoint_index.py` tests the checkpoint's index.
    """
    return find_newest_good(path.parents[1], "d" * 64)


def read_fit_table(path):
    """Read a table for a fit, and refuse it if it lacks columns as the next step would."""
    table = table_files.read_cells(path)
    if table.problems or not {"params", "tokens", "loss"} <= set(table.columns):
        raise table_files.FormatError(path, "no runs")


def read_transfer_table(path):
    """Read a table for a verdict, and refuse it if it lacks columns as the next step would."""
    sheet = cells.read_sheet(path, ("width", "lr", "loss"))
    if not {"width", "lr", "loss"} <= set(sheet.columns):
        raise table_files.TableError(["no columns"], name=path.name)


READERS = {
    "ledger": (
        "ledger.db",
        lambda path: Ledger.read(path.parent),
        (LedgerCorrupt, LedgerTooNew, StudyMissing),
    ),
    "ledger of a driver": (
        "ledger.db",
        lambda path: Ledger.open(path.parent, {"a": 1}, create=False),
        (LedgerCorrupt, LedgerTooNew, StudyMissing),
    ),
    "curve": (f"curves/{RESULT.id}.parquet", read_curve, CurveCorrupt),
    "slot state": ("state", read_slot_state, DataError),
    "live": ("live.json", read_live_state, DataError),
    "lock": ("driver.lock", read_lock, DataError),
    "plan": ("plan.toml", load_plan, PlanError),
    "launch config": ("launch.json", read_launch, (FrozenError, TamperedError)),
    "attestation": ("evidence.json", lambda path: read_attestation(path, "d" * 64), TamperedError),
    "fit": ("fit.json", fit_file.read_fit, (fit_file.FitFileError, fit_file.FitTamperedError)),
    "corpus's manifest": ("manifest.json", lambda path: read_manifest(path.parent), DataError),
    "tokenizer": ("tokenizer.json", lambda path: load_tokenizer(str(path)), DataError),
    "main run's manifest": ("step-00000004/manifest.json", read_checkpoint, CheckpointError),
    "metrics jsonl": ("metrics.jsonl", make_metrics_reader("jsonl"), MetricsError),
    "metrics wandb": ("run-a.wandb", make_metrics_reader("wandb"), MetricsError),
    "metrics tensorboard": (
        "events.out.tfevents.1",
        make_metrics_reader("tensorboard"),
        MetricsError,
    ),
    **{
        f"runs {kind}": (f"runs.{kind}", read_fit_table, table_files.FormatError)
        for kind in ("csv", "jsonl", "parquet")
    },
    **{
        f"table {kind}": (f"table.{kind}", read_transfer_table, table_files.TableError)
        for kind in ("csv", "jsonl", "parquet")
    },
}
"""Name of the file, the function that reads it, and the errors that it may raise, by reader."""
EMPTY_IS_FINE = {("plan", "nothing")}
"""Readers that accept an empty file: a plan may leave everything to the defaults."""


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("reader", READERS)
def test_payload_does_not_run_and_raises_a_named_error(tmp_path, reader, payload):
    name, read, errors = READERS[reader]
    folder, made_folder = tmp_path / "study", tmp_path / "ran"
    path = folder / name
    path.parent.mkdir(parents=True)
    path.write_bytes(PAYLOADS[payload](made_folder))
    if (reader, payload) in EMPTY_IS_FINE:
        read(path)
    else:
        with pytest.raises(errors) as caught:
            read(path)
        assert str(caught.value), "the error has no message"
        assert not isinstance(caught.value, RecursionError)
    assert not made_folder.exists(), "the payload ran"


@pytest.mark.parametrize("payload", ["pickle 0", "pickle 2", "pickle 4"])
def test_payload_runs_when_unpickled(tmp_path, payload):
    """The test above can fail: an unpickled payload creates the folder."""
    pickle.loads(PAYLOADS[payload](tmp_path / "ran"))
    assert (tmp_path / "ran").is_dir()


@pytest.mark.parametrize("reader", ["launch config", "attestation", "fit"])
@pytest.mark.parametrize("depth", DEEP)
def test_deeply_nested_file_of_the_right_form_is_refused(tmp_path, reader, depth):
    """There are depths at which the file can still be parsed, but its content cannot be hashed."""
    name, read, errors = READERS[reader]
    inner = "[" * depth + "]" * depth
    texts = {
        "launch config": f'{{"digest": "d", "decision": {{"a": {inner}}}}}',
        "attestation": (
            f'{{"sha256": "d", "digest": "d", "kind": "evidence", "body": {{"a": {inner}}}}}'
        ),
        "fit": f'{{"kind": "{fit_file.FILE_KIND}", "digest": "d", "fit": {{"a": {inner}}}}}',
    }
    path = tmp_path / name
    path.write_text(texts[reader])
    with pytest.raises(errors):
        read(path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A valid corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder / "tokens"


@pytest.mark.parametrize("payload", PAYLOADS)
def test_payload_in_a_shard_is_refused_as_corrupt(corpus, tmp_path, payload):
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in corpus.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    shard = sorted(folder.glob("*.bin"))[0]
    content = PAYLOADS[payload](tmp_path / "ran")
    shard.write_bytes((content + bytes(shard.stat().st_size))[: shard.stat().st_size])
    with pytest.raises(CorruptCorpusError):
        TokenStore(folder)
    assert not (tmp_path / "ran").exists()


def test_valid_files_are_read(corpus, tmp_path):
    """The readers above do not refuse every file."""
    decision = make_tiny_decision(corpus)
    launch = write_launch(tmp_path, decision)
    assert read_launch(launch) == decision
    path = attest(tmp_path, "evidence", decision.digest, {"a": 1})
    assert read_attestation(path, decision.digest) == {"a": 1}
    fit_file.write_fit(tmp_path / "fit.json", {"kind": "x"})
    assert fit_file.read_fit(tmp_path / "fit.json") == {"kind": "x"}
    assert Path(launch).is_file() and read_manifest(corpus).num_documents
