"""Tests that the source obeys the rules in `tests/support/source_rules.py`.

The repository must have no problem, and each rule must find a violation that is planted in a small
tree of packages.
"""

import pytest
from source_rules import (
    MAX_FILE_LINES,
    MAX_FOLDER_FILES,
    MAX_FUNCTION_LINES,
    RULES,
    draw_layers,
    find_bare_imports,
    find_folder_problems,
    find_forbidden_imports,
    find_import_cycles,
    find_layer_violations,
    find_machine_paths,
    find_misplaced_library_imports,
    find_missing_docstrings,
    find_missing_types,
    find_needless_exceptions,
    find_oversized_code,
    find_own_notations,
    find_package_problems,
    find_plurals,
    find_repeated_literals,
    find_template_problems,
    find_unchecked_opens,
)
from source_tree import (
    PACKAGE_DOCSTRING,
    PACKAGES,
    ROOT,
    SourceTree,
    get_package,
    write_source_tree,
)


@pytest.fixture(scope="module")
def source_tree():
    """The packages of this repository."""
    return SourceTree(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_obeys_the_rule(source_tree, rule):
    assert rule(source_tree) == []


def test_every_exception_of_opening_files_is_needed(source_tree):
    assert find_needless_exceptions(source_tree) == []


def test_contributing_has_the_diagram_of_the_layers(source_tree):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    diagram = "\n".join(draw_layers(source_tree))
    assert f"```mermaid\n{diagram}\n```" in text, f"the diagram should be:\n{diagram}"


def test_every_package_is_read(source_tree):
    assert {get_package(name) for name in source_tree.trees} == set(PACKAGES)
    assert len(source_tree.trees) > 50


def test_clean_source_breaks_no_rule(tmp_path):
    files = {
        "proxies/core/spec.py": "import json",
        "sweeps/a.py": (
            "from proxies.core import spec\ndef f(x: int) -> int:\n    'Doc.'\n    return x\n"
        ),
        "launcher/b.py": "import sweeps.a\nfrom transfer import c\n",
        "transfer/c.py": "import numpy\n",
    }
    source_tree = write_source_tree(tmp_path, files)
    assert {rule.__name__: rule(source_tree) for rule in RULES if rule(source_tree)} == {}


def make_long_function(num_lines):
    """Return the source of a function of this length."""
    body = "\n".join("    x = 1" for _ in range(num_lines - 2))
    return f"def f() -> None:\n    'Doc.'\n{body}\n"


PROGRAM = """# A training program.
import json

STEPS = 12


def train(steps: int) -> None:
    for step in range(steps):
        print(json.dumps({"step": step}))


if STEPS:
    train(STEPS)
"""
"""Program that no module may hold as a text."""
VIOLATIONS = [
    (
        find_forbidden_imports,
        {"sweeps/a.py": "from transfer import b", "transfer/b.py": ""},
        "sweeps.a imports transfer.b",
    ),
    (
        find_forbidden_imports,
        {"transfer/a.py": "def f() -> None:\n    import launcher.cli"},
        "transfer.a imports launcher.cli",
    ),
    (
        find_forbidden_imports,
        {"launcher/a.py": "import forerun.api", "forerun/api.py": ""},
        "launcher.a imports forerun.api",
    ),
    (
        find_forbidden_imports,
        {"scaling_fits/a.py": "import proxies.data.tokens", "proxies/data/tokens.py": ""},
        "proxies.data",
    ),
    (
        find_forbidden_imports,
        {"scaling_fits/a.py": "import torch.nn"},
        "scaling_fits.a imports torch.nn",
    ),
    (
        find_forbidden_imports,
        {"proxies/a.py": "from sweeps.pool import Finished"},
        "proxies.a imports sweeps.pool",
    ),
    (
        find_forbidden_imports,
        {"proxies/core/canon.py": "import numpy"},
        "proxies.core.canon imports numpy",
    ),
    (
        find_bare_imports,
        # Two spaces, so that write_source_tree does not complete the import.
        {"sweeps/a.py": "from  transfer import b"},
        "sweeps.a imports transfer",
    ),
    (
        find_layer_violations,
        {"launcher/main_run/a.py": "from launcher.study import b", "launcher/study/b.py": ""},
        "launcher.main_run.a imports launcher.study.b",
    ),
    (
        find_misplaced_library_imports,
        {"launcher/a.py": "import optuna"},
        "launcher.a imports optuna",
    ),
    (
        find_misplaced_library_imports,
        {"proxies/a.py": "def f() -> None:\n    from mup import init"},
        "proxies.a imports mup",
    ),
    (
        find_misplaced_library_imports,
        {"sweeps/pool.py": "import ray.exceptions"},
        "sweeps.pool imports ray.exceptions",
    ),
    (
        find_misplaced_library_imports,
        {"launcher/report/page.py": "import matplotlib.pyplot"},
        "launcher.report.page imports matplotlib.pyplot",
    ),
    (find_misplaced_library_imports, {"launcher/a.py": "import wandb"}, "launcher.a imports wandb"),
    (
        find_misplaced_library_imports,
        {"proxies/data/tokens.py": "import tokenizers"},
        "proxies.data.tokens imports tokenizers",
    ),
    (
        find_import_cycles,
        {
            "sweeps/a.py": "import sweeps.b",
            "sweeps/b.py": "from sweeps import c",
            "sweeps/c.py": "def f() -> None:\n    from sweeps.a import x",
        },
        "sweeps.c imports itself",
    ),
    (
        find_folder_problems,
        {
            "launcher/a/x.py": "from launcher.b import y",
            "launcher/b/y.py": "",
            "launcher/b/z.py": "if TYPE_CHECKING:\n    from launcher.a.w import W",
            "launcher/a/w.py": "",
        },
        "launcher.b imports",
    ),
    (
        find_folder_problems,
        {f"launcher/a/x{n}.py": "" for n in range(MAX_FOLDER_FILES + 1)},
        f"launcher.a has {MAX_FOLDER_FILES + 1} files",
    ),
    (
        find_oversized_code,
        # `write_source_tree` adds a docstring of one line.
        {"launcher/a.py": "x = 1\n" * MAX_FILE_LINES},
        f"launcher.a has {MAX_FILE_LINES + 1} lines",
    ),
    (
        find_oversized_code,
        {"launcher/a.py": make_long_function(MAX_FUNCTION_LINES + 1)},
        f"launcher.a.f has {MAX_FUNCTION_LINES + 1} lines",
    ),
    (
        find_missing_docstrings,
        {"launcher/a.py": "def f() -> None: ..."},
        "launcher.a.f has no docstring",
    ),
    (
        find_missing_docstrings,
        {"launcher/a.py": "class C:\n    'Doc.'\n    def f(self) -> None: ..."},
        "launcher.a.C.f has",
    ),
    (
        find_missing_docstrings,
        {"launcher/a.py": "class C:\n    x = 1"},
        "launcher.a.C has no docstring",
    ),
    (
        find_missing_types,
        {"launcher/a.py": "def f(x) -> None:\n    'Doc.'"},
        "launcher.a.f: x has no type",
    ),
    (
        find_missing_types,
        {"launcher/a.py": "def f(*, x: int):\n    'Doc.'"},
        "launcher.a.f: return has no type",
    ),
    (
        find_repeated_literals,
        {"launcher/a.py": "x: Literal[1, 2]", "sweeps/b.py": "y = Literal[1, 2]"},
        "sweeps.b, launcher.a",
    ),
    (find_template_problems, {"launcher/a.py": f"T = {PROGRAM!r}"}, "launcher.a:2 holds a program"),
    (
        find_template_problems,
        {"launcher/a.py": f"T = f{PROGRAM.replace('12', '{n}')!r}"},
        "launcher.a:2 holds a program",
    ),
    (
        find_template_problems,
        {"launcher/a.py": f"T = {PROGRAM.replace('12', '<<N>>')!r}"},
        "launcher.a:2 holds a program",
    ),
    (
        find_template_problems,
        {"launcher/a.py": f"T = {PROGRAM + '(<<REST>>'!r}"},
        "launcher.a:2 holds a program",
    ),
    (
        find_template_problems,
        {
            "launcher/a.py": "from launcher.main_run.exporters.templates import t",
            "launcher/main_run/exporters/templates/t.py": "",
        },
        "launcher.a imports launcher.main_run.exporters.templates.t",
    ),
    (
        find_template_problems,
        {"launcher/a.py": "import t", "launcher/main_run/exporters/templates/t.py": ""},
        "launcher.a imports t",
    ),
    (
        find_template_problems,
        {
            "launcher/main_run/exporters/templates/t.py": "from launcher import a",
            "launcher/a.py": "",
        },
        "no export",
    ),
    (
        find_machine_paths,
        {"launcher/a.py": "P = '/" + "home/jane/corpus'"},
        "launcher.a names a path",
    ),
    (find_machine_paths, {"launcher/a.py": "# see /" + "work/notes.md"}, "launcher.a names a path"),
    (
        find_package_problems,
        {"transfer/__init__.py": '"""A package.\n\nEnters: a\nLeaves: b\nPromises: c\n"""\n'},
        "lacks Refuses",
    ),
    (find_unchecked_opens, {"launcher/a.py": "x = open('f')"}, "launcher.a:2 opens a file: open"),
    (
        find_unchecked_opens,
        {"launcher/a.py": "def f(path: Path) -> str:\n    return path.read_text()"},
        "launcher.a:3 opens",
    ),
    (
        find_unchecked_opens,
        {"sweeps/a.py": "with (folder / 'f').open('rb') as file:\n    pass"},
        "sweeps.a:2 opens",
    ),
    (
        find_unchecked_opens,
        {"sweeps/a.py": "import sqlite3\nsqlite3.connect('f')"},
        "sweeps.a:3 opens a file: sqlite3.connect",
    ),
    (
        find_unchecked_opens,
        {"proxies/data/a.py": "import numpy as np\nnp.memmap('f')"},
        "proxies.data.a:3 opens a file",
    ),
    (find_plurals, {"launcher/a.py": "x = f'{len(runs)} runs'"}, "launcher.a:2 writes a plural"),
    (
        find_plurals,
        {"sweeps/a.py": "x = f'lost {state.num_lost} times'"},
        "sweeps.a:2 writes a plural",
    ),
    (
        find_own_notations,
        {"launcher/a.py": "x = f'{share:.1%} of it'"},
        "launcher.a:2 formats a quantity",
    ),
    (
        find_own_notations,
        {"scaling_fits/a.py": "x = f'loss {loss:.4f} nats'"},
        "scaling_fits.a:2 formats",
    ),
    (
        find_own_notations,
        {"scaling_fits/a.py": "x = f'[{low:.4f}, {high:.4f}] nats'"},
        "scaling_fits.a:2 formats",
    ),
    (find_own_notations, {"sweeps/a.py": "x = f'{seconds // 60} min'"}, "sweeps.a:2 formats"),
    (find_own_notations, {"launcher/a.py": "x = f'about USD {usd:.2f}'"}, "launcher.a:2 formats"),
    (find_own_notations, {"transfer/a.py": "x = f'{flops:.2e}'"}, "transfer.a:2 formats"),
    (
        find_package_problems,
        {"transfer/__init__.py": PACKAGE_DOCSTRING + "from transfer import verdict\n"},
        "transfer holds code",
    ),
]
"""Rule, files of a tree that break it, and a part of the problem that the rule must report.

Line numbers count the docstring that `write_source_tree` adds.
"""


@pytest.mark.parametrize(
    ("rule", "files", "phrase"), VIOLATIONS, ids=lambda value: getattr(value, "__name__", None)
)
def test_planted_violation_is_found(tmp_path, rule, files, phrase):
    assert any(phrase in problem for problem in rule(write_source_tree(tmp_path, files)))


def test_imports_for_type_checkers_make_no_cycle(tmp_path):
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sweeps.b import x\n"
    files = {"sweeps/a.py": guarded, "sweeps/b.py": "import sweeps.a"}
    assert find_import_cycles(write_source_tree(tmp_path, files)) == []
