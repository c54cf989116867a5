"""Tests of the output of the command line: progress lines, escaping, tables and wrapping.

A broken terminal must never stop the work.
"""

import io
import json
import re
import shlex

import pytest
from fake_terminal import Terminal

from forerun._launcher.cli.cli import main
from forerun._launcher.cli.options import print_result
from forerun._launcher.main_run.progress_output import ProgressLine, WorkMeter, print_progress
from forerun._launcher.main_run.terminal_layout import (
    escape_control_characters,
    format_table,
    lay_out_table,
    wrap,
)


def test_terminal_has_one_live_line(monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    print_progress("begins")
    with WorkMeter("search", 2.0) as meter:
        meter.add(1.0, "3 running")
    output = terminal.getvalue()
    assert output.startswith(
        "\r\033[Kbegins\n\r\033[Ksearch:  50\u00a0% in 0 s"
    ) and output.endswith("3 running\r\033[K")


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), OSError(28, "No space"), RuntimeError("reentrant")]
)
def test_closed_terminal_stops_no_work(monkeypatch, error):
    """A closed terminal sends SIGHUP, whose handler prints; this once lost unfinished work."""
    monkeypatch.setattr("sys.stderr", Terminal(error))
    print_progress("stopping: workers save what they hold")
    with WorkMeter("search", 2.0) as meter:
        meter.add(1.0)


def test_work_under_way_counts_until_it_is_finished(monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with WorkMeter("search", 4.0) as meter:
        meter.add(0.0, under_way=1.0)
        meter.add(1.0, under_way=0.5)
        meter.add(3.0)
    shares = [
        line.split("%")[0].split()[-1]
        for line in terminal.getvalue().split("\r\033[K")
        if "%" in line
    ]
    assert shares == ["25", "38", "100"]


def test_control_characters_are_escaped(capsys):
    name = "run\x1b[2J\x07\r\x9b31m\u202eexe\udce9 café\tx"
    escaped = "run\\x1b[2J\\x07\\r\\x9b31m\\u202eexe\\udce9 café\tx"
    assert escape_control_characters(name + "\n") == escaped + "\n"
    print_result(False, {}, name)
    print_progress(name)
    assert [*capsys.readouterr()] == [escaped + "\n"] * 2
    print_result(True, {"name": "\x1b[2J"}, "")
    assert json.loads(capsys.readouterr().out) == {"name": "\x1b[2J"}
    with pytest.raises(SystemExit):
        main(["status", "no\x1b[31mstudy"])
    assert "no\\x1b[31mstudy" in capsys.readouterr().err


HEAD = ("run", "loss", "reason")
ROWS = [("a", "5.4321", "it left the range at once"), ("\u5bbd", "5.1", "[bold]\x1b[2J")]


def test_table_columns_are_aligned_and_cells_are_no_markup():
    assert format_table(HEAD, ROWS, left=(0, 2)).splitlines() == [
        "run    loss  reason",
        "a    5.4321  it left the range at once",
        "\u5bbd      5.1  [bold]\\x1b[2J",  # the first character is two columns wide
    ]


ATOM = re.compile(r"\[[^\]]+\]|[-+]?\d[\d.,^e+-]*")
"""Matches a number or an interval."""
PROSE = (
    "choice: width 96, 233,952 params, 7.12\u00a0M tokens; loss 1.189 nats [1.129, 1.419], 2^-8 at "
    "85.6 %\n"
    "- at width 512 the transferred rate costs -0.0123 nats [-0.0200, +0.0009] at level 0.9: 1.2 "
    "to 18 minutes\n"
    "    indented: " + "word " * 40 + "\n\nshort\n" + "/a/long/path-with-hyphens" * 5
)


@pytest.mark.parametrize("columns", range(24, 130, 7))
def test_lines_are_wrapped_at_spaces_outside_numbers_and_intervals(columns):
    lines = wrap(PROSE, columns).split("\n")
    assert all(len(line) <= columns or " " not in line.strip() for line in lines)
    assert " ".join(lines).split() == PROSE.split()
    atoms = [atom for line in PROSE.split("\n") for atom in ATOM.findall(line)]
    assert [atom for line in lines for atom in ATOM.findall(line)] == atoms
    assert any(re.search(r"1\.2 to 18", line) for line in lines)


def test_wrapped_command_can_be_pasted():
    command = (
        "forerun run study/plan.toml --study study-more-runs --set transfer.num_seeds=16 "
        "--set 'a.b=\"c\"'"
    )
    wrapped = wrap(f"next: {command}", 60)
    assert wrapped.count("\n") >= 1
    assert shlex.split(wrapped.removeprefix("next: ").replace("\\\n", "")) == shlex.split(command)


CELLS = [
    ("learning rate", "0.01783", "0.0005 [0.0000, 0.2882]", "width, duration", "7.12\u00a0M"),
    ("warmup fraction", "0.438", "-", "not tested", "26.71"),
]


@pytest.mark.parametrize("columns", [None, 100, 80, 66, 60, 40, 20])
def test_table_cuts_no_number_at_any_width(columns):
    text = lay_out_table(
        ["value", "at the base", "nats lost", "tested over", "params"], CELLS, (0,), columns
    )
    lines = wrap(text, columns or 10_000).splitlines()
    assert "\u2026" not in text
    atoms = [atom for line in lines for atom in ATOM.findall(line)]
    assert sorted(atoms) == sorted(
        atom for row in CELLS for cell in row for atom in ATOM.findall(cell)
    )
    # The longest cell that cannot be wrapped has 23 characters.
    assert columns is None or all(len(line) <= max(columns, 23) for line in lines)
    assert len(lines) == 3 or columns not in (None, 100)


@pytest.mark.parametrize("columns", ["60", "80"])
def test_output_fits_the_terminal_and_is_colored_only_there(columns, monkeypatch, tmp_path):
    rows = [
        f"{width},{2.0**octave},{3 + 0.1 * octave**2}"
        for width in (32, 64, 128)
        for octave in range(-3, 3)
    ]
    (tmp_path / "runs.csv").write_text("\n".join(["width,lr,loss", *rows]))
    texts = {}
    for name, variables in (
        ("color", {"TERM": "xterm"}),
        ("plain", {"TERM": "xterm", "NO_COLOR": "1"}),
    ):
        monkeypatch.delenv("NO_COLOR", raising=False)
        for variable, value in {**variables, "COLUMNS": columns}.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setattr("sys.stdout", terminal := Terminal())
        with pytest.raises(SystemExit):
            main(["transfer", "--runs", str(tmp_path / "runs.csv")])
        texts[name] = terminal.getvalue()
    monkeypatch.setattr("sys.stdout", pipe := io.StringIO())
    with pytest.raises(SystemExit):
        main(["transfer", "--runs", str(tmp_path / "runs.csv")])
    assert re.sub(r"\033\[\d+m", "", texts["color"]) == texts["plain"]
    assert texts["color"] != texts["plain"]
    assert "\033" not in texts["plain"] + pipe.getvalue()
    assert all(len(line) <= int(columns) for line in texts["plain"].splitlines())
    assert ATOM.findall(texts["plain"].replace("\n", " ")) == ATOM.findall(
        pipe.getvalue().replace("\n", " ")
    )


def test_live_line_drops_complete_parts(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    ProgressLine().show(
        "study 99% (transfer 3 of 5)  time left: cannot tell yet  best 1.555 nats at lr 0.0118"
    )
    assert terminal.getvalue() == "\r\033[Kstudy 99% (transfer 3 of 5)  time left: cannot tell yet"
