"""Nothing executable is ever loaded: what the source may not call, each with a planted example that
is caught.
"""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

_HOUSE = importlib.util.spec_from_file_location("house", Path(__file__).with_name("test_house.py"))
house_rules = importlib.util.module_from_spec(_HOUSE)
_HOUSE.loader.exec_module(house_rules)
ROOT, House, planted, room_of = (
    house_rules.ROOT,
    house_rules.House,
    house_rules.planted,
    house_rules.room_of,
)

UNPICKLERS = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "jsonpickle",
    "copyreg",
    "yaml",
    "ruamel",
    "dbm",
    "runpy",
    "code",
    "pty",
    "telnetlib",
    "xmlrpc",
    "multiprocessing",
}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "input",
    "builtins.eval",
    "builtins.exec",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "os.execl",
    "os.spawnl",
    "tempfile.mktemp",
    "tempfile.template",
    "shutil.unpack_archive",
    "torch.jit.load",
    "torch.hub.load",
    "torch.package.PackageImporter",
    "torch.export.load",
    "torch.ops.load_library",
    "torch.classes.load_library",
    "torch.serialization.load",
    "ssl._create_unverified_context",
}
METHODS = {
    "read_pickle",
    "to_pickle",
    "unpack_archive",
    "extractall",
    "enable_load_extension",
    "load_extension",
}
"""Whatever they are called on."""
DUNDERS = {"__reduce__", "__reduce_ex__", "__setstate__", "__getstate__", "__getnewargs__"}
REDUCED = {"proxies.core.programs"}
"""An exception that travels from a worker: Ray's own pickle asks it how."""
FLAGS = {
    "weights_only": "True",
    "allow_pickle": "False",
    "shell": "False",
    "verify": "True",
    "trust_remote_code": "False",
}
"""The one value that such a keyword may have, spelled out."""
PICKLES_INSIDE = {"torch.distributed.checkpoint": {"launcher.trainer.checkpoints"}}
"""Of torch's checkpoints the index is a pickle: one door, which looks at it before."""
IMPORTED = {call.rpartition(".")[::2] for call in CALLS if "." in call} | {
    ("torch", "load"),
    ("numpy", "load"),
}


def banned(house):
    problems = []
    for name, tree in house.trees.items():
        problems += [
            f"{name} imports {target}"
            for target in sorted(house.imports(name))
            if UNPICKLERS & {room_of(target), target.rpartition(".")[2]}
            or any(
                target.startswith(package) and name not in at
                for package, at in PICKLES_INSIDE.items()
            )
        ]
        for node in ast.walk(tree):
            problems += [
                f"{name}:{getattr(node, 'lineno', 0)} {said}" for said in _said_of(node, name)
            ]
    return problems


def _said_of(node, name):
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if (
            called in CALLS
            or called.rpartition(".")[2] in METHODS
            or (called == "torch.load" and keywords.get("weights_only") != "True")
            or any(
                keyword in keywords and keywords[keyword] != value
                for keyword, value in FLAGS.items()
            )
        ):
            return [ast.unparse(node)]
    if isinstance(node, ast.ImportFrom):
        return [
            f"imports {a.name} of {node.module}"
            for a in node.names
            if (node.module, a.name) in IMPORTED or a.name in UNPICKLERS
        ]
    if isinstance(node, ast.FunctionDef) and node.name in DUNDERS and name not in REDUCED:
        return [f"defines {node.name}"]
    if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in (
        "eval",
        "exec",
        "os.system",
        "torch.load",
    ):
        return (
            []
            if isinstance(node.ctx, ast.Load) and _is_called(node)
            else [f"names {ast.unparse(node)}"]
        )
    return []


def _is_called(node):
    return getattr(node, "is_called", False)


@pytest.fixture(scope="module")
def house():
    return House(ROOT)


def mark_calls(house):
    """So that a function handed on under another name is seen."""
    for tree in house.trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                node.func.is_called = True
    return house


