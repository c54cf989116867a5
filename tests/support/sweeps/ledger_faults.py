"""Processes in which one system call on a study's files goes wrong.

For every k, a process is forked whose k-th call on the study's files (open, write, sync, rename,
unlink ...) kills it, tears the write, or fails; `fault_shim.c` injects the fault. Afterward
everything that the process reported as done must be there, the study must open without help, and
the same work must end, when it is done again, as in an undisturbed process.

`make_fault_table` returns the table of all faults. As a script, this module is the process that
forks.
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

from sweep_fakes import make_outcome, make_spec, make_specs

from forerun._launcher.main_run.frozen.launch_file import (
    LAUNCH_FILE,
    attest,
    read_attestation,
    write_launch,
)
from forerun._proxies.core import canon
from forerun._sweeps.store import chain
from forerun._sweeps.store.curves import load_curve, store_curve
from forerun._sweeps.store.errors import SweepError
from forerun._sweeps.store.fork import import_runs, read_parent
from forerun._sweeps.store.ledger import LEDGER_NAME, Ledger
from forerun._sweeps.store.repair import repair

PLAN = {"data_id": "toy", "semantics": 2}
SPECS = [*make_specs(2), make_spec(log2_lr=-1)]
DIGEST = "d" * 64
# By fault: the mode and the errno for `fault_arm` of fault_shim.c
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
MAX_CALLS = 10_000
"""Number of calls on a study's files that no work reaches; it takes a few hundred."""
DONE, REFUSED, ABSORBED, BUG = 0, 3, 4, 1
"""Exit codes of a child: it ended without meeting the fault, it raised a named error, it ended in
spite of the fault, or it raised an unnamed error."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """A frozen decision with all that `write_launch` reads."""

    digest: str = DIGEST


def run_study(study, report):
    """Write a study from its first record to its frozen config; skip what exists already."""
    with Ledger.open(study, PLAN, create=True) as ledger:
        for index, spec in enumerate(SPECS):
            if ledger.find("suggestion", f"search/{index}") is None:
                record = ledger.append(
                    "suggestion", f"search/{index}", {"learning_rate": 0.1 * index}
                )
                report("record", record.seq, record.hash)
            if spec.id not in ledger.get_results():
                store_curve(study, spec.id, make_outcome(spec)[1])
                ledger.commit(spec, make_outcome(spec)[0])
                report("record", len(ledger.read_records()) - 1, ledger.head_hash)
        if ledger.find("fit", "x") is None:
            # A record long enough for overflow pages
            record = ledger.append("fit", "x", {"draws": [index / 7 for index in range(900)]})
            report("record", record.seq, record.hash)
        write_launch(study / "frozen", Decision())
        attest(
            study / "frozen" / DIGEST, "evidence", DIGEST, {"run_ids": sorted(ledger.get_results())}
        )
        report("frozen")


def fork_study(study, report):
    """Create a child study that imports three runs."""
    parent_dir = study.parents[1] / "parent"
    parent = read_parent(study, parent_dir, PLAN)
    with Ledger.open(study, PLAN, create=True) as ledger:
        import_runs(ledger, study, parent, parent_dir)
        report("record", len(ledger.read_records()) - 1, ledger.head_hash)


def repair_study(study, report):
    """Repair a ledger whose second result and header are damaged."""
    repair(study)
    report("repaired")


def prepare_work(study, name):
    """Create the files that the work starts from."""
    shutil.rmtree(study.parent, ignore_errors=True)
    study.parent.mkdir()
    parent, damaged = study.parents[1] / "parent", study.parents[1] / "damaged"
    if name == "fork" and not parent.exists():
        run_study(parent, lambda *words: None)
    if name == "repair":
        if not damaged.exists():
            run_study(damaged, lambda *words: None)
            path = damaged / LEDGER_NAME
            path.write_bytes(bytes(100) + path.read_bytes().replace(b'"seed":1', b'"seed":7')[100:])
        shutil.copytree(damaged, study)


def read_content(study):
    """Return every record except the drivers' names, all curves, and the frozen files."""
    ledger = Ledger.read(study)
    records = [
        (record.kind, record.key, record.text)
        for record in ledger.read_records()
        if record.kind != "driver"
    ]
    curves = {run_id: load_curve(study, result) for run_id, result in ledger.get_results().items()}
    launch = study / "frozen" / DIGEST / LAUNCH_FILE
    frozen = launch.read_bytes() if launch.exists() else None
    evidence = launch.parent / "attestations" / "evidence.json"
    return (
        records,
        curves,
        frozen,
        read_attestation(evidence, DIGEST) if evidence.exists() else None,
    )


def check_study(study, name, reported, expected):
    """Check that everything reported is there, and that the work can be completed."""
    launch = study / "frozen" / DIGEST / LAUNCH_FILE
    for path in (study / "frozen").rglob("*.json"):
        canon.parse(path.read_bytes())
    if name != "repair":
        with Ledger.open(study, PLAN, create=True) as ledger:
            hashes = {record.seq: record.hash for record in ledger.read_records()}
            for result in ledger.get_results().values():
                load_curve(study, result)
        for line in reported:
            if line[0] == "record":
                assert hashes.get(int(line[1])) == line[2], (
                    f"record {line[1]} was reported and is not there"
                )
            assert line[0] != "frozen" or launch.exists(), (
                "a frozen config was reported and is not there"
            )
    WORK_FUNCTIONS[name](study, lambda *reported: None)
    assert read_content(study) == expected, "the completed work has another result"


