"""Tests of exit codes: every error class has its code, and 1 means a bug of forerun only."""

import ast
import builtins
import errno
import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from tiny_study import run_forerun, run_json

from forerun._launcher.cli import cli
from forerun._launcher.cli.demo import DemoError

ROOT = Path(__file__).parents[3]
PACKAGES = ("proxies", "sweeps", "transfer", "scaling_fits", "launcher", "forerun")
CLASSES_BY_CODE = {
    1: {"DuplicateRecord", "SourceStuck"},
    2: {
        "CanonError",
        "CheckpointError",
        "ClusterUnfit",
        "CommandError",
        "ConcludedOtherwiseError",
        "DashboardError",
        "DataError",
        "DelimitedError",
        "DescribeError",
        "DiskFull",
        "ExportError",
        "FactoryChangedError",
        "FactoryError",
        "FitFileError",
        "ForerunError",
        "InputError",
        "FolderRemoved",
        "ForkRefused",
        "FormatError",
        "FrozenError",
        "LawError",
        "LayoutError",
        "LedgerRefused",
        "LedgerTooNew",
        "LedgerTooOld",
        "LinksOutError",
        "MetricsError",
        "MissingError",
        "NoGpuError",
        "NoRunError",
        "NotAReportError",
        "OptimaError",
        "OptionProblems",
        "OptunaStorageError",
        "OtherRunError",
        "OwnLaunchError",
        "PlanChanged",
        "PlanError",
        "ProblemsError",
        "PoolDead",
        "PowerLawError",
        "ProofError",
        "RequestError",
        "RunsFail",
        "SaveError",
        "ScriptError",
        "ShapeError",
        "SpecError",
        "StageMissingError",
        "StateError",
        "StudyMissing",
        "StudyNameError",
        "SweepError",
        "TableError",
        "TrainerError",
        "TransferError",
        "UnexpectedEndError",
        "UnknownFieldError",
        "UnknownKeyError",
        "UnknownNameError",
        "UnmeasurableError",
        "UserCodeError",
        "WireError",
    },
    3: {"GateError"},
    4: {
        "BudgetSpent",
        "CannotTellError",
        "NoFinishedTrialError",
        "NoProvenanceError",
        "NotConcludedError",
        "UnseenError",
    },
    5: {
        "CorruptCorpusError",
        "CorruptError",
        "CurveCorrupt",
        "FitTamperedError",
        "LedgerCorrupt",
        "LedgerLost",
        "TamperedError",
    },
    75: {"StaleDriver", "StudyHeld"},
    130: {"InterruptedStudyError"},
}
"""Names of all exception classes of the packages by their exit code."""
VARYING_CODE = {"DemoError"}
"""Classes whose errors differ in their exit code: that of the step which failed."""


def list_error_classes():
    """Return (module, class name) of every exception class that the packages define."""
    bases = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "templates" in path.parts:
                continue
            path_name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            prefix = "" if package == "forerun" else "forerun._"
            module = prefix + path_name.removesuffix(".__init__")
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    bases[module, node.name] = {
                        ast.unparse(base).split(".")[-1] for base in node.bases
                    }
    # Names of exceptions: those of click and Python, then every class that inherits from one.
    names = {"ClickException", "UsageError", "BadParameter"}
    names |= {
        name
        for name, kind in vars(builtins).items()
        if isinstance(kind, type) and issubclass(kind, BaseException)
    }
    while True:
        errors = {(module, name) for (module, name), parents in bases.items() if parents & names}
        if {name for _, name in errors} <= names:
            return sorted(errors)
        names |= {name for _, name in errors}


def parse_deeply_nested_json():
    json.loads("[" * 100_000)


def recurse_endlessly():
    recurse_endlessly()


def make_failing_callback(error):
    """Return a verb's function that raises an error, given as an exception or as a function."""

    def callback(**_):
        if callable(error) and not isinstance(error, BaseException):
            error()
        raise error

    return callback


@pytest.fixture
def run_verb(monkeypatch):
    """Function that runs a verb which raises an error, and returns its exit code and stderr."""
    command = cli.cli.get_command(click.Context(cli.cli), "flops")

    def run(error):
        monkeypatch.setattr(command, "callback", make_failing_callback(error))
        code, out, err = run_forerun("flops")
        assert (out, "Traceback" in err) == ("", False)
        if not isinstance(error, SystemExit):
            json_code, body = run_json("flops")
            assert json_code == body["exit_code"] == code
            assert ("This is a bug in forerun" in err) == (
                "This is a bug in forerun" in body["message"]
            )
        return code, err

    return run


