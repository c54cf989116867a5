"""What is fed to everything that reads a file of a study: nothing of it runs, and the answer is an
error with a name.

Each reader gets each payload under the name of its own file. A payload that runs makes a folder.
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
from command_cases import command
from main_run import tiny_decision, write_corpus
from sweep_fakes import make_spec, outcome

import transfer.tables.cells
from launcher.frozen.frozen import FrozenError, TamperedError
from launcher.frozen.launch_file import attest, read_attestation, read_launch, write_launch
from launcher.plan.file import PlanError, load_plan
from launcher.trainer.checkpoints import CheckpointError, newest_good
from proxies.core.tables import table_files
from proxies.data.tokenizer import load_tokenizer
from proxies.data.tokens import CorruptCorpusError, DataError, TokenStore, read_manifest
from proxies.external.growing_file import MetricsError
from proxies.external.metric_files import MetricFiles
from proxies.training.slot_state import newest
from scaling_fits import fit_file
from sweeps.store.curves import load_curve
from sweeps.store.errors import CurveCorrupt, LedgerCorrupt, LedgerTooNew, StudyMissing
from sweeps.store.ledger import Ledger
from sweeps.store.live import read_live
from sweeps.store.lock import DriverLock

SPEC = make_spec()
RESULT, CURVE = outcome(SPEC)
DEEP = (10_000, 950, 600, 300)
"""Levels: beyond Python's own limit, and where a reader's own functions would meet it."""


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, fuse):
        self.fuse = str(fuse)

    def __reduce__(self):
        return os.mkdir, (self.fuse,)


def parquet(table):
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue().to_pybytes()


def python_type(fuse):
    """A parquet file whose column says that its type is to be unpickled, as pyarrow did before
    14.0.1.
    """
    payload = pickle.dumps(Runs(fuse))
    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": payload,
    }
    columns = [
        pyarrow.field(name, pyarrow.int64(), metadata=metadata)
        for name in ("step", "train_loss_nats")
    ]
    return parquet(
        pyarrow.table([pyarrow.array([1]), pyarrow.array([2])], schema=pyarrow.schema(columns))
    )


def database(*statements):
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        for statement in statements:
            connection.execute(statement)
        return connection.serialize()


def torch_file(fuse):
    """As torch.save writes: a pickle in a zip."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Runs(fuse), protocol=2))
        archive.writestr("archive/version", "3")
    return buffer.getvalue()


def numpy_file(fuse):
    buffer = io.BytesIO()
    np.save(buffer, np.array([Runs(fuse)], dtype=object), allow_pickle=True)
    return buffer.getvalue()


PAYLOADS = {
    **{f"pickle {n}": lambda fuse, n=n: pickle.dumps(Runs(fuse), protocol=n) for n in (0, 2, 4)},
    "torch file": torch_file,
    "numpy file": numpy_file,
    "yaml tag": lambda fuse: f"!!python/object/apply:os.mkdir [{fuse}]\n".encode(),
    "python": lambda fuse: f"__import__('os').mkdir({str(fuse)!r})\n".encode(),
    "nan": lambda _: b'{"a": NaN, "b": Infinity, "c": 1e999}\n',
    "a key twice": lambda _: b'{"kind": 1, "kind": 2}\n',
    **{f"{n} lists": lambda _, n=n: b"[" * n + b"]" * n + b"\n" for n in DEEP},
    **{f"{n} objects": lambda _, n=n: b'{"a":' * n + b"1" + b"}" * n + b"\n" for n in DEEP},
    "a long number": lambda _: b'{"a": ' + b"9" * 10_000 + b"}\n",
    "not UTF-8": lambda _: b"\xff\xfe{}\n",
    "zero bytes": lambda _: bytes(4096),
    "nothing": lambda _: b"",
    "a python type in parquet": python_type,
    "texts in parquet": lambda _: parquet(
        pyarrow.table({"step": ["1"], "train_loss_nats": [b"\x80\x04."]})
    ),
    "nests in parquet": lambda _: parquet(
        pyarrow.table({"step": [[[1]]], "train_loss_nats": [{"a": 1}]})
    ),
    "not finite in parquet": lambda _: parquet(
        pyarrow.table({"step": [1], "train_loss_nats": [math.nan]})
    ),
    "another database": lambda _: database("CREATE TABLE t (x)"),
    "a view for a table": lambda _: database(
        "PRAGMA application_id = 1718579813",
        "PRAGMA user_version = 1",
        "CREATE VIEW records AS SELECT 0 AS seq, 'plan' AS kind, '' AS key, '{}' AS body, '' AS "
        "prev_hash, '' AS hash",
        "CREATE VIEW head AS SELECT 1 AS one, 0 AS seq, '' AS hash",
    ),
}


def metrics(format):
    def read(path):
        found = MetricFiles(
            command(metrics_format=format), path if format == "jsonl" else path.parent
        )
        while found.read(100):
            pass
        found.end(100)
        logged = found.logged()
        assert not logged.train_loss and not logged.validation_loss, "it was taken for metrics"
        raise MetricsError(found.hint())  # what the run is told then

    return read


