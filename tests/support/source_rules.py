"""Rules for the source code: imports, sizes, docstrings, types, files, and notation.

Each rule is a function that returns the problems of a `SourceTree`. `tests/test_source_rules.py`
applies the rules to the repository and to small trees with a planted violation.
"""

from __future__ import annotations

import ast
import collections
import re
import sys

from source_tree import API, PACKAGES, ROOT, get_package, list_functions

CORE = {
    "proxies.external.command_supervisor",
    "proxies.external.supervised_command",
    "proxies.external.log_file",
} | {
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "proxies" / "core").rglob("[a-z]*.py")
}
"""Modules that every package may import; they use only the standard library."""
CORE_WHEN_CALLED = {("proxies.core.tables.table_files", "pyarrow")}
"""Exceptions of `CORE`: imports inside a function that needs the library."""
IMPORTERS_BY_LIBRARY = {
    "mup": {"proxies.parametrization.parametrization"},
    "optuna": {"sweeps.search.samplers", "sweeps.search.optuna_storage"},
    "ray": {"sweeps.ray.pool", "sweeps.ray.head"},
    "jinja2": {"launcher.report.page.page"},
    "matplotlib": {
        f"launcher.report.figures.{name}" for name in ("panel", "transfer", "ladder", "plots")
    },
    "tokenizers": {"proxies.data.tokenizer"},
    "wandb": {"launcher.report.dashboards.wandb_process"},
    "wandb_workspaces": {"launcher.report.dashboards.workspaces"},
}
"""Modules that may import each heavy or foreign library."""
TORCH_PACKAGES = {"proxies", "launcher"}
"""Packages that may import torch."""
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_FOLDER_FILES = 500, 59, 20
"""Lines of a file, lines of a function, and files in a folder, at most."""


def find_forbidden_imports(source_tree):
    """Return imports that the order of the packages forbids.

    The core imports only the standard library and itself. `proxies` imports its core, and the other
    packages import the core of `proxies`. The launcher and the API import every package, and no
    other package imports the API. Only `TORCH_PACKAGES` import torch.
    """
    problems = []
    for name in source_tree.trees:
        for target in source_tree.list_imports(name):
            package, target_package = get_package(name), get_package(target)
            if name in CORE:
                is_allowed = (
                    target in CORE
                    or target_package in sys.stdlib_module_names
                    or (name, target_package) in CORE_WHEN_CALLED
                )
            elif target_package == API != package:
                is_allowed = False
            elif target_package not in PACKAGES or package in (target_package, "launcher", API):
                is_allowed = True
            else:
                is_allowed = package != "proxies" and target in CORE
            if target_package == "torch" and package not in TORCH_PACKAGES:
                is_allowed = False
            if not is_allowed:
                problems.append(f"{name} imports {target}")
    return problems


def find_bare_imports(source_tree):
    """Return imports of our packages outside `forerun`, which another library could shadow."""
    problems = []
    for name, nodes in source_tree.nodes.items():
        for node in nodes:
            for module in list_imported_modules(node):
                package = get_package(module)
                if package in PACKAGES and package != API:
                    problems.append(f"{name} imports {module}, which is not below forerun")
    return problems


