"""docs/transfer.md: what it prints is what its commands print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_study import forerun

DOC = Path(__file__).parents[1] / "docs" / "transfer.md"
NUMBER = re.compile(r"[-+]?\d+\.?\d*")


def examples():
    """What it prints by command: indented lines after one that `$` begins, wrapped ones whole
    again.
    """
    found, command = {}, ""
    for line in DOC.read_text(encoding="utf-8").splitlines():
        if line.startswith("    $ forerun "):
            command = line.removeprefix("    $ forerun ")
            found[command] = []
        elif not line.startswith("    "):
            command = ""
        elif command and line.startswith("      "):
            found[command][-1] += line
        elif command:
            found[command].append(line)
    return found


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Made by its own lines."""
    text, folder = DOC.read_text(encoding="utf-8"), tmp_path_factory.mktemp("tables")
    lines = re.findall(r"^    (.*\n)", text, re.MULTILINE)
    end = lines.index("EOF\n") + 1
    made = "".join(
        [*lines[:end], *(line for line in lines[end:] if re.search(r" > \w+\.csv", line))]
    )
    made = made.replace("python3 ", f"{sys.executable} ")
    subprocess.run(["bash", "-ec", made], cwd=folder, check=True)
    (folder / "benchmarks").symlink_to(DOC.resolve().parents[1] / "benchmarks")
    return folder


@pytest.mark.parametrize("command", examples())
def test_what_it_prints_is_what_the_command_prints(command, tables, monkeypatch):
    """Words alike; numbers within a tenth, for other versions of numpy and scipy. Lines may be left
    out.
    """
    monkeypatch.chdir(tables)
    _, out, _ = forerun(*command.split())
    wanted, printed = examples()[command], iter(out.splitlines())
    assert wanted[0].startswith("    verdict: ") and len(wanted) >= 3
    for line in wanted:
        assert any(alike(line.split(), now.split()) for now in printed), (
            f"{line}\nis not what is printed now:\n{out}"
        )


def alike(one, other):
    return len(one) == len(other) and all(map(alike_word, one, other))


def alike_word(one, other):
    numbers = [list(map(float, NUMBER.findall(word))) for word in (one, other)]
    if NUMBER.sub("", one) != NUMBER.sub("", other) or len(numbers[0]) != len(numbers[1]):
        return False
    return all(abs(a - b) <= 0.1 * abs(a) + 0.03 for a, b in zip(*numbers, strict=True))