def slot_state(path):
    """One is put aside, and a note says so; under the name that its hash gives, or it would not be
    looked at.
    """
    from proxies.core import canon

    named = path.with_name(f"step-00000001-{canon.file_sha256(path)}.safetensors")
    path.rename(named)
    notes = []
    assert newest(path.parent, SPEC.id, {}, notes) is None and len(notes) == 1
    raise DataError(*notes)


def live(path):
    assert read_live(path.parent) is None
    raise DataError("nobody looks on")


def lock(path):
    """Only words come of what is in it, and those of the lock's holder."""
    with DriverLock(path.parent):
        assert json.loads(path.read_bytes())["pid"] == os.getpid()
    raise DataError("overwritten")


def curve(path):
    path.parent.mkdir(exist_ok=True)
    return load_curve(path.parents[1], RESULT)


def checkpoint(path):
    """Of the main run: its manifest. `tests/launcher/test_checkpoint_index.py` has the rest."""
    return newest_good(path.parents[1], "d" * 64, [])


def judged_fit(path):
    """A table of runs without the columns that are wanted is refused a step later."""
    cells = table_files.read_cells(path)
    if cells.problems or not {"params", "tokens", "loss"} <= set(cells.columns):
        raise table_files.FormatError(path, "no runs")


def judged_sheet(path):
    sheet = transfer.tables.cells.read_sheet(path, ("width", "lr", "loss"))
    if not {"width", "lr", "loss"} <= set(sheet.columns):
        raise transfer.tables.cells.TableError(path, ["no columns"])


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
    "curve": (f"curves/{RESULT.id}.parquet", curve, CurveCorrupt),
    "slot state": ("state", slot_state, DataError),
    "live": ("live.json", live, DataError),
    "lock": ("driver.lock", lock, DataError),
    "plan": ("plan.toml", load_plan, PlanError),
    "launch config": ("launch.json", read_launch, (FrozenError, TamperedError)),
    "attestation": ("evidence.json", lambda path: read_attestation(path, "d" * 64), TamperedError),
    "fit": ("fit.json", fit_file.read, (fit_file.FitFileError, fit_file.FitTamperedError)),
    "corpus's manifest": ("manifest.json", lambda path: read_manifest(path.parent), DataError),
    "tokenizer": ("tokenizer.json", lambda path: load_tokenizer(str(path)), DataError),
    "main run's manifest": ("step-00000004/manifest.json", checkpoint, CheckpointError),
    "metrics jsonl": ("metrics.jsonl", metrics("jsonl"), MetricsError),
    "metrics wandb": ("run-a.wandb", metrics("wandb"), MetricsError),
    "metrics tensorboard": ("events.out.tfevents.1", metrics("tensorboard"), MetricsError),
    **{
        f"runs {kind}": (f"runs.{kind}", judged_fit, table_files.FormatError)
        for kind in ("csv", "jsonl", "parquet")
    },
    **{
        f"table {kind}": (f"table.{kind}", judged_sheet, transfer.tables.cells.TableError)
        for kind in ("csv", "jsonl", "parquet")
    },
}


EMPTY_IS_FINE = {("plan", "nothing")}
"""A plan may leave everything to the defaults."""


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("reader", READERS)
def test_nothing_runs_and_the_error_has_a_name(tmp_path, reader, payload):
    name, read, errors = READERS[reader]
    folder, fuse = tmp_path / "study", tmp_path / "ran"
    path = folder / name
    path.parent.mkdir(parents=True)
    path.write_bytes(PAYLOADS[payload](fuse))
    if (reader, payload) in EMPTY_IS_FINE:
        read(path)
    else:
        with pytest.raises(errors) as told:
            read(path)
        assert str(told.value), "it says nothing"
        assert not isinstance(told.value, RecursionError)
    assert not fuse.exists(), "it ran"


@pytest.mark.parametrize("payload", ["pickle 0", "pickle 2", "pickle 4"])
def test_a_payload_would_run(tmp_path, payload):
    """The check itself must be able to fail."""
    pickle.loads(PAYLOADS[payload](tmp_path / "ran"))
    assert (tmp_path / "ran").is_dir()


@pytest.mark.parametrize("reader", ["launch config", "attestation", "fit"])
@pytest.mark.parametrize("depth", DEEP)
def test_what_has_the_right_form_may_be_too_deep(tmp_path, reader, depth):
    """Deep enough that the hash of it, not its reading, is what fails."""
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
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder / "tokens"


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_shard_is_bytes_and_nothing_else(corpus, tmp_path, payload):
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


def test_of_right_files_only_the_payload_is_refused(corpus, tmp_path):
    """The readers do read what is good."""
    decision = tiny_decision(corpus)
    launch = write_launch(tmp_path, decision)
    assert read_launch(launch) == decision
    path = attest(tmp_path, "evidence", decision.digest, {"a": 1})
    assert read_attestation(path, decision.digest) == {"a": 1}
    fit_file.write(tmp_path / "fit.json", {"kind": "x"})
    assert fit_file.read(tmp_path / "fit.json") == {"kind": "x"}
    assert Path(launch).is_file() and read_manifest(corpus).num_documents
