"""What the command line says: never a reason to stop working."""

import io
import json
import re
import shlex

import pytest

from launcher.base.talk import LiveLine, Meter, say
from launcher.base.terminal import lay_out_table, shown, wrap
from launcher.cli.cli import main
from launcher.cli.options import answer, table


class Terminal(io.StringIO):
    def __init__(self, error=None):
        super().__init__()
        self.error = error

    def isatty(self):
        return True

    def write(self, text):
        if self.error is not None:
            raise self.error
        return super().write(text)


def test_a_terminal_has_one_live_line(monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    say("begins")
    with Meter("search", 2.0) as meter:
        meter.add(1.0, "3 running")
    said = terminal.getvalue()
    assert said.startswith("\r\033[Kbegins\n\r\033[Ksearch:  50\u00a0% in 0 s") and said.endswith(
        "3 running\r\033[K"
    )


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), OSError(28, "No space"), RuntimeError("reentrant")]
)
def test_nobody_who_listens_stops_no_work(monkeypatch, error):
    """A terminal that was closed sends SIGHUP, and its handler speaks: what was in flight was
    lost.
    """
    monkeypatch.setattr("sys.stderr", Terminal(error))
    say("stopping: workers save what they hold")
    with Meter("search", 2.0) as meter:
        meter.add(1.0)


def test_what_is_under_way_counts_until_it_is_finished(monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with Meter("search", 4.0) as meter:
        meter.add(0.0, under_way=1.0)
        meter.add(1.0, under_way=0.5)
        meter.add(3.0)
    shares = [
        line.split("%")[0].split()[-1]
        for line in terminal.getvalue().split("\r\033[K")
        if "%" in line
    ]
    assert shares == ["25", "38", "100"]


def test_what_would_steer_a_terminal_is_spelled_out(capsys):
    name = "run\x1b[2J\x07\r\x9b31m\u202eexe\udce9 café\tx"
    said = "run\\x1b[2J\\x07\\r\\x9b31m\\u202eexe\\udce9 café\tx"
    assert shown(name + "\n") == said + "\n"
    answer(False, {}, name)
    say(name)
    assert [*capsys.readouterr()] == [said + "\n"] * 2
    answer(True, {"name": "\x1b[2J"}, "")
    assert json.loads(capsys.readouterr().out) == {"name": "\x1b[2J"}
    with pytest.raises(SystemExit):
        main(["status", "no\x1b[31mstudy"])
    assert "no\\x1b[31mstudy" in capsys.readouterr().err


HEAD, ROWS = (
    ("run", "loss", "reason"),
    [("a", "5.4321", "it left the range at once"), ("\u5bbd", "5.1", "[bold]\x1b[2J")],
)


def test_columns_line_up_and_nothing_in_a_cell_is_markup():
    assert table(HEAD, ROWS, left=(0, 2)).splitlines() == [
        "run    loss  reason",
        "a    5.4321  it left the range at once",
        "\u5bbd      5.1  [bold]\\x1b[2J",  # two columns wide
    ]


ATOM = re.compile(r"\[[^\]]+\]|[-+]?\d[\d.,^e+-]*")
"""A number or an interval."""
PROSE = (
    "choice: width 96, 233,952 params, 7.12\u00a0M tokens; loss 1.189 nats [1.129, 1.419], 2^-8 at "
    "85.6 %\n"
    "- at width 512 the transferred rate costs -0.0123 nats [-0.0200, +0.0009] at level 0.9: 1.2 "
    "to 18 minutes\n"
    "    indented: " + "word " * 40 + "\n\nshort\n" + "/a/long/path-with-hyphens" * 5
)


@pytest.mark.parametrize("columns", range(24, 130, 7))
def test_lines_are_wrapped_at_spaces_never_inside_a_number_or_interval(columns):
    lines = wrap(PROSE, columns).split("\n")
    assert all(len(line) <= columns or " " not in line.strip() for line in lines)
    assert " ".join(lines).split() == PROSE.split()
    atoms = [atom for line in PROSE.split("\n") for atom in ATOM.findall(line)]
    assert [atom for line in lines for atom in ATOM.findall(line)] == atoms
    assert any(re.search(r"1\.2 to 18", line) for line in lines)


def test_a_wrapped_command_can_be_pasted():
    command = (
        "forerun run study/plan.toml --study study-more-seeds --set transfer.num_seeds=16 "
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
def test_a_table_cuts_no_number_at_any_width(columns):
    text = lay_out_table(
        ["value", "at the base", "nats lost", "tested over", "params"], CELLS, (0,), columns
    )
    lines = wrap(text, columns or 10_000).splitlines()
    assert "\u2026" not in text
    atoms = [atom for line in lines for atom in ATOM.findall(line)]
    assert sorted(atoms) == sorted(
        atom for row in CELLS for cell in row for atom in ATOM.findall(cell)
    )
    assert columns is None or all(len(line) <= max(columns, 23) for line in lines)
    assert len(lines) == 3 or columns not in (None, 100)


@pytest.mark.parametrize("columns", ["60", "80"])
def test_a_verb_fits_its_terminal_and_is_colored_only_there(columns, monkeypatch, tmp_path):
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


def test_the_live_line_leaves_out_whole_parts(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    LiveLine().show(
        "study 99% (transfer 3 of 5)  time left: cannot tell yet  best 1.555 nats at lr 0.0118"
    )
    assert terminal.getvalue() == "\r\033[Kstudy 99% (transfer 3 of 5)  time left: cannot tell yet"
