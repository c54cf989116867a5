"""The logbook: everything that happened is in it, once, in order; what it shows is text, whatever
it holds.
"""

import contextlib
import getpass
import os
import shutil

import pytest
from test_talk import Terminal
from tiny_study import ask, forerun

from launcher.base import chronicle
from launcher.cli.cli import main
from launcher.logbook import logbook
from launcher.logbook.logbook import (
    MOST_SHOWN,
    Event,
    add_note,
    format_text,
    page,
    plain,
    write_logbook,
)

DIGEST = "a1" * 32


def event(at, kind="note", text="x", **kwargs):
    return Event(at=at, kind=kind, text=text, **kwargs)


def test_days_in_order_and_times_in_utc():
    text = page(
        [
            event("2026-03-02T01:30:00+02:00", text="second"),
            event("2026-03-01T22:00:00+00:00", text="first"),
            event("2026-03-02T08:00:00", text="third", kind="restarted", digest=DIGEST, step=1200),
        ]
    )
    assert text.splitlines() == [
        "# Logbook",
        "",
        "## 2026-03-01",
        "",
        "- 22:00 **note** first",
        "- 23:30 **note** second",
        "",
        "## 2026-03-02",
        "",
        "- 08:00 **restarted** (run a1a1a1a1, step 1,200) third",
    ]


@pytest.mark.parametrize(
    "hostile",
    [
        "a\n## 1999-01-01\n- 00:00 **launched** forged",
        "a\r\n# b",
        "a\u2028# b\u0085# c",
        "\x1b[31mred\x07\x00",
        "\u202eesrever",
        "<script>alert(1)</script>",
        "![x](http://evil/x.png)",
        "[x](javascript:alert(1))",
        "`a` **b**",
        "| a | b |",
        "&lt;script&gt;",
        "\\",
        "~~gone~~",
        "www.evil.example http://evil.example",
        "$x$",
    ],
)
def test_hostile_text_is_shown_and_does_nothing(hostile):
    shown = page([event("2026-03-01T22:00:00+00:00", text=hostile)])
    lines = shown.splitlines()
    assert len(lines) == 5 and lines[4].startswith("- 22:00 **note** ")
    assert all(character.isprintable() for character in lines[4])
    rendered = _rendered(lines[4].removeprefix("- 22:00 **note** "))
    assert rendered == " ".join("".join(c if c.isprintable() else " " for c in hostile).split())


def _rendered(markdown):
    """What a reader of Markdown shows of text in which every mark is escaped; fails on one that is
    not.
    """
    shown, at = "", 0
    while at < len(markdown):
        character = markdown[at]
        if character == "\\":
            at += 1
            character = markdown[at]
        elif character == "&":
            name, _, _ = markdown[at + 1 :].partition(";")
            character = {"amp": "&", "lt": "<", "gt": ">"}[name]
            at += len(name) + 1
        else:
            assert character not in "`*_[]|~$<>", f"{character!r} is markup"
        shown += character
        at += 1
    return shown


def test_a_person_at_a_terminal_reads_plain_text(copied, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = "[old_run] lr_max ~ 0.01 <see http://host/a_b> & more; 2*3"
    assert ask("note", text, "--study", copied)[0] == 0
    piped = forerun("note", "--study", copied)[1]
    assert text not in piped and piped.rstrip() == (copied / "logbook.md").read_text().rstrip()
    monkeypatch.setenv("COLUMNS", "200")
    with contextlib.redirect_stdout(terminal := Terminal()), contextlib.suppress(SystemExit):
        main(["note", "--study", str(copied)])
    assert f"note: {logbook.author()}: {text}" in terminal.getvalue()
    events = [event("2026-03-01T22:00:00+00:00", text=text), event("", text="\x1b[31mred\nforged")]
    assert format_text(events).splitlines() == [
        "Undated",
        "- note: [31mred forged",
        "",
        "2026-03-01",
        f"- 22:00 note: {text}",
    ]
    assert format_text([]) == "Nothing has happened yet."


def test_a_megabyte_takes_a_screen(tmp_path):
    chronicle.record(tmp_path, "note", "a\n" * 2**19)
    text = write_logbook(tmp_path).read_text()
    assert len(text) < MOST_SHOWN + 200
    assert f"({2**20 - MOST_SHOWN:,} characters more)" in text


# Of a real study


def test_a_study_from_its_first_driver_to_its_notes(frozen_once, tmp_path):
    study = shutil.copytree(frozen_once, tmp_path / "study")
    ((digest, run_dir),) = [(path.name, path / "run") for path in (study / "frozen").iterdir()]
    chronicle.record(run_dir, "launched", "from step 0", step=0, digest=digest)
    chronicle.record(run_dir, "restarted", "out of memory after step 7", step=4, digest=digest)
    chronicle.record(
        run_dir, "corrupt", "checkpoint step-00000008 is corrupt", step=8, digest=digest
    )
    code, noted = ask("note", "Halved the microbatch.", "--study", study)
    assert (code, noted["entry"]["data"]["author"]) == (0, logbook.author())
    code, body = ask("note", "--study", study)
    assert code == 0 and f"{logbook.author()}: Halved the microbatch." in [
        event["text"] for event in body["events"]
    ]
    text = (study / "logbook.md").read_text()
    assert forerun("note", "--study", study)[1].strip() == text.strip()
    for said in (
        "**driver** pid ",
        "**coordinates** mup: ",
        "**fit** ",
        "**frozen** (run ",
        f"**corrupt** (run {digest[:8]}, step 8) checkpoint step-00000008 is corrupt",
        f"(run {digest[:8]}, step 4) out of memory after step 7",
        f"**note** {plain(logbook.author())}: Halved",
    ):
        assert said in text, said
    for gate in ("coordinates", "transfer"):
        (line,) = [line for line in text.splitlines() if f"gate {gate}, which" in line]
        assert (
            f"**accepted** {plain(logbook.author())}: gate {gate}, which" in line
            and "planted" in line
        )


def test_a_study_whose_ledger_is_damaged_keeps_its_notes(copied):
    add_note(copied, "before the crash")
    content = bytearray((copied / "ledger.db").read_bytes())
    content[len(content) // 2 :] = os.urandom(len(content) - len(content) // 2)
    (copied / "ledger.db").write_bytes(content)
    text = write_logbook(copied).read_text()
    assert "before the crash" in text and "the ledger is left out" in text


# The verb


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("   ", "TEXT is empty"),
        ("the key is hf_" + "a1" * 10, "seems to contain a secret"),
    ],
)
def test_notes_that_are_refused(copied, text, said):
    code, body = ask("note", text, "--study", copied)
    assert code == 2 and said in body["message"]
    assert not (copied / chronicle.CHRONICLE_FILE).exists()


def test_the_author_is_whom_the_system_knows(monkeypatch):
    monkeypatch.setenv("LOGNAME", "forged")
    monkeypatch.setenv("USER", "forged")
    assert getpass.getuser() == "forged" and logbook.author() != "forged"
