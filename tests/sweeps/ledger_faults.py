"""Faults at every call: `table_of` forks and harms processes under `fault_shim.c`; as a script,
what runs there.

For every k, a process is forked whose k-th call that touches the study's files (open, write, sync,
rename, unlink ...) kills it, tears the write, or fails. What the process had reported as done must
be there afterwards, the study must open without help, and the same work done again must end where
an undisturbed one ends.
"""

import ctypes
import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from sweep_fakes import make_spec, make_specs, outcome

from launcher.frozen.launch_file import LAUNCH_FILE, attest, read_attestation, write_launch
from proxies.core import canon
from sweeps.store import chain
from sweeps.store.curves import load_curve, store_curve
from sweeps.store.errors import SweepError
from sweeps.store.fork import import_runs, read_parent
from sweeps.store.ledger import LEDGER_NAME, Ledger
from sweeps.store.repair import repair

PLAN = {"data_id": "toy", "semantics": 2}
SPECS = [*make_specs(2), make_spec(log2_lr=-1)]
DIGEST = "d" * 64
FAULTS = {
    "SIGKILL": (1, 0),
    "half a write, SIGKILL": (2, 0),
    "ENOSPC": (3, errno.ENOSPC),
    "EIO": (3, errno.EIO),
    "EMFILE": (3, errno.EMFILE),
    "ENOSPC from then on": (4, errno.ENOSPC),
    "power loss": (5, 0),
    "power loss in part": (6, 0),
}
DONE, REFUSED, ABSORBED, BUG = 0, 3, 4, 1


@dataclasses.dataclass(frozen=True)
class Decision:
    """All that `write_launch` asks of one."""

    digest: str = DIGEST


def work(study, say):
    """A study from its first record to its frozen config; what is there already is not done
    again.
    """
    with Ledger.open(study, PLAN, create=True) as ledger:
        for index, spec in enumerate(SPECS):
            if ledger.find("suggestion", f"search/{index}") is None:
                record = ledger.append(
                    "suggestion", f"search/{index}", {"learning_rate": 0.1 * index}
                )
                say("record", record.seq, record.hash)
            if spec.id not in ledger.results():
                store_curve(study, spec.id, outcome(spec)[1])
                ledger.commit(spec, outcome(spec)[0])
                say("record", len(ledger.records()) - 1, ledger.head_hash)
        if ledger.find("fit", "x") is None:
            # on overflow pages
            record = ledger.append("fit", "x", {"draws": [index / 7 for index in range(900)]})
            say("record", record.seq, record.hash)
        write_launch(study / "frozen", Decision())
        attest(study / "frozen" / DIGEST, "evidence", DIGEST, {"run_ids": sorted(ledger.results())})
        say("frozen")


def fork(study, say):
    """A child study that takes over three runs."""
    parent_dir = study.parents[1] / "parent"
    parent = read_parent(study, parent_dir, PLAN)
    with Ledger.open(study, PLAN, create=True) as ledger:
        import_runs(ledger, study, parent, parent_dir)
        say("record", len(ledger.records()) - 1, ledger.head_hash)


def mend(study, say):
    """A repair of a ledger whose second result is damaged, as is its header."""
    repair(study)
    say("repaired")


def prepare(study, name):
    """What the work begins with."""
    shutil.rmtree(study.parent, ignore_errors=True)
    study.parent.mkdir()
    parent, damaged = study.parents[1] / "parent", study.parents[1] / "damaged"
    if name == "fork" and not parent.exists():
        work(parent, lambda *said: None)
    if name == "repair":
        if not damaged.exists():
            work(damaged, lambda *said: None)
            path = damaged / LEDGER_NAME
            path.write_bytes(bytes(100) + path.read_bytes().replace(b'"seed":1', b'"seed":7')[100:])
        shutil.copytree(damaged, study)


def content(study):
    """What a study holds: every record but its drivers' names, its curves, its frozen files."""
    ledger = Ledger.read(study)
    found = [(r.kind, r.key, r.text) for r in ledger.records() if r.kind != "driver"]
    curves = {run_id: load_curve(study, result) for run_id, result in ledger.results().items()}
    launch = study / "frozen" / DIGEST / LAUNCH_FILE
    frozen = launch.read_bytes() if launch.exists() else None
    evidence = launch.parent / "attestations" / "evidence.json"
    return found, curves, frozen, read_attestation(evidence, DIGEST) if evidence.exists() else None


