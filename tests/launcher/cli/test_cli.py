"""Tests of the command line as a whole: exit codes, JSON errors, suggestions, and signals."""

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from tiny_study import run_forerun, run_json, write_corpus

import forerun
from forerun._launcher.cli import cli
from forerun._launcher.cli.cli import main
from forerun._proxies.core.canon import IMPORT_DIR


def test_every_option_that_takes_a_large_amount_accepts_7b():
    option_names = set()
    for verb in cli.cli.list_commands(click.Context(cli.cli)):
        for param in cli.cli.get_command(click.Context(cli.cli), verb).params:
            words = set(" ".join(param.opts).replace("-", " ").split())
            if words & {"params", "tokens", "flops", "usd"} and "column" not in words:
                assert param.type.convert("7B", param, None) == 7e9, (verb, param.opts)
                option_names.add(param.opts[-1])
    assert {"--params", "--budget-flops", "--unique-tokens", "--price-usd"} <= option_names


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help_and_a_json_option(verb):
    code, out, err = run_forerun(verb, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: forerun {verb} ")
    assert "--json" in out
    command = cli.cli.get_command(click.Context(cli.cli), verb)
    assert all(
        option.help
        for option in command.params
        if isinstance(option, click.Option) and option.name != "study_dir"
    )


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_ending_signals_exit_with_130(name):
    verb_source = f"import signal, time; signal.raise_signal(signal.{name}); time.sleep(60)"
    # A background job ignores SIGINT and SIGHUP: restore the handlers that a terminal gives.
    restore_handlers = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    )
    script = (
        f"{restore_handlers}from forerun._launcher.cli import cli\n"
        f"cli.run_verb = lambda _: exec({verb_source!r})\ncli.main(['verify', 'x', '--json'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, "Traceback" in done.stderr) == (130, False)
    assert json.loads(done.stdout)["message"].startswith("interrupted")


BAD_LINES = """
statsu|2|Did you mean 'status'?
run nowhere.toml|2|nowhere.toml: 1 problem
run plan.toml --set proxy.num_steps=0|2|proxy.num_steps = 0: must be at least 1
run plan.toml --study /dev/null/x|2|/dev/null/x cannot be made (Not a directory): name another folder
validate plan.toml --set data.path="nowhere"|2|data.path = 'nowhere': no corpus there; make it by `forerun tokenize
init --budget-flops x|2|'x' is not an amount
tokenize bad.jsonl --out x|2|bad.jsonl line 1:
transfer plan.toml --runs runs.csv|2|name a PLAN, or a table with --runs FILE
transfer --runs .|2|suffix
transfer --runs runs.csv --base-width 7|2|base_size = 7 has no runs
fit bad.csv|2|row 2
fit good.csv --level nan|2|level = nan: must be a number from 0.01 to 0.999
fit good.csv --bootstrap 0 --out /dev/null/f|2|no such folder
predict plan.toml --params 1 --tokens 1|2|plan.toml is not a fit
flops --layers 1 --width 65 --heads 4 --ffn 1 --vocab 2 --seq-len 1|2|num_heads = 4 does not divide width = 65
freeze nowhere --accept fit|2|--accept GATE and --reason TEXT go together
verify /dev/zero|2|/dev/zero: cannot be read: it is a device: must be a plain file
verify list.json|2|a launch config must hold `digest` and `decision`
export list.json --to jax|2|--to jax: must be one of native, torchtitan, huggingface, megatron-lm, olmo-core
"""  # noqa: E501
"""Command lines that are refused, each with its exit code and a part of its message."""
LINES = [line.split("|") for line in BAD_LINES.strip().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that `BAD_LINES` name."""
    folder = tmp_path_factory.mktemp("typed")
    write_corpus(folder)
    losses = [
        f"{n},{d},{1.2 + 40 * n**-0.34 + 60 * d**-0.37}"
        for n in (1e5, 2e5, 4e5)
        for d in (1e6, 3e6)
    ]
    rates = [
        f"{width},{2.0**octave},{3 + 0.1 * octave**2}"
        for width in (32, 64)
        for octave in range(-3, 3)
    ]
    files = {
        "plan.toml": "# a plan",
        "good.csv": "\n".join(["params,tokens,loss", *losses]),
        "bad.csv": "params,tokens,loss\n0,1e6,3.0\n",
        "runs.csv": "\n".join(["width,lr,loss", *rates]),
        "bad.jsonl": "{oops\n",
        "list.json": "[1]",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(("line", "code", "message"), LINES, ids=[line for line, _, _ in LINES])
def test_bad_command_line_is_refused_and_leaves_no_file(folder, monkeypatch, line, code, message):
    monkeypatch.chdir(folder)
    before = sorted(Path().iterdir())
    exit_code, out, err = run_forerun(*line.split())
    assert (exit_code, out) == (int(code), "")
    assert message in err
    assert "Traceback" not in err
    assert "forerun: " in err
    assert sorted(Path().iterdir()) == before, "a refused command leaves nothing behind"
    body = run_json(*line.split())[1]
    assert set(body) == {"error", "exit_code", "message", "problems"}
    assert body["exit_code"] == exit_code
    assert message in body["message"]
    assert body["problems"]


def test_internal_error_is_reported_as_a_bug(monkeypatch):
    def raise_planted_error(*args, **kwargs):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(cli, "run_verb", raise_planted_error)
    code, body = run_json("status")
    assert (code, body["error"]) == (1, "ZeroDivisionError")
    assert "Traceback" not in run_forerun("status")[2]
    monkeypatch.setenv("FORERUN_TRACEBACK", "1")
    assert "Traceback" in run_forerun("status")[2]


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert forerun.__version__ in capsys.readouterr().out


def test_python_m_forerun_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "forerun", "status", "nowhere", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, json.loads(done.stdout)["error"]) == (2, "StudyMissing")


INTERRUPTING_CLICK = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores SIGINT
os.kill(os.getpid(), signal.SIGINT)
"""
"""A fake click module that interrupts the process while it is imported."""


@pytest.mark.parametrize("start", ["-m forerun", "-c 'from forerun.__main__ import main; main()'"])
def test_interruption_during_the_imports_prints_one_line(tmp_path, start):
    (tmp_path / "click.py").write_text(INTERRUPTING_CLICK)
    command = f"PYTHONPATH={tmp_path}:{IMPORT_DIR} exec {sys.executable} {start} flops"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "forerun: interrupted\n")