def list_imported_modules(node):
    """Return the modules that an import statement names, as they are written."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) else []


LAYERS = ("main_run", "study", "report", "cli")
"""Folders of the launcher; each imports only itself and those before it."""


def find_layer_violations(source_tree):
    """Return imports of a later layer of the launcher by an earlier one."""
    problems = []
    for name in source_tree.trees:
        package, _, path = name.partition(".")
        layer = path.split(".")[0]
        if package != "launcher" or layer not in LAYERS:
            continue
        allowed = LAYERS[: LAYERS.index(layer) + 1]
        problems += [
            f"{name} imports {target}, a layer above it"
            for target in source_tree.list_imports(name)
            if target.startswith("launcher.") and target.split(".")[1] not in allowed
        ]
    return problems


def find_misplaced_library_imports(source_tree):
    """Return imports of a listed library by a module that may not import it."""
    return [
        f"{name} imports {target}"
        for name in source_tree.trees
        for target in source_tree.list_imports(name)
        if name not in IMPORTERS_BY_LIBRARY.get(get_package(target), {name})
    ]


def find_import_cycles(source_tree):
    """Return modules that import themselves, directly or not.

    Imports inside functions count; imports for type checkers do not.
    """
    edges = {
        name: source_tree.list_imports(name, type_checking=False) & set(source_tree.trees)
        for name in source_tree.trees
    }
    return [
        f"{name} imports itself in the end" for name in edges if name in find_reachable(edges, name)
    ]


def find_reachable(edges, start):
    """Return the nodes of a graph that can be reached from a node."""
    reached, pending = set(), list(edges[start])
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending += edges[node]
    return reached


def find_folder_problems(source_tree):
    """Return folders that import themselves through their files, and folders with too many files.

    Imports for type checkers count.
    """
    files = [
        name
        for name in source_tree.trees
        if name not in source_tree.package_modules and not name.endswith("__main__")
    ]
    edges = {name.rpartition(".")[0]: set() for name in files}
    for name in files:
        folder = name.rpartition(".")[0]
        targets = {
            target.rpartition(".")[0] for target in source_tree.list_imports(name) & set(files)
        }
        edges[folder] |= targets - {folder}
    problems = [
        f"{folder} imports itself in the end"
        for folder in edges
        if folder in find_reachable(edges, folder)
    ]
    num_files = collections.Counter(name.rpartition(".")[0] for name in files)
    return problems + [
        f"{folder} has {num} files" for folder, num in num_files.items() if num > MAX_FOLDER_FILES
    ]


def draw_layers(source_tree):
    """Return the lines of CONTRIBUTING's diagram: arrows from each layer to those it imports.

    An arrow is left out if another path of arrows leads there.
    """
    edges = {}
    for name in source_tree.trees:
        if not name.startswith(TEMPLATES):
            targets = {
                target for target in source_tree.list_imports(name) if target in source_tree.trees
            }
            edges.setdefault(get_layer(name), set()).update(map(get_layer, targets))
    arrows = []
    for layer in edges:
        for target in edges[layer] - {layer}:
            other_targets = edges[layer] - {target, layer}
            if not any(target in find_reachable(edges, node) for node in other_targets):
                arrows.append((layer, target))
    return ["flowchart BT", *(f"  {layer} --> {target}" for layer, target in sorted(arrows))]


def get_layer(name):
    """Return a module's box in the diagram: a package, its core, or a layer of the launcher."""
    if name in CORE:
        return "proxies/core"
    parts = name.split(".")
    return "/".join(parts[:2]) if parts[0] == "launcher" else parts[0]


def find_oversized_code(source_tree):
    """Return the files and functions that are too long."""
    problems = []
    for name, nodes in source_tree.nodes.items():
        num_lines = len(source_tree.texts[name].splitlines())
        if num_lines > MAX_FILE_LINES:
            problems.append(f"{name} has {num_lines} lines")
        for node in list_functions(nodes):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                problems.append(f"{name}.{node.name} has {length} lines")
    return problems


def find_missing_docstrings(source_tree):
    """Return the modules, public classes, and public functions without a docstring."""
    problems = []

    def check(node, name):
        if not ast.get_docstring(node):
            problems.append(f"{name} has no docstring")
        if isinstance(node, ast.Module | ast.ClassDef):
            for inner in node.body:
                is_definition = isinstance(inner, ast.ClassDef | ast.FunctionDef)
                if is_definition and not inner.name.startswith("_"):
                    check(inner, f"{name}.{inner.name}")

    for name, tree in source_tree.trees.items():
        check(tree, name)
    return problems


def find_missing_types(source_tree):
    """Return the arguments and return values without a type."""
    problems = []
    for name, nodes in source_tree.nodes.items():
        for node in list_functions(nodes):
            spec = node.args
            arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
            untyped = [
                argument.arg
                for argument in arguments
                if argument and not argument.annotation and argument.arg not in ("self", "cls")
            ]
            untyped += [] if node.returns else ["return"]
            problems += [f"{name}.{node.name}: {argument} has no type" for argument in untyped]
    return problems


def find_repeated_literals(source_tree):
    """Return types `Literal[...]` of several words that are written out in more than one place."""
    places = collections.defaultdict(list)
    for name, nodes in source_tree.nodes.items():
        for node in nodes:
            if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Literal":
                places[ast.unparse(node.slice)].append(name)
    return [
        f"Literal[{words}] is in {', '.join(modules)}"
        for words, modules in places.items()
        if len(modules) > 1 and "," in words
    ]


TEMPLATES = "launcher.main_run.exporters.templates"
"""Folder of the programs that exports contain."""
PROBES = "launcher.cli.doctor"
"""Folder whose modules may hold programs as text: they run in a process of their own."""
MIN_LINE_BREAKS = 10
"""Line breaks that a text must have to count as a program."""