def check(study, name, said, expected):
    """Everything that was reported is there, and the work can be ended."""
    launch = study / "frozen" / DIGEST / LAUNCH_FILE
    for path in (study / "frozen").rglob("*.json"):
        canon.parse(path.read_bytes())
    if name != "repair":
        with Ledger.open(study, PLAN, create=True) as ledger:
            hashes = {record.seq: record.hash for record in ledger.records()}
            for result in ledger.results().values():
                load_curve(study, result)
        for line in said:
            if line[0] == "record":
                assert hashes.get(int(line[1])) == line[2], (
                    f"record {line[1]} was reported and is not there"
                )
            assert line[0] != "frozen" or launch.exists(), (
                "a frozen config was reported and is not there"
            )
    WORKS[name](study, lambda *said: None)
    assert content(study) == expected, "another end"


WORKS = {"study": work, "fork": fork, "repair": mend}


def child(shim, study, name, k, fault, pipe):
    """Do the work with a fault armed; does not return."""
    code = BUG

    def say(*words):
        os.write(pipe, (" ".join(map(str, words)) + "\n").encode())

    try:
        how, error = FAULTS[fault]
        shim.fault_arm(str(study).encode(), k, how, error)
        WORKS[name](study, say)
        code = ABSORBED if shim.fault_hit() else DONE
    except (SweepError, OSError) as error:
        named = isinstance(error, SweepError) or error.filename is not None
        code = REFUSED if named and shim.fault_hit() else BUG
        if code == BUG:
            traceback.print_exc()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def one(shim, study, name, k, fault, expected):
    """One fault: how the process ended. Raises AssertionError if something is lost."""
    prepare(study, name)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        child(shim, study, name, k, fault, writer)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = [line.split() for line in file]
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == DONE:
        return "done"
    try:
        assert code != BUG, "an error that is not named"
        check(study, name, said, expected)
    except Exception as error:
        raise AssertionError(f"{name}, {fault} at call {k}: {error}") from error
    return {REFUSED: "refused", ABSORBED: "absorbed"}.get(code, "killed")


def no_journal():
    """Planted: what a transaction replaces is kept nowhere."""
    connect = chain.connect

    def mutant(path, *, write):
        connection = connect(path, write=write)
        connection.execute("PRAGMA journal_mode = OFF")
        return connection

    chain.connect = mutant


def in_place():
    """Planted: files are written where they lie."""
    canon.write_atomic = lambda path, data: path.write_bytes(data)


def no_sync():
    """Planted: what is written is left to the page cache."""
    connect = chain.connect

    def mutant(path, *, write):
        connection = connect(path, write=write)
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    chain.connect = mutant
    os.fsync = lambda descriptor: None


PLANTS = {plant.__name__: plant for plant in (no_journal, in_place, no_sync)}


def main(shim_path, folder, first, every, names, faults, plant):
    """Print the table, as JSON: by work and fault, how many calls were harmed and how the process
    ended.
    """
    shim = ctypes.CDLL(shim_path)
    shim.fault_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
    if plant:
        PLANTS[plant]()
    rows, violations = [], []
    study = Path(folder) / "work" / "study"
    for name in names:
        prepare(study, name)
        WORKS[name](study, lambda *said: None)
        expected = content(study)
        for fault in faults:
            ends, k, end = {"killed": 0, "refused": 0, "absorbed": 0, "violation": 0}, first, ""
            while end != "done":
                try:
                    end = one(shim, study, name, k, fault, expected)
                except AssertionError as error:
                    violations.append(str(error))
                    end = "violation"
                if end != "done":
                    ends[end] += 1
                k += every
            rows.append({"work": name, "fault": fault, "points": sum(ends.values()), **ends})
    print(json.dumps({"rows": rows, "violations": violations}))


def compiled(folder):
    """The shim as a library; None where there is no C compiler, or it does not take the source."""
    compiler, library = shutil.which("cc") or shutil.which("gcc"), Path(folder) / "fault_shim.so"
    if compiler is None:
        return None
    source = Path(__file__).with_name("fault_shim.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    done = subprocess.run(command, check=False, capture_output=True)
    return None if done.returncode else library


def table_of(
    shim, *, first=1, every=1, names=("study", "fork", "repair"), faults=tuple(FAULTS), plant=""
):
    """What `main` prints of every `every`-th call from `first` on, in a process of its own, its
    files in memory.

    Raises:
        RuntimeError: that process failed.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        asked = json.dumps([str(shim), folder, first, every, list(names), list(faults), plant])
        environment = {
            **os.environ,
            "LD_PRELOAD": str(shim),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        done = subprocess.run(
            [sys.executable, __file__, asked],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
