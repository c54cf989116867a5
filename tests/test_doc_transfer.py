"""Test of docs/transfer.md: the commands on the page print the output that the page shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_study import run_forerun

DOC = Path(__file__).parents[1] / "docs" / "transfer.md"
NUMBER = re.compile(r"[-+]?\d+\.?\d*")


def read_examples():
    """Return the lines of output that the page shows, by command.

    A command is an indented line that begins with `$`; a line with a deeper indent continues the
    one before.
    """
    output_by_command, command = {}, ""
    for line in DOC.read_text(encoding="utf-8").splitlines():
        if line.startswith("    $ forerun "):
            command = line.removeprefix("    $ forerun ")
            output_by_command[command] = []
        elif not line.startswith("    "):
            command = ""
        elif command and line.startswith("      "):
            output_by_command[command][-1] += line
        elif command:
            output_by_command[command].append(line)
    return output_by_command


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Folder of the tables that the page's shell commands create."""
    text, folder = DOC.read_text(encoding="utf-8"), tmp_path_factory.mktemp("tables")
    lines = re.findall(r"^    (.*\n)", text, re.MULTILINE)
    # Run the page's commands up to the end of its script mk.py, and later ones that write a table.
    end = lines.index("EOF\n") + 1
    commands = lines[:end] + [line for line in lines[end:] if re.search(r" > \w+\.csv", line)]
    script = "".join(commands).replace("python3 ", f"{sys.executable} ")
    subprocess.run(["bash", "-ec", script], cwd=folder, check=True)
    (folder / "benchmarks").symlink_to(DOC.resolve().parents[1] / "benchmarks")
    return folder


@pytest.mark.parametrize("command", read_examples())
def test_page_shows_what_the_command_prints(command, tables, monkeypatch):
    """The page may leave lines out, and numbers may differ by a tenth between library versions."""
    monkeypatch.chdir(tables)
    _, out, _ = run_forerun(*command.split())
    shown_lines = read_examples()[command]
    assert shown_lines[0].startswith("    verdict: ") and len(shown_lines) >= 3
    # The iterator is shared, so that the lines must come in the order of the page.
    printed_lines = iter(out.splitlines())
    for line in shown_lines:
        assert any(is_same_line(line, printed) for printed in printed_lines), (
            f"{line}\nis not what is printed now:\n{out}"
        )


def is_same_line(shown, printed):
    """Return whether the words of two lines are the same, up to their numbers."""
    shown_words, printed_words = shown.split(), printed.split()
    if len(shown_words) != len(printed_words):
        return False
    return all(map(is_same_word, shown_words, printed_words))


def is_same_word(shown, printed):
    """Return whether two words are equal except for numbers within 10 % or 0.03."""
    shown_numbers = [float(number) for number in NUMBER.findall(shown)]
    printed_numbers = [float(number) for number in NUMBER.findall(printed)]
    if NUMBER.sub("", shown) != NUMBER.sub("", printed):
        return False
    if len(shown_numbers) != len(printed_numbers):
        return False
    pairs = zip(shown_numbers, printed_numbers, strict=True)
    return all(abs(a - b) <= 0.1 * abs(a) + 0.03 for a, b in pairs)
