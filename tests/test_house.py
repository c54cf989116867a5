"""The house's own rules, held against its source; each rule is shown a planted violation that it
must catch.
"""

from __future__ import annotations

import ast
import collections
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("proxies", "sweeps", "transfer", "scaling_fits", "launcher", "forerun")
API = "forerun"
"""What notebooks import: it may import every room, and none imports it."""
CORE = {
    "proxies.external.keeper",
    "proxies.external.supervised_command",
    "proxies.external.log_file",
} | {
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "proxies" / "core").rglob("[a-z]*.py")
}
"""What every room may import: standard library only."""
CORE_WHEN_CALLED = {("proxies.core.tables.table_files", "pyarrow")}
"""Loaded by a function, of a file that needs it."""
DOORS = {
    "mup": {"proxies.parametrization.parametrization"},
    "optuna": {"sweeps.search.samplers", "sweeps.search.optuna_storage"},
    "ray": {"sweeps.ray.pool", "sweeps.ray.head"},
    "jinja2": {"launcher.report.page"},
    "matplotlib": {
        f"launcher.figures.{name}" for name in ("panel", "transfer", "fits", "main_run", "plots")
    },
    "tokenizers": {"proxies.data.tokenizer"},
    "wandb": {"launcher.dashboards.wandb_process"},
    "wandb_workspaces": {"launcher.dashboards.workspaces"},
}
TORCH_ROOMS = {"proxies", "launcher"}
HEAVY = ("torch", "ray", "optuna", "wandb", "mup", "matplotlib", "scipy")
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_FOLDER_FILES = 500, 59, 20