def find_template_problems(source_tree):
    """Return imports of exported programs, and programs that are text instead of files.

    An export copies its programs, so that only they may import each other, by their file names.
    """
    template_names = {
        name.rpartition(".")[2] for name in source_tree.trees if name.startswith(TEMPLATES)
    }
    problems = []
    for name, nodes in source_tree.nodes.items():
        is_template = name.startswith(TEMPLATES)
        for target in source_tree.list_imports(name):
            if target.startswith(TEMPLATES) or (not is_template and target in template_names):
                problems.append(f"{name} imports {target}, which is an exported program")
            is_ours = get_package(target) in PACKAGES and not target.startswith("proxies")
            if is_template and is_ours:
                problems.append(f"{name} imports {target}, which no export contains")
        if not name.startswith(PROBES):
            problems += [f"{name}:{line} holds a program" for line in find_programs(nodes)]
    return problems


def find_programs(nodes):
    """Yield the line numbers of long texts that are Python programs with imports.

    Placeholders that are filled in later count as names.
    """
    for node in nodes:
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(
            str(part.value) if isinstance(part, ast.Constant) else "gap" for part in parts
        )
        if isinstance(node, ast.JoinedStr | ast.Constant) and text.count("\n") >= MIN_LINE_BREAKS:
            text = re.sub(r"<<\w+>>|@\w+@|\{\{.*?\}\}", "gap", text)
            has_import = re.search(r"^(?:import \w|from [\w.]+ import )", text, re.MULTILINE)
            blocks = re.findall(r"^(?:def|class|if|for|with) .*:$", text, re.MULTILINE)
            if has_import and (is_valid_python(text) or len(blocks) > 1):
                yield node.lineno


def is_valid_python(text):
    """Return whether a text parses as a program that is not empty."""
    try:
        return bool(ast.parse(text))
    except SyntaxError:
        return False


def find_machine_paths(source_tree):
    """Return modules that name a path of one machine."""
    pattern = re.compile(r"(?<![\w.:/])/(?:home|root|work|Users|private)/[\w.]")
    return [
        f"{name} names a path of one machine"
        for name, text in source_tree.texts.items()
        if pattern.search(text)
    ]


def find_package_problems(source_tree):
    """Return packages whose `__init__` lacks a part of its docstring or holds code.

    Only the API may hold code: its lazily loaded names.
    """
    problems = []
    for name in source_tree.package_modules:
        docstring = ast.get_docstring(source_tree.trees[name]) or ""
        problems += [
            f"{name} lacks {heading}"
            for heading in ("Enters", "Leaves", "Promises", "Refuses")
            if f"{heading}:" not in docstring
        ]
        has_code = len(source_tree.trees[name].body) > 1
        problems += [f"{name} holds code"] if has_code and name != API else []
    return problems


PLAIN_FILES = "proxies.core.plain_files"
"""Module that opens files and refuses pipes and devices."""
OPENERS = {"open", "os.open", "io.open", "sqlite3.connect", "np.memmap", "numpy.memmap"}
OPENING_METHODS = {"open", "read_text", "read_bytes"}
"""Functions (above), and methods of paths, that open a file."""
OPEN_OTHERWISE = {
    # Files of the operating system or of this package.
    "proxies.training.torch_device",
    "proxies.core.failures",
    "proxies.external.command_supervisor",
    "sweeps.store.sites",
    "sweeps.run.cores",
    "sweeps.ray.pool",
    "sweeps.ray.cluster_start",
    "sweeps.ray.cluster_folder",
    "launcher.cli.doctor.folders",
    "launcher.main_run.process_signals",
    "launcher.main_run.supervisor.attempt",
    "launcher.study.plan.presets",
    "launcher.main_run.exporters.export_writer",
    "forerun.hook",
    # Files that the same function, or its caller, has just created.
    "launcher.main_run.rehearsal.user_drills",
    "launcher.main_run.rehearsal.rehearsal_folder",
    "proxies.training.slot_state",
    # Folders, a lock, a database, and memory-mapped ids whose kind is checked before; pipes of a
    # shell, and standard streams.
    "proxies.core.canon",
    "proxies.data.shards",
    "sweeps.store.lock",
    "sweeps.store.chain",
    "sweeps.search.optuna_storage",
    "proxies.data.pretokenized",
    "proxies.data.tokens",
    "proxies.core.tables.table_files",
    "launcher.main_run.terminal_layout",
}
"""Modules that may open files without `proxies.core.plain_files`."""