def test_every_error_class_of_the_packages_has_its_exit_code(run_verb):
    """A new class must be added to `CLASSES_BY_CODE`: its code is a decision, not a default."""
    classes = list_error_classes()
    expected = {name: code for code, names in CLASSES_BY_CODE.items() for name in names}
    assert {name for _, name in classes} == set(expected) | VARYING_CODE
    for module, name in classes:
        if name not in VARYING_CODE:
            kind = getattr(importlib.import_module(module), name)
            # `__new__` without `__init__`, because each class takes other arguments.
            error = kind.__new__(kind, "planted")
            if issubclass(kind, click.UsageError):
                error = kind(["planted"])
            code, err = run_verb(error)
            assert code == expected[name], (module, name)
            assert ("This is a bug in forerun" in err) == (code == 1), (module, name)


# Errors that the machine or the user's input causes, so that they are no bugs of forerun
EXTERNAL_ERRORS = [
    *(
        OSError(number, os.strerror(number))
        for number in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EACCES,
            errno.EPERM,
            errno.EROFS,
            errno.EMFILE,
            errno.ENFILE,
            errno.ENOMEM,
            errno.EIO,
            errno.EPIPE,
            errno.ECONNRESET,
            errno.ECONNREFUSED,
            errno.ETIMEDOUT,
            errno.EAGAIN,
            errno.EFBIG,
            errno.ENAMETOOLONG,
            errno.ELOOP,
            errno.EADDRINUSE,
            errno.ESTALE,
        )
    ),
    FileNotFoundError(errno.ENOENT, "No such file or directory", "nowhere"),
    OSError(errno.EINVAL, "it is a pipe: must be a plain file", "named"),
    MemoryError(),
    type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2 GiB"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    EOFError("Compressed file ended before the end-of-stream marker was reached"),
    parse_deeply_nested_json,
    click.UsageError("usage"),
    click.BadParameter("parameter"),
    click.FileError("file"),
]


@pytest.mark.parametrize(
    "error", EXTERNAL_ERRORS, ids=lambda error: getattr(error, "__name__", repr(error))
)
def test_error_of_the_machine_or_the_input_exits_with_2(run_verb, error):
    code, err = run_verb(error)
    assert (code, "bug" in err) == (2, False)
    assert err.strip().startswith(("forerun: ", "Usage: ")), "stderr names the problem"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (SystemExit(3), 3),
        (SystemExit(4), 4),
        (DemoError(("run",), 5), 5),
        (DemoError(("run",), 1), 1),
    ],
    ids=repr,
)
def test_interruptions_and_outcomes_keep_their_codes(run_verb, error, code):
    assert run_verb(error)[0] == code


@pytest.mark.parametrize(
    "error",
    [
        ValueError("ours"),
        AssertionError(),
        KeyError("x"),
        OSError("no number"),
        OSError(errno.EBADF, "bad"),
        recurse_endlessly,
    ],
    ids=lambda error: getattr(error, "__name__", repr(error)),
)
def test_unexpected_exception_exits_with_1_as_a_bug(run_verb, error):
    code, err = run_verb(error)
    assert (code, "This is a bug in forerun" in err) == (1, True)


TABLE = "width,lr_optimum\n64,0.01\n128,0.0025\n256,0.000625\n512,0.00015\n"
"""Optima that fall by two octaves with each doubling of the width: the verdict is a drift."""
STREAMS = """
--help | true|0
flops --help >&-|0
transfer --runs drifts.csv | true|3
transfer --runs drifts.csv --json <&- >&- 2>&-|3
transfer --runs drifts.csv >/dev/full|2
status none 2>&1 | true|2
status none 2>&-|2
"""
"""Arguments with redirections of the streams, and the exit code of forerun, on each line."""


@pytest.mark.parametrize("line", STREAMS.strip().splitlines())
def test_closed_stream_or_pipe_keeps_the_exit_code(tmp_path, line):
    (tmp_path / "drifts.csv").write_text(TABLE)
    command, _, code = line.rpartition("|")
    command = f"{sys.executable} -m forerun {command}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == int(code), done.stderr
    assert "bug" not in done.stderr


def test_file_does_not_get_the_descriptor_of_a_closed_stdout(tmp_path):
    """A ledger opened as file descriptor 1 would receive the output of child processes."""
    code = (
        "import os, sys\n"
        "from forerun._launcher.main_run.terminal_layout import open_standard_streams\n"
        "open_standard_streams()\n"
        "with open(sys.argv[1], 'w'): os.system('echo hello')\n"
        "print('caf\\xe9 \\u2013 \\udcff')\n"
        "sys.exit(7)"
    )
    for number, streams in enumerate((">&-", "<&- >&-", "<&- >&- 2>&-")):
        path = tmp_path / str(number)
        command = f'exec "$0" -c "$1" "$2" {streams}'
        done = subprocess.run(["bash", "-c", command, sys.executable, code, path], check=False)
        assert (done.returncode, path.read_text()) == (7, ""), streams


def test_entry_point_is_the_module_that_opens_the_streams():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"forerun": "forerun.__main__:main"}
