"""What the command line says: never a reason to stop working."""

import io
import json

import pytest

from launcher.base.talk import Meter, say, shown
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
    assert said.startswith("\r\033[Kbegins\n\r\033[Ksearch:  50% in 0 s") and said.endswith("3 running\r\033[K")


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), OSError(28, "No space"), RuntimeError("reentrant")]
)
def test_nobody_who_listens_stops_no_work(monkeypatch, error):
    """A terminal that was closed sends SIGHUP, and its handler speaks: what was in flight was lost."""
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
    shares = [line.split("%")[0].split()[-1] for line in terminal.getvalue().split("\r\033[K") if "%" in line]
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
    ]  # fmt: skip