class House:
    """The rooms below a folder, parsed: module name to text and tree."""

    def __init__(self, root):
        self.root = root
        self.texts, self.trees, self.packages = {}, {}, []
        for room in ROOMS:
            for path in sorted((root / room).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                name = ".".join(parts).removesuffix(".__init__")
                self.packages += [name] if parts[-1] == "__init__" else []
                self.texts[name] = path.read_text(encoding="utf-8")
                self.trees[name] = ast.parse(self.texts[name])

    def imports(self, name, *, type_checking=True):
        """Modules a module imports, anywhere in it; of our own, the very submodule."""
        skipped = set()
        if not type_checking:
            for node in ast.walk(self.trees[name]):
                if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                    skipped.update(map(id, ast.walk(node)))
        found = set()
        for node in ast.walk(self.trees[name]):
            if id(node) in skipped:
                continue
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: relative import"
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {module if module in self.trees else node.module for module in inner}
        return found


def room_of(name):
    return name.split(".")[0]


def import_law(house):
    problems = []
    for name in house.trees:
        for target in house.imports(name):
            room, other = room_of(name), room_of(target)
            if name in CORE:
                fine = (
                    target in CORE
                    or other in sys.stdlib_module_names
                    or (name, other) in CORE_WHEN_CALLED
                )
            elif other == API != room:
                fine = False
            elif other not in ROOMS or room in (other, "launcher", API):
                fine = True
            else:
                fine = room != "proxies" and target in CORE
            if other == "torch" and room not in TORCH_ROOMS:
                fine = False
            if not fine:
                problems.append(f"{name} imports {target}")
    return problems


def doors(house):
    return [
        f"{name} imports {target}"
        for name in house.trees
        for target in house.imports(name)
        if name not in DOORS.get(room_of(target), {name})
    ]


def cycles(house):
    """Modules that reach themselves; function-local imports count, those for type checkers do
    not.
    """
    edges = {
        name: house.imports(name, type_checking=False) & set(house.trees) for name in house.trees
    }

    return [f"{name} imports itself in the end" for name in edges if name in reachable(edges, name)]


def reachable(edges, start):
    seen, todo = set(), list(edges[start])
    while todo:
        here = todo.pop()
        if here not in seen:
            seen.add(here)
            todo += edges[here]
    return seen


def folders(house):
    """Folders that reach themselves by their files' imports, those for type checkers included; and
    crowded ones.
    """
    files = [
        name for name in house.trees if name not in house.packages and not name.endswith("__main__")
    ]
    edges = {name.rpartition(".")[0]: set() for name in files}
    for name in files:
        here = name.rpartition(".")[0]
        edges[here] |= {
            target.rpartition(".")[0] for target in house.imports(name) & set(files)
        } - {here}
    problems = [
        f"{here} imports itself in the end" for here in edges if here in reachable(edges, here)
    ]
    numbers = collections.Counter(name.rpartition(".")[0] for name in files)
    return problems + [
        f"{here} has {num} files" for here, num in numbers.items() if num > MAX_FOLDER_FILES
    ]


def picture(house):
    """The folders as CONTRIBUTING draws them: an arrow to each that a folder imports, but for those
    reached by another.

    The packages below `launcher` are one box each, but for the core.
    """

    def box(name):
        name = "core" if name.startswith("proxies.core") else name
        return name.removeprefix("launcher.") if name.startswith("launcher") else name.split(".")[0]

    files = [
        name for name in house.trees if name not in house.packages and not name.endswith("__main__")
    ]
    files = [name for name in files if not name.startswith("launcher.exporters.templates")]
    edges = {box(name.rpartition(".")[0]): set() for name in files}
    for name in files:
        here = box(name.rpartition(".")[0])
        edges[here] |= {
            box(target.rpartition(".")[0]) for target in house.imports(name) & set(files)
        } - {here}
    drawn = {
        here: {
            to
            for to in edges[here]
            if not any(to in reachable(edges, by) for by in edges[here] - {to})
        }
        for here in edges
    }
    return [
        "flowchart BT",
        *(f"  {here} --> {to}" for here in sorted(drawn) for to in sorted(drawn[here])),
    ]


def functions(tree):
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


TO_SPLIT = frozenset((ROOT / "tests" / "to_split.txt").read_text(encoding="utf-8").split())
"""Files and functions that became too long when lines became 100 columns wide; none may come."""


def sizes(house):
    problems, found = [], set()
    for name, tree in house.trees.items():
        num_lines = len(house.texts[name].splitlines())
        if num_lines > MAX_FILE_LINES:
            found.add(name)
            problems += [f"{name} has {num_lines} lines"] if name not in TO_SPLIT else []
        for node in functions(tree):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                place = f"{name}.{node.name}"
                found.add(place)
                problems += [f"{place} has {length} lines"] if place not in TO_SPLIT else []
    if house.root == ROOT:
        problems += [
            f"{name} is short enough: take it out of TO_SPLIT" for name in sorted(TO_SPLIT - found)
        ]
    return problems


def docstrings(house):
    """Modules, public classes and public functions; not what lies inside functions or private
    classes.
    """
    problems = []

    def look(node, name):
        if not ast.get_docstring(node):
            problems.append(f"{name} has no docstring")
        if isinstance(node, ast.Module | ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.ClassDef | ast.FunctionDef) and not inner.name.startswith(
                    "_"
                ):
                    look(inner, f"{name}.{inner.name}")

    for name, tree in house.trees.items():
        look(tree, name)
    return problems


def types(house):
    problems = []
    for name, tree in house.trees.items():
        for node in functions(tree):
            spec = node.args
            arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
            bare = [
                a.arg for a in arguments if a and not a.annotation and a.arg not in ("self", "cls")
            ]
            bare += [] if node.returns else ["return"]
            problems += [f"{name}.{node.name}: {what} has no type" for what in bare]
    return problems


def enumerations(house):
    """Sets of two or more words that are spelled out twice: one has the name, the others
    import it.
    """
    places = collections.defaultdict(list)
    for name, tree in house.trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Literal":
                places[ast.unparse(node.slice)].append(name)
    return [
        f"Literal[{words}] stands in {', '.join(where)}"
        for words, where in places.items()
        if where[1:] and "," in words
    ]


TEMPLATES = "launcher.exporters.templates"
PROBES = "launcher.doctor"
"""What it asks another process of its own goes to nobody."""


def templates(house):
    """Programs that exports carry are files, which nobody imports but they each other, by their
    names there.
    """
    own = {name.rpartition(".")[2] for name in house.trees if name.startswith(TEMPLATES)}
    problems = []
    for name, tree in house.trees.items():
        inside = name.startswith(TEMPLATES)
        for target in house.imports(name):
            if target.startswith(TEMPLATES) or (not inside and target in own):
                problems.append(f"{name} imports {target}, which exports carry")
            if inside and room_of(target) in ROOMS and not target.startswith("proxies"):
                problems.append(f"{name} imports {target}, which no export carries")
        problems += [
            f"{name}:{line} holds a program"
            for line in _programs(tree)
            if not name.startswith(PROBES)
        ]
    return problems


def _programs(tree):
    """Lines with a text of ten lines or more that is Python with imports, also if it has gaps that
    are filled in.
    """
    for node in ast.walk(tree):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(
            str(part.value) if isinstance(part, ast.Constant) else "gap" for part in parts
        )
        if isinstance(node, ast.JoinedStr | ast.Constant) and text.count("\n") >= 10:
            text = re.sub(r"<<\w+>>|@\w+@|\{\{.*?\}\}", "gap", text)
            found = re.search(r"^(?:import \w|from [\w.]+ import )", text, re.MULTILINE)
            if found and (
                _parses(text)
                or len(re.findall(r"^(?:def|class|if|for|with) .*:$", text, re.MULTILINE)) > 1
            ):
                yield node.lineno


def _parses(text):
    try:
        return bool(ast.parse(text))
    except SyntaxError:
        return False


def machine_paths(house):
    pattern = re.compile(r"(?<![\w.:/])/(?:home|root|work|Users|private)/[\w.]")
    return [
        f"{name} names a path of one machine"
        for name, text in house.texts.items()
        if pattern.search(text)
    ]


def thresholds(house):
    """What stands at a room's door: four promises, and no code but `sweeps.load` and names loaded
    late.
    """
    problems = []
    for name in house.packages:
        said = ast.get_docstring(house.trees[name]) or ""
        problems += [
            f"{name} lacks {w}"
            for w in ("Enters", "Leaves", "Promises", "Refuses")
            if f"{w}:" not in said
        ]
        more = [
            node for node in house.trees[name].body[1:] if name != "sweeps" or not _is_load(node)
        ]
        problems += [f"{name} holds code"] if more and name != API else []
    return problems


def _is_load(node):
    """The function, and what its types need."""
    return (
        isinstance(node, ast.Import | ast.ImportFrom | ast.If)
        or getattr(node, "name", "") == "load"
    )


PLAIN_FILES = "proxies.core.plain_files"
OPENERS = {"open", "os.open", "io.open", "sqlite3.connect", "np.memmap", "numpy.memmap"}
OPENING_METHODS = {"open", "read_text", "read_bytes"}
OPEN_OTHERWISE = {
    # what the system or this package itself put there
    "proxies.training.torch_device",
    "proxies.core.failures",
    "proxies.external.keeper",
    "sweeps.store.sites",
    "sweeps.run.pool",
    "sweeps.ray.pool",
    "sweeps.ray.start",
    "sweeps.ray.own",
    "launcher.doctor.folders",
    "launcher.base.signals",
    "proxies.external.supervised_command",
    "launcher.supervisor.attempt",
    "launcher.plan.presets",
    "launcher.exporters.export_writer",
    "forerun.hook",
    # files that the same function, or the drill around it, has just made
    "launcher.rehearsal.own_drills",
    "launcher.rehearsal.stage",
    "launcher.exporters.trainers.huggingface_weights",
    "proxies.training.slot_state",
    # folders, a lock, a database, and mapped ids, whose kind is looked at before; pipes of a shell
    # and standard streams
    "proxies.core.canon",
    "proxies.data.shards",
    "sweeps.store.lock",
    "sweeps.store.chain",
    "sweeps.search.optuna_storage",
    "proxies.data.pretokenized",
    "proxies.data.tokens",
    "proxies.core.tables.table_files",
    "launcher.base.terminal",
}


def openings(house):
    """A pipe or device may lie where a file should: what opens one by its path is `plain_files`,
    and a short list.
    """
    problems = []
    for name, tree in house.trees.items():
        if name == PLAIN_FILES or name in OPEN_OTHERWISE or name.startswith(TEMPLATES):
            continue
        problems += [
            f"{name}:{node.lineno} opens a file: {ast.unparse(node.func)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and _opens(node.func)
        ]
    return problems


def _opens(called):
    """Methods of classes (`Ledger.open`) are others; so is what a package calls `open` itself."""
    if ast.unparse(called) in OPENERS:
        return True
    if not isinstance(called, ast.Attribute) or called.attr not in OPENING_METHODS:
        return False
    return not (
        isinstance(called.value, ast.Name)
        and called.value.id[:1].isupper()
        and called.value.id != "Path"
    )


def idle_exceptions(house):
    """A module on those lists that opens nothing, or is not there: a list that is too long."""
    opening = {
        name
        for name, tree in house.trees.items()
        if any(isinstance(node, ast.Call) and _opens(node.func) for node in ast.walk(tree))
    }
    return [f"{name} opens no file" for name in sorted(OPEN_OTHERWISE - opening)]


NOTATION = "proxies.core.notation"
QUANTITY = re.compile(
    r"\]? (?:nats|FLOPs?|tokens|params|parameters|times|dollars|[kMGT]?B|s|min|minutes|h|hours|days|\w+-hours)\b| ?%"  # noqa: E501
)
"""Text after a number that says which quantity it is."""
SECONDS_OF_UNITS = (60, 3600, 86400)


def notations(house):
    """A share, duration, loss, size, or amount of money has one notation: `proxies.core.notation`
    writes it.
    """
    problems = []
    for name, tree in house.trees.items():
        if name == NOTATION or name.startswith(TEMPLATES):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                problems += [
                    f"{name}:{node.lineno} formats a quantity: {text}" for text in _quantities(node)
                ]
    return problems


def _quantities(joined):
    """Numbers in an f-string that are formatted as a quantity."""
    for before, number, after in zip(
        [None, *joined.values], joined.values, [*joined.values[1:], None], strict=False
    ):
        if not isinstance(number, ast.FormattedValue):
            continue
        spec = ast.unparse(number.format_spec)[2:-1] if number.format_spec else ""
        is_quantity = QUANTITY.match(_text(after)) or _text(before).endswith("USD ")
        divides = isinstance(number.value, ast.BinOp) and isinstance(
            number.value.op, ast.Div | ast.FloorDiv
        )
        converts = divides and getattr(number.value.right, "value", None) in SECONDS_OF_UNITS
        if (
            spec.endswith(("%", "e"))
            or (is_quantity and re.search(r"\.\d+[fg]$", spec))
            or converts
        ):
            yield ast.unparse(number)


PLURAL = re.compile(r" (?!does\b)(?:[a-z]+ )?(?:[a-z]+(?:[^su\W]s)|batches|processes|GPUs|CPUs)\b")


def plurals(house):
    """A number of things that may be one is written by `counted`: no "1 runs"."""
    problems = []
    for name, tree in house.trees.items():
        if name.startswith(TEMPLATES):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                problems += [
                    f"{name}:{node.lineno} writes a plural: {text}" for text in _plurals(node)
                ]
    return problems


def _plurals(joined):
    """Counts in an f-string, `len(...)` or `num_...`, before a noun in the plural."""
    for number, after in zip(joined.values, [*joined.values[1:], None], strict=True):
        if not isinstance(number, ast.FormattedValue) or number.format_spec:
            continue
        called = isinstance(number.value, ast.Call) and ast.unparse(number.value.func) == "len"
        named = getattr(number.value, "attr", getattr(number.value, "id", "")).startswith("num_")
        if (called or named) and PLURAL.match(_text(after)):
            yield ast.unparse(number) + _text(after)[:20]


def _text(part):
    return part.value if isinstance(part, ast.Constant) else ""


RULES = (
    import_law,
    doors,
    cycles,
    folders,
    sizes,
    docstrings,
    types,
    enumerations,
    templates,
    machine_paths,
    thresholds,
    openings,
    notations,
    plurals,
)
DOOR_STEP = '"""A room.\n\nEnters: a\nLeaves: b\nPromises: c\nRefuses: d\n"""\n'


@pytest.fixture(scope="module")
def house():
    return House(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps(house, rule):
    assert rule(house) == []


def test_every_exception_of_opening_files_is_needed(house):
    assert idle_exceptions(house) == []


def test_contributing_draws_the_folders_as_they_are(house):
    text, lines = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), picture(house)
    assert "```mermaid\n" + "\n".join(lines) + "\n```" in text, "the picture is now:\n" + "\n".join(
        lines
    )
    assert "  study --> transfer" not in lines, "it reaches transfer by way of experiments"


def test_every_room_is_looked_at(house):
    assert {room_of(name) for name in house.trees} == set(ROOMS)
    assert len(house.trees) > 50


def planted(tmp_path, files):
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text(DOOR_STEP)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text if text.startswith('"""') else f'"""A module."""\n{text}')
    return House(tmp_path)


