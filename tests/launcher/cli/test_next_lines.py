"""Test of the `next:` lines: the printed commands lead from a corpus to a watched main run."""

import itertools
import json
import re
import shlex
import tomllib

import pytest
from tiny_study import PLAN, run_forerun, write_corpus

REASON = "a test: whatever the gates say"


def read_next_command(out):
    """Return the words of the last command that is printed as the next one, without its remark."""
    *_, line = re.findall(r"^(?:next|fix it, or freeze anyway): forerun (.+)$", out, re.M)
    words = shlex.split(re.split(r", |;", line)[0])
    return [REASON if word == "TEXT" else word for word in words]


def list_init_options():
    """Yield the tiny study's plan as options of `init`."""
    for section, keys in tomllib.loads(PLAN).items():
        for key, value in keys.items():
            text = '{ clip_norm = ["width"] }' if isinstance(value, dict) else json.dumps(value)
            yield from ("--set", f"{section}.{key}={text}")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_printed_commands_lead_from_init_to_watch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    words, typed = ["init", *list_init_options()], []
    while len(typed) < 12:
        code, out, err = run_forerun(*words)
        typed.append(words[0])
        assert code in ((0, 3, 4) if words == ["freeze", "study"] else (0,)), (words, err)
        if words[0] == "watch":
            break
        words = read_next_command(out + err)
    # A refused `freeze` is typed again with the gates accepted: count it once.
    verbs = [verb for verb, _ in itertools.groupby(typed)]
    assert verbs == ["init", "validate", "estimate", "run", "freeze", "rehearse", "launch", "watch"]
    assert "--conclude" in words
