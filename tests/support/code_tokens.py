"""Count the code tokens of the packages, by folder.

    python tests/support/code_tokens.py

A code token is a token of Python's `tokenize` that is not a comment, docstring, newline, or indent.
Unlike lines, tokens do not depend on how the formatter breaks a statement.
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("forerun", "proxies", "sweeps", "transfer", "scaling_fits", "launcher")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def list_docstrings(tree):
    """Return the nodes of all docstrings of a module, those of attributes included."""
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def count_code_tokens(source):
    """Return the number of code tokens in the text of a module."""
    docstrings = {(node.lineno, node.col_offset) for node in list_docstrings(ast.parse(source))}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(
        token.type not in LAYOUT
        and not (token.type == tokenize.STRING and token.start in docstrings)
        for token in tokens
    )


def count_by_folder():
    """Return the number of code tokens of each folder of the packages."""
    counts = Counter()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            folder = path.parent.relative_to(ROOT).as_posix()
            counts[folder] += count_code_tokens(path.read_text(encoding="utf-8"))
    return counts


if __name__ == "__main__":
    by_folder = count_by_folder()
    for name, count in sorted(by_folder.items()):
        print(f"{count:8,} {name}")
    print(f"{by_folder.total():8,} in all")