def test_a_clean_house_breaks_no_rule(tmp_path):
    fine = {
        "proxies/core/spec.py": "import json",
        "sweeps/a.py": (
            "from proxies.core import spec\ndef f(x: int) -> int:\n    'Doc.'\n    return x\n"
        ),
        "launcher/b.py": "import sweeps.a\nfrom transfer import c\n",
        "transfer/c.py": "import numpy\n",
    }
    house = planted(tmp_path, fine)
    assert {rule.__name__: rule(house) for rule in RULES if rule(house)} == {}


def long_function(num_lines):
    body = "\n".join("    x = 1" for _ in range(num_lines - 2))
    return f"def f() -> None:\n    'Doc.'\n{body}\n"


PROGRAM = """# Trains.
import json

STEPS = 12


def train(steps: int) -> None:
    for step in range(steps):
        print(json.dumps({"step": step}))


if STEPS:
    train(STEPS)
"""
VIOLATIONS = [
    (
        import_law,
        {"sweeps/a.py": "from transfer import b", "transfer/b.py": ""},
        "sweeps.a imports transfer.b",
    ),
    (
        import_law,
        {"transfer/a.py": "def f() -> None:\n    import launcher.cli"},
        "transfer.a imports launcher.cli",
    ),
    (
        import_law,
        {"launcher/a.py": "import forerun.api", "forerun/api.py": ""},
        "launcher.a imports forerun.api",
    ),
    (
        import_law,
        {"scaling_fits/a.py": "import proxies.data.tokens", "proxies/data/tokens.py": ""},
        "proxies.data",
    ),
    (import_law, {"scaling_fits/a.py": "import torch.nn"}, "scaling_fits.a imports torch.nn"),
    (
        import_law,
        {"proxies/a.py": "from sweeps.pool import Finished"},
        "proxies.a imports sweeps.pool",
    ),
    (import_law, {"proxies/core/canon.py": "import numpy"}, "proxies.core.canon imports numpy"),
    (doors, {"launcher/a.py": "import optuna"}, "launcher.a imports optuna"),
    (
        doors,
        {"proxies/a.py": "def f() -> None:\n    from mup import init"},
        "proxies.a imports mup",
    ),
    (doors, {"sweeps/pool.py": "import ray.exceptions"}, "sweeps.pool imports ray.exceptions"),
    (
        doors,
        {"launcher/report.py": "import matplotlib.pyplot"},
        "launcher.report imports matplotlib.pyplot",
    ),
    (doors, {"launcher/a.py": "import wandb"}, "launcher.a imports wandb"),
    (
        doors,
        {"proxies/data/tokens.py": "import tokenizers"},
        "proxies.data.tokens imports tokenizers",
    ),
    (
        cycles,
        {
            "sweeps/a.py": "import sweeps.b",
            "sweeps/b.py": "from sweeps import c",
            "sweeps/c.py": "def f() -> None:\n    from sweeps.a import x",
        },
        "sweeps.c imports itself",
    ),
    (
        folders,
        {
            "launcher/a/x.py": "from launcher.b import y",
            "launcher/b/y.py": "",
            "launcher/b/z.py": "if TYPE_CHECKING:\n    from launcher.a.w import W",
            "launcher/a/w.py": "",
        },
        "launcher.b imports",
    ),
    (folders, {f"launcher/a/x{n}.py": "" for n in range(21)}, "launcher.a has 21 files"),
    (sizes, {"launcher/a.py": "x = 1\n" * 500}, "launcher.a has 501 lines"),
    (sizes, {"launcher/a.py": long_function(60)}, "launcher.a.f has 60 lines"),
    (docstrings, {"launcher/a.py": "def f() -> None: ..."}, "launcher.a.f has no docstring"),
    (
        docstrings,
        {"launcher/a.py": "class C:\n    'Doc.'\n    def f(self) -> None: ..."},
        "launcher.a.C.f has",
    ),
    (docstrings, {"launcher/a.py": "class C:\n    x = 1"}, "launcher.a.C has no docstring"),
    (types, {"launcher/a.py": "def f(x) -> None:\n    'Doc.'"}, "launcher.a.f: x has no type"),
    (types, {"launcher/a.py": "def f(*, x: int):\n    'Doc.'"}, "launcher.a.f: return has no type"),
    (
        enumerations,
        {"launcher/a.py": "x: Literal[1, 2]", "sweeps/b.py": "y = Literal[1, 2]"},
        "sweeps.b, launcher.a",
    ),
    (templates, {"launcher/a.py": f"T = {PROGRAM!r}"}, "launcher.a:2 holds a program"),
    (
        templates,
        {"launcher/a.py": f"T = f{PROGRAM.replace('12', '{n}')!r}"},
        "launcher.a:2 holds a program",
    ),
    (
        templates,
        {"launcher/a.py": f"T = {PROGRAM.replace('12', '<<N>>')!r}"},
        "launcher.a:2 holds a program",
    ),
    (
        templates,
        {"launcher/a.py": f"T = {PROGRAM + '(<<REST>>'!r}"},
        "launcher.a:2 holds a program",
    ),
    (
        templates,
        {
            "launcher/a.py": "from launcher.exporters.templates import t",
            "launcher/exporters/templates/t.py": "",
        },
        "launcher.a imports launcher.exporters.templates.t",
    ),
    (
        templates,
        {"launcher/a.py": "import t", "launcher/exporters/templates/t.py": ""},
        "launcher.a imports t",
    ),
    (
        templates,
        {"launcher/exporters/templates/t.py": "from launcher import a", "launcher/a.py": ""},
        "no export",
    ),
    (machine_paths, {"launcher/a.py": "P = '/" + "home/jane/corpus'"}, "launcher.a names a path"),
    (machine_paths, {"launcher/a.py": "# see /" + "work/notes.md"}, "launcher.a names a path"),
    (
        thresholds,
        {"transfer/__init__.py": '"""A room.\n\nEnters: a\nLeaves: b\nPromises: c\n"""\n'},
        "lacks Refuses",
    ),
    (openings, {"launcher/a.py": "x = open('f')"}, "launcher.a:2 opens a file: open"),
    (
        openings,
        {"launcher/a.py": "def f(path: Path) -> str:\n    return path.read_text()"},
        "launcher.a:3 opens",
    ),
    (
        openings,
        {"sweeps/a.py": "with (folder / 'f').open('rb') as file:\n    pass"},
        "sweeps.a:2 opens",
    ),
    (
        openings,
        {"sweeps/a.py": "import sqlite3\nsqlite3.connect('f')"},
        "sweeps.a:3 opens a file: sqlite3.connect",
    ),
    (
        openings,
        {"proxies/data/a.py": "import numpy as np\nnp.memmap('f')"},
        "proxies.data.a:3 opens a file",
    ),
    (plurals, {"launcher/a.py": "x = f'{len(runs)} runs'"}, "launcher.a:2 writes a plural"),
    (plurals, {"sweeps/a.py": "x = f'lost {state.num_lost} times'"}, "sweeps.a:2 writes a plural"),
    (notations, {"launcher/a.py": "x = f'{share:.1%} of it'"}, "launcher.a:2 formats a quantity"),
    (notations, {"scaling_fits/a.py": "x = f'loss {loss:.4f} nats'"}, "scaling_fits.a:2 formats"),
    (
        notations,
        {"scaling_fits/a.py": "x = f'[{low:.4f}, {high:.4f}] nats'"},
        "scaling_fits.a:2 formats",
    ),
    (notations, {"sweeps/a.py": "x = f'{seconds // 60} min'"}, "sweeps.a:2 formats"),
    (notations, {"launcher/a.py": "x = f'about USD {usd:.2f}'"}, "launcher.a:2 formats"),
    (notations, {"transfer/a.py": "x = f'{flops:.2e}'"}, "transfer.a:2 formats"),
    (
        thresholds,
        {"transfer/__init__.py": DOOR_STEP + "from transfer import verdict\n"},
        "transfer holds code",
    ),
]


