"""Literals and single pieces of a module that the torchtitan export wrote."""

from __future__ import annotations

import ast
from typing import Any


def literals(text: str) -> dict[str, Any]:
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign)
    }


def piece(text: str, name: str, namespace: dict[str, Any]) -> Any:
    """One function or class of the generated module, among its literals and what else is given."""
    node = next(n for n in ast.parse(text).body if getattr(n, "name", None) == name)
    scope = {**literals(text), **namespace}
    exec(compile(ast.Module(body=[node], type_ignores=[]), name, "exec"), scope)
    return scope[name]
