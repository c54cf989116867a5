"""Each verb prints the next command: whoever types nothing else comes from a corpus to a main run
that is watched.
"""

import json
import re
import shlex
import tomllib

import pytest
from tiny_study import PLAN, forerun, write_corpus

REASON = "a test: whatever the gates say"


def next_of(out):
    """Words of the command that is printed last as the next one, without what is said of it."""
    *_, line = re.findall(r"^(?:next|fix it, or freeze anyway): forerun (.+)$", out, re.M)
    words = shlex.split(re.split(r", |;", line)[0])
    return [REASON if word == "TEXT" else word for word in words]


def tiny():
    """The tiny study's plan as options of `init`."""
    for section, keys in tomllib.loads(PLAN).items():
        for key, value in keys.items():
            shown = '{ clip_norm = ["width"] }' if isinstance(value, dict) else json.dumps(value)
            yield from ("--set", f"{section}.{key}={shown}")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_printed_commands_lead_from_init_to_watch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    words, typed = ["init", *tiny()], []
    while len(typed) < 12:
        code, out, err = forerun(*words)
        typed.append(words[0])
        assert code in ((0, 3, 4) if words == ["freeze", "study"] else (0,)), (words, err)
        if words[0] == "watch":
            break
        words = next_of(out + err)
    typed = [verb for number, verb in enumerate(typed) if typed[number - 1 : number] != [verb]]
    assert typed == ["init", "validate", "estimate", "run", "freeze", "rehearse", "launch", "watch"]
    assert "--conclude" in words
