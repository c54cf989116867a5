"""A guard against the habits that made the source hard to read: it counts them.

Each count points at places to read again; none is a verdict on one sentence. The limits are what
the work on the language has reached so far: a change may lower them, never raise them.
"""

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("forerun", "proxies", "sweeps", "transfer", "scaling_fits", "launcher")
OTHERS = ("tests", "benchmarks", "docs", "examples")
LIMITS = {
    PACKAGES: {
        "fragment docstrings": 331,
        "empty names": 333,
        "participle functions": 156,
        "superlative constants": 62,
        "jargon docstrings": 118,
        "formatter switches": 0,
    },
    OTHERS: {
        "fragment docstrings": 312,
        "empty names": 1204,
        "participle functions": 291,
        "superlative constants": 7,
        "jargon docstrings": 98,
        "formatter switches": 0,
    },
}

FRAGMENT = re.compile(
    r"(Of|That|What|Who|Whoever|Whose|Those|As|By|In|From|For|At|To|With|Between|Nothing|So|Since|"
    r"Why|Where|How|Which|Its|Their|Such|But|Because)\b"
)
"""First words of a docstring whose sentence has no beginning."""
PARTICIPLE = re.compile(
    r"_*([a-z]+ed|told|found|said|begun|drawn|written|shown|held|kept|seen|given|known|sought|built|"
    r"spent|left|chosen|driven|taken|born|put|lost|grown|done)"
)
"""Function names that say a state and not an action."""
SUPERLATIVE = re.compile(r"_?(MOST|LEAST|FEWEST|LARGEST|SMALLEST|LONGEST|SHORTEST)_")
"""Prefixes of constants that the field writes MAX_ and MIN_."""
EMPTY_NAMES = frozenset(
    [
        "found",
        "said",
        "told",
        "one",
        "ones",
        "other",
        "others",
        "what",
        "mine",
        "ours",
        "theirs",
        "whole",
        "rest",
    ]
)
"""Names of variables that say nothing of what they hold."""
JARGON = re.compile(
    r"\b(beside|besides|told|foretold|hearth|roof|keeper|chronicle|valley|bought|purchase|wanted|"
    r"brakes?|whoever|for good|by hand of|lies in a circle|is of the|was of the|are of the)\b",
    re.IGNORECASE,
)
FORMATTER_SWITCH = re.compile("fmt: " + "(skip|off)")


def list_docstrings(tree):
    """Return all docstrings of a module, those of attributes included."""
    return [
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def is_property(function):
    decorators = {ast.unparse(decorator).split(".")[-1] for decorator in function.decorator_list}
    return bool(decorators & {"property", "cached_property"})


def measure(text):
    """Return the counts of one source file."""
    counts = Counter()
    tree = ast.parse(text)
    for docstring in list_docstrings(tree):
        counts["fragment docstrings"] += bool(FRAGMENT.match(docstring.strip()))
        counts["jargon docstrings"] += bool(JARGON.search(docstring))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_participle = PARTICIPLE.fullmatch(node.name) is not None
            counts["participle functions"] += is_participle and not is_property(node)
        is_stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        name = node.id if is_stored else node.arg if isinstance(node, ast.arg) else ""
        counts["empty names"] += name in EMPTY_NAMES
        counts["superlative constants"] += is_stored and SUPERLATIVE.match(name) is not None
    counts["formatter switches"] += len(FORMATTER_SWITCH.findall(text))
    return counts


def list_sources(folders):
    output = subprocess.run(
        ["git", "ls-files", "--", *(f"{folder}/*.py" for folder in folders)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    # A source archive has no git.
    return output or [
        str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py")
    ]


@pytest.mark.parametrize("folders", LIMITS, ids=["packages", "others"])
def test_the_source_reads_no_worse_than_it_did(folders):
    total = Counter()
    for name in list_sources(folders):
        total += measure((ROOT / name).read_text(encoding="utf-8"))
    limits = LIMITS[folders]
    assert {name: total[name] for name in limits if total[name] > limits[name]} == {}
    slack = {name: total[name] for name in limits if total[name] < 0.9 * limits[name]}
    assert slack == {}, "fewer than the limit allows: lower the limits to these counts"


def test_every_habit_is_counted():
    """A mutant: a file with each habit once."""
    text = (
        '"""What a module is."""\n'
        "MOST_RUNS = 3\n"
        "def told(mine):\n"
        '    """Return the valley."""\n'
        f"    found = mine  # {'fmt'}: skip\n"
        "    return found\n"
    )
    assert measure(text) == {
        "fragment docstrings": 1,
        "jargon docstrings": 1,
        "participle functions": 1,
        "empty names": 2,
        "superlative constants": 1,
        "formatter switches": 1,
    }
