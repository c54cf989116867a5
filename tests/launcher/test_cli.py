"""The command line itself: exit codes, one JSON object, near names, and no traceback whatever is
typed.
"""

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from tiny_study import ask, forerun, write_corpus

from launcher.cli import cli
from launcher.cli.cli import main


def test_every_option_of_parameters_tokens_flops_or_dollars_takes_7b():
    names = set()
    for verb in cli.cli.list_commands(click.Context(cli.cli)):
        for param in cli.cli.get_command(click.Context(cli.cli), verb).params:
            words = set(" ".join(param.opts).replace("-", " ").split())
            if words & {"params", "tokens", "flops", "usd"} and "column" not in words:
                assert param.type.convert("7B", param, None) == 7e9, (verb, param.opts)
                names.add(param.opts[-1])
    assert {"--params", "--budget-flops", "--unique-tokens", "--price-usd"} <= names


@pytest.mark.parametrize("verb", cli._VERBS)
def test_every_verb_has_help_and_json(verb):
    code, out, err = forerun(verb, "--help")
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
def test_an_ask_to_end_is_an_interruption(name):
    """As the kernel sends it, while a verb is at work."""
    verb = f"import signal, time; signal.raise_signal(signal.{name}); time.sleep(60)"
    as_from_a_terminal = (  # where tests run in the background, both are ignored
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    )
    code = (
        f"{as_from_a_terminal}from launcher.cli import cli\n"
        f"cli.cli.main = lambda **_: exec({verb!r})\ncli.main(['verify', 'x', '--json'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
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
LINES = [line.split("|") for line in BAD_LINES.strip().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
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


@pytest.mark.parametrize(("line", "code", "said"), LINES, ids=[line for line, _, _ in LINES])
def test_bad_command_lines(folder, monkeypatch, line, code, said):
    monkeypatch.chdir(folder)
    before = sorted(Path().iterdir())
    got, out, err = forerun(*line.split())
    assert (got, out) == (int(code), "")
    assert said in err
    assert "Traceback" not in err
    assert "forerun: " in err
    assert sorted(Path().iterdir()) == before, "a refused command leaves nothing behind"
    body = ask(*line.split())[1]
    assert set(body) == {"error", "exit_code", "message", "problems"}
    assert body["exit_code"] == got
    assert said in body["message"]
    assert body["problems"]


def test_our_own_bug_is_called_one(monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(cli.cli, "main", broken)
    code, body = ask("status")
    assert (code, body["error"]) == (1, "ZeroDivisionError")
    assert "Traceback" not in forerun("status")[2]
    monkeypatch.setenv("FORERUN_TRACEBACK", "1")
    assert "Traceback" in forerun("status")[2]


def test_the_installed_command_and_the_module_are_one():
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "status", "nowhere", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, json.loads(done.stdout)["error"]) == (2, "StudyMissing")


EARLY = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background it is ignored
os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C, while click is being imported
"""  # noqa: E501


@pytest.mark.parametrize(
    "start", ["-m launcher", "-c 'from launcher.__main__ import main; main()'"]
)
def test_an_interruption_before_click_is_there_is_one_line(tmp_path, start):
    (tmp_path / "click.py").write_text(EARLY)
    paths = f"{tmp_path}:{Path(cli.__file__).parents[1]}"
    command = f"PYTHONPATH={paths} exec {sys.executable} {start} flops"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "forerun: interrupted\n")