def test_the_house_loads_nothing_executable(house):
    assert banned(mark_calls(house)) == []


PLANTED = [
    *(f"import {name}" for name in sorted(UNPICKLERS)),
    "from yaml import safe_load",
    "import ray.cloudpickle",
    "from ray import cloudpickle",
    "from torch.utils import dill",
    "from torch.distributed.checkpoint.state_dict_loader import load",
    *(f"{call}('x')" for call in sorted(CALLS)),
    *(f"f.{method}('x')" for method in sorted(METHODS)),
    *(
        f"class C:\n    'Doc.'\n    def {name}(self) -> None:\n        'Doc.'"
        for name in sorted(DUNDERS)
    ),
    *(
        f"f({flag}={value})"
        for flag, right in FLAGS.items()
        for value in ("1", "x", right == "False")
    ),
    "import torch\ntorch.load('f')",
    "import torch\ntorch.load('f', weights_only=False)",
    "from torch import load",
    "import torch\ntorch.load('f', **given)",
    "import torch\nread = torch.load",
    "run = eval",
    "map(exec, lines)",
    "from os import system",
    "from tempfile import mktemp",
    "import subprocess\nsubprocess.run('ls', shell=True)",
    "import numpy\nnumpy.load('f', allow_pickle=True)",
    "from numpy import load",
]


@pytest.mark.parametrize("text", PLANTED)
def test_a_planted_danger_is_caught(tmp_path, text):
    assert banned(mark_calls(planted(tmp_path, {"launcher/a.py": text})))


FINE = [
    "import re\nre.compile('x')",
    "import torch\ntorch.compile(f)",
    "import torch\ntorch.load('f', weights_only=True)",
    "import json\njson.loads('1')",
    "import subprocess\nsubprocess.run(['ls'], shell=False)",
    "import pickletools",
    "import tempfile\ntempfile.mkdtemp()",
    "import os\nos.execv('a', ['a'])",
]


@pytest.mark.parametrize("text", FINE)
def test_what_is_harmless_passes(tmp_path, text):
    assert banned(mark_calls(planted(tmp_path, {"launcher/a.py": text}))) == []


def test_the_one_door_to_torchs_checkpoints_is_open(tmp_path):
    text = "from torch.distributed.checkpoint.state_dict_loader import load"
    assert banned(mark_calls(planted(tmp_path, {"launcher/trainer/checkpoints.py": text}))) == []


def test_no_yaml_or_pickle_lies_in_the_repository():
    """What users copy: plans, examples, benchmarks' data."""
    kinds = (".pkl", ".pickle", ".joblib", ".pt", ".pth", ".npy", ".npz")
    folders = [ROOT / name for name in ("examples", "benchmarks", "tests", "docs")]
    assert [path for folder in folders for path in folder.rglob("*") if path.suffix in kinds] == []


IN_TEXT = re.compile(
    r"\bpickle(?!tools\b)|\byaml\b|(?<![\w.])eval\(|(?<![\w.])exec\(|torch\.load\((?!\w+, "
    r"weights_only=True)|shell=True"
    r"|os\.system|weights_only=False|trust_remote_code=True|allow_pickle=True"
)


def test_what_is_exported_and_what_users_copy_calls_none_of_it_either():
    """Programs that are written as text are no source of ours, and no import of theirs is seen
    above.
    """
    folders = [ROOT / "launcher" / "exporters", ROOT / "examples", ROOT / "benchmarks"]
    paths = [
        path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".sh")
    ]
    found = {
        path.name: match.group() for path in paths if (match := IN_TEXT.search(path.read_text()))
    }
    assert found == {} and len(paths) > 20
    assert all(
        IN_TEXT.search(text)
        for text in ("import pickle", "x = eval(y)", "torch.load(f)", "f(shell=True)")
    )
    assert not IN_TEXT.search("model.eval()")