def find_unchecked_opens(source_tree):
    """Return calls that open a file without `plain_files`, which refuses pipes and devices."""
    problems = []
    for name, nodes in source_tree.nodes.items():
        if name == PLAIN_FILES or name in OPEN_OTHERWISE or name.startswith(TEMPLATES):
            continue
        problems += [
            f"{name}:{node.lineno} opens a file: {ast.unparse(node.func)}"
            for node in nodes
            if isinstance(node, ast.Call) and is_opener(node.func)
        ]
    return problems


def is_opener(called):
    """Return whether a called function opens a file; methods of classes (`Ledger.open`) do not."""
    if ast.unparse(called) in OPENERS:
        return True
    if not isinstance(called, ast.Attribute) or called.attr not in OPENING_METHODS:
        return False
    return not (
        isinstance(called.value, ast.Name)
        and called.value.id[:1].isupper()
        and called.value.id != "Path"
    )


def find_needless_exceptions(source_tree):
    """Return the modules in OPEN_OTHERWISE that open no file or do not exist."""
    opening = {
        name
        for name, nodes in source_tree.nodes.items()
        if any(isinstance(node, ast.Call) and is_opener(node.func) for node in nodes)
    }
    return [f"{name} opens no file" for name in sorted(OPEN_OTHERWISE - opening)]


NOTATION = "proxies.core.notation"
QUANTITY = re.compile(
    r"\]? (?:nats|FLOPs?|tokens|params|parameters|times|dollars|[kMGT]?B|s|min|minutes|h|hours|days|\w+-hours)\b| ?%"  # noqa: E501
)
"""Unit after a number."""
SECONDS_OF_UNITS = (60, 3600, 86400)
"""Divisors that convert seconds to minutes, hours and days."""


def find_own_notations(source_tree):
    """Return f-strings that format a share, duration, loss, size, or price themselves.

    `proxies.core.notation` writes them, so that each quantity has one notation.
    """
    problems = []
    for name, nodes in source_tree.nodes.items():
        if name == NOTATION or name.startswith(TEMPLATES):
            continue
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                problems += [
                    f"{name}:{node.lineno} formats a quantity: {text}"
                    for text in find_quantities(node)
                ]
    return problems


def find_quantities(joined):
    """Yield the numbers in an f-string that are formatted as a quantity."""
    for before, number, after in zip(
        [None, *joined.values], joined.values, [*joined.values[1:], None], strict=False
    ):
        if not isinstance(number, ast.FormattedValue):
            continue
        spec = ast.unparse(number.format_spec)[2:-1] if number.format_spec else ""
        is_quantity = QUANTITY.match(get_text(after)) or get_text(before).endswith("USD ")
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
"""Noun in the plural after a number, perhaps with an adjective."""


def find_plurals(source_tree):
    """Return f-strings that write a count before a plural, which would give "1 runs"."""
    problems = []
    for name, nodes in source_tree.nodes.items():
        if name.startswith(TEMPLATES):
            continue
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                problems += [
                    f"{name}:{node.lineno} writes a plural: {text}"
                    for text in find_counts_before_plurals(node)
                ]
    return problems


def find_counts_before_plurals(joined):
    """Yield the counts in an f-string, `len(...)` or `num_...`, before a noun in the plural."""
    for number, after in zip(joined.values, [*joined.values[1:], None], strict=True):
        if not isinstance(number, ast.FormattedValue) or number.format_spec:
            continue
        is_len = isinstance(number.value, ast.Call) and ast.unparse(number.value.func) == "len"
        name = getattr(number.value, "attr", getattr(number.value, "id", ""))
        if (is_len or name.startswith("num_")) and PLURAL.match(get_text(after)):
            yield ast.unparse(number) + get_text(after)[:20]


def get_text(part):
    """Return the text of a constant part of an f-string, or "" for another part."""
    return part.value if isinstance(part, ast.Constant) else ""


RULES = (
    find_forbidden_imports,
    find_bare_imports,
    find_layer_violations,
    find_misplaced_library_imports,
    find_import_cycles,
    find_folder_problems,
    find_oversized_code,
    find_missing_docstrings,
    find_missing_types,
    find_repeated_literals,
    find_template_problems,
    find_machine_paths,
    find_package_problems,
    find_unchecked_opens,
    find_own_notations,
    find_plurals,
)
