"""The source of the packages as text and syntax trees, for tests that read it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("proxies", "sweeps", "transfer", "scaling_fits", "launcher", "forerun")
API = "forerun"
"""Package that users import; it may import every package, and none may import it."""
LINKED_PACKAGE = re.compile(r"\bforerun\._(?=(?:proxies|sweeps|transfer|scaling_fits|launcher)\b)")
"""Prefix of a linked package: the folder `transfer` is imported as `forerun._transfer`."""


class SourceTree:
    """The packages below a folder, with the text and the syntax tree of each module.

    A module is named by its path: `transfer.question` is imported as `forerun._transfer.question`.
    """

    def __init__(self, root):
        self.root = root
        self.texts, self.trees, self.package_modules = {}, {}, []
        # Every node of each module's tree, because walking a tree takes most of the rules' time
        self.nodes = {}
        self._imports = {}
        for package in PACKAGES:
            for path in sorted((root / package).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                name = ".".join(parts).removesuffix(".__init__")
                self.package_modules += [name] if parts[-1] == "__init__" else []
                self.texts[name] = path.read_text(encoding="utf-8")
                self.trees[name] = ast.parse(self.texts[name])
                self.nodes[name] = list(ast.walk(self.trees[name]))

    def list_imports(self, name, *, type_checking=True):
        """Return the modules that a module imports, also inside functions.

        Args:
            type_checking: Whether imports for type checkers count.
        """
        key = (name, type_checking)
        if key not in self._imports:
            self._imports[key] = frozenset(self._find_imports(name, type_checking))
        return self._imports[key]

    def _find_imports(self, name, type_checking):
        skipped = set()
        if not type_checking:
            for node in self.nodes[name]:
                if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                    skipped.update(map(id, ast.walk(node)))
        modules = set()
        for node in self.nodes[name]:
            if id(node) in skipped:
                continue
            if isinstance(node, ast.Import):
                modules |= {LINKED_PACKAGE.sub("", alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: relative import"
                parent = LINKED_PACKAGE.sub("", f"{node.module}.").removesuffix(".")
                for alias in node.names:
                    # The imported name may be a submodule or a name inside the module.
                    module = LINKED_PACKAGE.sub("", f"{node.module}.{alias.name}")
                    modules.add(module if module in self.trees else parent)
        return modules


def get_package(name):
    """Return the top-level package of a module."""
    return name.split(".")[0]


def list_functions(nodes):
    """Return the function definitions among the nodes of a module."""
    return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


PACKAGE_DOCSTRING = '"""A package.\n\nEnters: a\nLeaves: b\nPromises: c\nRefuses: d\n"""\n'
SHORT_IMPORT = re.compile(
    r"((?:from|import) )((?:proxies|sweeps|transfer|scaling_fits|launcher)\b)"
)


def write_source_tree(tmp_path, files):
    """Write packages with these files and read them as a source tree.

    In the files, `from transfer` is short for `from forerun._transfer`.
    """
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(PACKAGE_DOCSTRING)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        text = SHORT_IMPORT.sub(r"\1forerun._\2", text)  # noqa: PLW2901
        path.write_text(text if text.startswith('"""') else f'"""A module."""\n{text}')
    return SourceTree(tmp_path)
