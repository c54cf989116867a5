"""Tests of the logbook: every event is in it once and in order, and any text is shown literally."""

import contextlib
import getpass
import os
import shutil

import pytest
from fake_terminal import Terminal
from tiny_study import run_forerun, run_json

from forerun._launcher.cli.cli import main
from forerun._launcher.main_run import event_log
from forerun._launcher.main_run.logbook import logbook
from forerun._launcher.main_run.logbook.logbook import (
    MAX_EVENT_CHARS,
    Event,
    add_note,
    escape_markdown,
    format_page,
    format_text,
    write_logbook,
)

DIGEST = "a1" * 32


def make_event(at, kind="note", text="x", **kwargs):
    """Return an event at a time, given in ISO 8601; an empty time is unknown."""
    return Event(at=at, kind=kind, text=text, **kwargs)


def test_page_is_sorted_by_day_with_times_in_utc():
    text = format_page(
        [
            make_event("2026-03-02T01:30:00+02:00", text="second"),
            make_event("2026-03-01T22:00:00+00:00", text="first"),
            make_event(
                "2026-03-02T08:00:00", text="third", kind="restarted", digest=DIGEST, step=1200
            ),
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
def test_hostile_text_is_escaped(hostile):
    shown = format_page([make_event("2026-03-01T22:00:00+00:00", text=hostile)])
    lines = shown.splitlines()
    assert len(lines) == 5 and lines[4].startswith("- 22:00 **note** ")
    assert all(character.isprintable() for character in lines[4])
    rendered = render_escaped_markdown(lines[4].removeprefix("- 22:00 **note** "))
    assert rendered == " ".join("".join(c if c.isprintable() else " " for c in hostile).split())


def render_escaped_markdown(markdown):
    """Return the text that a Markdown reader shows; fail if some mark is not escaped."""
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


def test_terminal_shows_plain_text_without_escapes(study_copy, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = "[old_run] lr_max ~ 0.01 <see http://host/a_b> & more; 2*3"
    assert run_json("note", text, "--study", study_copy)[0] == 0
    piped = run_forerun("note", "--study", study_copy)[1]
    assert text not in piped and piped.rstrip() == (study_copy / "logbook.md").read_text().rstrip()
    monkeypatch.setenv("COLUMNS", "200")
    with contextlib.redirect_stdout(terminal := Terminal()), contextlib.suppress(SystemExit):
        main(["note", "--study", str(study_copy)])
    assert f"note: {logbook.get_author()}: {text}" in terminal.getvalue()
    events = [
        make_event("2026-03-01T22:00:00+00:00", text=text),
        make_event("", text="\x1b[31mred\nforged"),
    ]
    assert format_text(events).splitlines() == [
        "Undated",
        "- note: [31mred forged",
        "",
        "2026-03-01",
        f"- 22:00 note: {text}",
    ]
    assert format_text([]) == "Nothing has happened yet."


def test_long_text_is_cut(tmp_path):
    event_log.append_event(tmp_path, "note", "a\n" * 2**19)
    text = write_logbook(tmp_path).read_text()
    assert len(text) < MAX_EVENT_CHARS + 200
    assert f"({2**20 - MAX_EVENT_CHARS:,} characters more)" in text


# ---- Real studies ----


def test_logbook_of_a_frozen_study_has_all_events(frozen_study, tmp_path):
    study = shutil.copytree(frozen_study, tmp_path / "study")
    ((digest, run_dir),) = [(path.name, path / "run") for path in (study / "frozen").iterdir()]
    event_log.append_event(run_dir, "launched", "from step 0", step=0, digest=digest)
    event_log.append_event(
        run_dir, "restarted", "out of memory after step 7", step=4, digest=digest
    )
    event_log.append_event(
        run_dir, "corrupt", "checkpoint step-00000008 is corrupt", step=8, digest=digest
    )
    code, noted = run_json("note", "Halved the microbatch.", "--study", study)
    assert (code, noted["entry"]["data"]["author"]) == (0, logbook.get_author())
    code, body = run_json("note", "--study", study)
    assert code == 0 and f"{logbook.get_author()}: Halved the microbatch." in [
        event["text"] for event in body["events"]
    ]
    text = (study / "logbook.md").read_text()
    assert run_forerun("note", "--study", study)[1].strip() == text.strip()
    for line in (
        "**driver** pid ",
        "**coordinates** mup: ",
        "**fit** ",
        "**frozen** (run ",
        f"**corrupt** (run {digest[:8]}, step 8) checkpoint step-00000008 is corrupt",
        f"(run {digest[:8]}, step 4) out of memory after step 7",
        f"**note** {escape_markdown(logbook.get_author())}: Halved",
    ):
        assert line in text, line
    for gate in ("coordinates", "transfer"):
        (line,) = [line for line in text.splitlines() if f"gate {gate}, which" in line]
        assert (
            f"**accepted** {escape_markdown(logbook.get_author())}: gate {gate}, which" in line
            and "planted" in line
        )


def test_notes_survive_a_damaged_ledger(study_copy):
    add_note(study_copy, "before the crash")
    content = bytearray((study_copy / "ledger.db").read_bytes())
    content[len(content) // 2 :] = os.urandom(len(content) - len(content) // 2)
    (study_copy / "ledger.db").write_bytes(content)
    text = write_logbook(study_copy).read_text()
    assert "before the crash" in text and "the ledger is left out" in text


# ---- The command ----


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("   ", "TEXT is empty"),
        ("the key is hf_" + "a1" * 10, "seems to contain a secret"),
    ],
)
def test_empty_note_or_note_with_a_secret_is_refused(study_copy, text, message):
    code, body = run_json("note", text, "--study", study_copy)
    assert code == 2 and message in body["message"]
    assert not (study_copy / event_log.EVENT_LOG_FILE).exists()


def test_author_is_not_taken_from_the_environment(monkeypatch):
    monkeypatch.setenv("LOGNAME", "forged")
    monkeypatch.setenv("USER", "forged")
    assert getpass.getuser() == "forged" and logbook.get_author() != "forged"