@pytest.mark.parametrize(
    ("rule", "files", "said"), VIOLATIONS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_planted_violation_is_caught(tmp_path, rule, files, said):
    assert any(said in problem for problem in rule(planted(tmp_path, files)))


def test_imports_for_type_checkers_make_no_cycle(tmp_path):
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sweeps.b import x\n"
    assert (
        cycles(planted(tmp_path, {"sweeps/a.py": guarded, "sweeps/b.py": "import sweeps.a"})) == []
    )


def loaded(code, *arguments):
    """Heavy packages loaded once `code` has run in a fresh interpreter, and the exit status of its
    main.
    """
    script = (
        f"import sys\ncode = None\ntry:\n    {code}\nexcept SystemExit as stop:\n    code = "
        "stop.code\n"
    )
    script += f"found = {{name.split('.')[0] for name in sys.modules}} & set({HEAVY!r})\n"
    script += "print('loaded', code, *sorted(found), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
    )
    return done.stderr.splitlines()[-1].split()[1:]


MAIN = "from launcher.cli.cli import main; main(sys.argv[1:])"


@pytest.mark.parametrize(
    "module", ["workers.host", "study.stages", "watch.follower", "views.study_status"]
)
def test_drivers_and_watches_load_no_torch(module):
    assert "torch" not in loaded(f"import launcher.{module}")


