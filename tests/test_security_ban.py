"""Tests that no source imports or calls anything that could run code from data.

For example, loading a pickle or evaluating a text runs code. Each banned import and call has a
planted example that must be caught.
"""

import ast
import re

import pytest
from source_tree import ROOT, SourceTree, get_package, write_source_tree

BANNED_MODULES = {
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
"""Modules that unpickle, evaluate text, run code, or are unsafe with foreign data."""
BANNED_CALLS = {
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
"""Functions that run code, load executable files, or use unsafe temporary files and connections."""
CALLS_BY_ANOTHER_NAME = {"eval", "exec", "os.system", "torch.load"}
"""Functions that may not be assigned or passed on, because a later call would not be seen."""
BANNED_METHODS = {
    "read_pickle",
    "to_pickle",
    "unpack_archive",
    "extractall",
    "enable_load_extension",
    "load_extension",
}
"""Methods that are banned on any object."""
PICKLE_METHODS = {"__reduce__", "__reduce_ex__", "__setstate__", "__getstate__", "__getnewargs__"}
"""Methods that decide what a pickle of an object does."""
MODULES_WITH_PICKLE_METHODS = {"proxies.core.programs"}
"""Modules that may define pickle methods: Ray pickles an exception of this one to send it."""
SAFE_FLAGS = {
    "weights_only": "True",
    "allow_pickle": "False",
    "shell": "False",
    "verify": "True",
    "trust_remote_code": "False",
}
"""The only value that a keyword argument of this name may have, written literally."""
IMPORTERS_OF_PICKLE_LOADERS = {
    "torch.distributed.checkpoint": {"launcher.main_run.trainer.checkpoints"}
}
"""Modules that load pickles, and the only modules that may import them.

The index of torch's checkpoints is a pickle, which `checkpoints` inspects before it is loaded.
"""
BANNED_IMPORTS = {call.rpartition(".")[::2] for call in BANNED_CALLS if "." in call} | {
    ("torch", "load"),
    ("numpy", "load"),
}
"""Pairs of a module and a function that may not be imported from it."""


def list_banned(source_tree):
    """Return every banned import, call and definition."""
    problems = []
    for name, nodes in source_tree.nodes.items():
        problems += [
            f"{name} imports {target}"
            for target in sorted(source_tree.list_imports(name))
            if BANNED_MODULES & {get_package(target), target.rpartition(".")[2]}
            or any(
                target.startswith(package) and name not in importers
                for package, importers in IMPORTERS_OF_PICKLE_LOADERS.items()
            )
        ]
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        problems += [
            f"{name}:{getattr(node, 'lineno', 0)} {problem}"
            for node in nodes
            for problem in list_banned_in_node(node, name, is_called=id(node) in called)
        ]
    return problems


def get_dotted_name(node):
    """Return a name such as `os.path.join`, with "?" for a part that is no name."""
    attributes = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    first = node.id if isinstance(node, ast.Name) else "?"
    return ".".join([first, *reversed(attributes)])


def list_banned_in_node(node, name, *, is_called):
    """Return what is banned in one node of the syntax tree of the module `name`.

    `is_called` says whether the node is the function of a call.
    """
    if isinstance(node, ast.Call):
        called = get_dotted_name(node.func)
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg in SAFE_FLAGS}
        if (
            called in BANNED_CALLS
            or called.rpartition(".")[2] in BANNED_METHODS
            or (called == "torch.load" and keywords.get("weights_only") != "True")
            or any(
                keyword in keywords and keywords[keyword] != value
                for keyword, value in SAFE_FLAGS.items()
            )
        ):
            return [ast.unparse(node)]
    if isinstance(node, ast.ImportFrom):
        return [
            f"imports {alias.name} of {node.module}"
            for alias in node.names
            if (node.module, alias.name) in BANNED_IMPORTS or alias.name in BANNED_MODULES
        ]
    if isinstance(node, ast.FunctionDef) and node.name in PICKLE_METHODS:
        return [] if name in MODULES_WITH_PICKLE_METHODS else [f"defines {node.name}"]
    if isinstance(node, ast.Attribute | ast.Name):
        dotted_name = get_dotted_name(node)
        if dotted_name in CALLS_BY_ANOTHER_NAME and not is_called:
            return [f"names {dotted_name}"]
    return []


def test_sources_load_nothing_executable():
    assert list_banned(SourceTree(ROOT)) == []


def list_banned_in_text(folder, text, path="launcher/a.py"):
    """Return what is banned in a text, written as a module of a small tree of packages."""
    return list_banned(write_source_tree(folder, {path: text}))


DANGEROUS_LINES = [
    *(f"import {name}" for name in sorted(BANNED_MODULES)),
    "from yaml import safe_load",
    "import ray.cloudpickle",
    "from ray import cloudpickle",
    "from torch.utils import dill",
    "from torch.distributed.checkpoint.state_dict_loader import load",
    *(f"{call}('x')" for call in sorted(BANNED_CALLS)),
    *(f"f.{method}('x')" for method in sorted(BANNED_METHODS)),
    *(
        f"class C:\n    'Doc.'\n    def {name}(self) -> None:\n        'Doc.'"
        for name in sorted(PICKLE_METHODS)
    ),
    *(
        f"f({flag}={value})"
        for flag, right in SAFE_FLAGS.items()
        for value in ("1", "x", "True" if right == "False" else "False")
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


@pytest.mark.parametrize("text", DANGEROUS_LINES)
def test_planted_danger_is_caught(tmp_path, text):
    assert list_banned_in_text(tmp_path, text)


HARMLESS_LINES = [
    "import re\nre.compile('x')",
    "import torch\ntorch.compile(f)",
    "import torch\ntorch.load('f', weights_only=True)",
    "import json\njson.loads('1')",
    "import subprocess\nsubprocess.run(['ls'], shell=False)",
    "import pickletools",
    "import tempfile\ntempfile.mkdtemp()",
    "import os\nos.execv('a', ['a'])",
]


@pytest.mark.parametrize("text", HARMLESS_LINES)
def test_harmless_lines_pass(tmp_path, text):
    assert list_banned_in_text(tmp_path, text) == []


def test_only_allowed_module_may_load_torch_checkpoints(tmp_path):
    text = "from torch.distributed.checkpoint.state_dict_loader import load"
    path = "launcher/main_run/trainer/checkpoints.py"
    assert list_banned_in_text(tmp_path, text, path) == []


def test_repository_holds_no_pickles():
    """Users copy plans, examples, and the benchmarks' data from these folders."""
    suffixes = (".pkl", ".pickle", ".joblib", ".pt", ".pth", ".npy", ".npz")
    folders = [ROOT / name for name in ("examples", "benchmarks", "tests", "docs")]
    assert [
        path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes
    ] == []


BANNED_TEXT = re.compile(
    r"\bpickle(?!tools\b)|\byaml\b|(?<![\w.])eval\(|(?<![\w.])exec\(|torch\.load\((?!\w+, "
    r"weights_only=True)|shell=True"
    r"|os\.system|weights_only=False|trust_remote_code=True|allow_pickle=True"
)
"""Banned words in files that are read as text; `torch.load` is allowed with `weights_only=True`."""


def test_templates_and_examples_contain_no_banned_call():
    """These files are no modules of the packages, so the tests above do not see them."""
    folders = [ROOT / "launcher" / "main_run" / "exporters", ROOT / "examples", ROOT / "benchmarks"]
    paths = [
        path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".sh")
    ]
    matches = {
        path.name: match.group()
        for path in paths
        if (match := BANNED_TEXT.search(path.read_text()))
    }
    assert matches == {}
    assert all(any(path.is_relative_to(folder) for path in paths) for folder in folders)
    assert all(
        BANNED_TEXT.search(text)
        for text in ("import pickle", "x = eval(y)", "torch.load(f)", "f(shell=True)")
    )
    assert not BANNED_TEXT.search("model.eval()")