WORK_FUNCTIONS = {"study": run_study, "fork": fork_study, "repair": repair_study}


def run_child(shim, study, name, k, fault, pipe):
    """Do the work `name` with a fault armed at its k-th call, and exit the process. What is done is
    reported through `pipe`, one line each.
    """
    code = BUG

    def report(*words):
        os.write(pipe, (" ".join(map(str, words)) + "\n").encode())

    try:
        action, error = FAULTS[fault]
        shim.fault_arm(str(study).encode(), k, action, error)
        WORK_FUNCTIONS[name](study, report)
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


def inject_fault(shim, study, name, k, fault, expected):
    """Run the work with one fault; return how the process ended: done (without meeting the fault),
    refused, absorbed, or killed. Raise AssertionError if something is lost.
    """
    prepare_work(study, name)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        run_child(shim, study, name, k, fault, writer)
    os.close(writer)
    with os.fdopen(reader) as file:
        reported = [line.split() for line in file]
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == DONE:
        return "done"
    try:
        assert code != BUG, "the error is not one of ours"
        check_study(study, name, reported, expected)
    except Exception as error:
        raise AssertionError(f"{name}, {fault} at call {k}: {error}") from error
    return {REFUSED: "refused", ABSORBED: "absorbed"}.get(code, "killed")


def set_pragma(pragma):
    """Have every connection to a ledger set a pragma of SQLite."""
    connect = chain.connect

    def mutant(path, *, write):
        connection = connect(path, write=write)
        connection.execute(f"PRAGMA {pragma}")
        return connection

    chain.connect = mutant


def disable_journal():
    """Plant a bug: pages that a transaction replaces are kept nowhere."""
    set_pragma("journal_mode = OFF")


def write_in_place():
    """Plant a bug: files are written in place."""
    canon.write_atomic = lambda path, data: path.write_bytes(data)


def skip_sync():
    """Plant a bug: written data is left in the page cache."""
    set_pragma("synchronous = OFF")
    os.fsync = lambda descriptor: None


PLANTED_BUGS = {
    "no_journal": disable_journal,
    "in_place": write_in_place,
    "no_sync": skip_sync,
}


def main(shim_path, folder, first, every, names, faults, bug):
    """Print a table as JSON: for each work and fault, how many calls were harmed and how the
    process ended.

    Args:
        shim_path: the compiled library.
        folder: folder for the studies.
        first: number of the first call that is harmed.
        every: step from each harmed call to the next.
        names: works to do, keys of `WORK_FUNCTIONS`.
        faults: faults to inject, keys of `FAULTS`.
        bug: key of `PLANTED_BUGS`; empty for none.
    """
    shim = ctypes.CDLL(shim_path)
    shim.fault_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
    if bug:
        PLANTED_BUGS[bug]()
    rows, violations = [], []
    study = Path(folder) / "work" / "study"
    for name in names:
        prepare_work(study, name)
        WORK_FUNCTIONS[name](study, lambda *words: None)
        expected = read_content(study)
        for fault in faults:
            counts = {"killed": 0, "refused": 0, "absorbed": 0, "violation": 0}
            # Until k is above the number of calls, so that the work is done without the fault
            k, outcome = first, ""
            while outcome != "done":
                if k > MAX_CALLS:
                    raise RuntimeError(
                        f"{name}, {fault}: it meets the fault at any number of calls"
                    )
                try:
                    outcome = inject_fault(shim, study, name, k, fault, expected)
                except AssertionError as error:
                    violations.append(str(error))
                    outcome = "violation"
                if outcome != "done":
                    counts[outcome] += 1
                k += every
            rows.append({"work": name, "fault": fault, "points": sum(counts.values()), **counts})
    print(json.dumps({"rows": rows, "violations": violations}))


def compile_shim(folder):
    """Return the shim as a compiled library; None if there is no C compiler, or it rejects the
    source.
    """
    compiler, library = shutil.which("cc") or shutil.which("gcc"), Path(folder) / "fault_shim.so"
    if compiler is None:
        return None
    source = Path(__file__).with_name("fault_shim.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    done = subprocess.run(command, check=False, capture_output=True)
    return None if done.returncode else library


def make_fault_table(
    shim, *, first=1, every=1, names=("study", "fork", "repair"), faults=tuple(FAULTS), bug=""
):
    """Return the table that `main` prints for every `every`-th call from the `first` on.

    A new process makes it, with its files in memory. Raises RuntimeError if that process fails.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        arguments = json.dumps([str(shim), folder, first, every, list(names), list(faults), bug])
        environment = {
            **os.environ,
            "LD_PRELOAD": str(shim),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        done = subprocess.run(
            [sys.executable, __file__, arguments],
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