def test_help_and_validate_load_nothing_heavy(tmp_path):
    (tmp_path / "plan.toml").write_text("")
    (tmp_path / "corpus").mkdir()
    manifest = {
        "schema_version": 3,
        "tokenizer": "bytes",
        "vocab_size": 256,
        "dtype": "uint16",
        "end_id": 0,
        "sources": [
            {"name": "text", "weight": 1.0, "num_documents": 2, "train": [], "validation": []}
        ],
        "not_read": [],
    }
    (tmp_path / "corpus" / "manifest.json").write_text(json.dumps(manifest))
    assert loaded(MAIN, "--help") == ["0"]
    assert loaded(MAIN, "validate", str(tmp_path / "plan.toml")) == ["0"]
    assert loaded(MAIN, "flops", "--help") == ["0"]
    shape = "layers=2,width=64,heads=4,ffn=128,vocab=256,seq_len=16"
    assert loaded(
        MAIN, "explain", "--parametrization", "mup", "--shape", shape, "--base", "width=32"
    ) == ["0"]
    assert loaded("import torch.version") == ["None", "torch"], (
        "the check itself must be able to fail"
    )


def test_the_hearth_loads_nothing_and_the_pure_rooms_neither_torch_nor_ray(house):
    assert loaded(f"import {', '.join(sorted(CORE))}") == ["None"]
    pure = [name for name in house.trees if room_of(name) in ("transfer", "scaling_fits")]
    assert set(loaded(f"import {', '.join(pure)}")) <= {"None", "scipy"}


def test_help_answers_in_three_tenths_of_a_second():
    """Processor time, not the clock: other work on the machine must not fail it."""
    spent = []
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher", "--help"], stdout=subprocess.DEVNULL, cwd=ROOT
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        spent.append(usage.ru_utime + usage.ru_stime)
    assert min(spent) < 0.3


def test_the_rooms_names_are_ours_alone():
    """`sweeps` is also a package of W&B's; installed together, one overwrites the other."""
    owners = importlib.metadata.packages_distributions()
    found = {
        room: set(owners[room]) for room in ROOMS if room != API or API in owners
    }  # an older editable install lacks it
    assert found == {room: {"forerun"} for room in found}
