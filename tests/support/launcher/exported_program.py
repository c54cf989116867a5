"""Helpers that import the programs of an export without the trainer, and that edit its numbers."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import sys
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

from forerun._proxies.core import canon

TRAINERS = ("torchtitan", "olmo_core", "megatron", "accelerate", "transformers")
"""Packages that are imported as stand-ins."""


class _Trainer(ModuleType):
    """A stand-in for a trainer's module: every attribute is a new class with an empty config."""

    __path__: typing.ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        config = dataclasses.make_dataclass("Config", [], kw_only=True, slots=True)
        setattr(self, name, type(name, (), {"Config": config}))
        return getattr(self, name)


class _Finder:
    """An import finder that makes stand-ins for the modules of the trainers."""

    @staticmethod
    def find_spec(name: str, *_: object) -> Any:
        return (
            importlib.util.spec_from_loader(name, _Finder)
            if name.split(".")[0] in TRAINERS
            else None
        )

    @staticmethod
    def create_module(spec: Any) -> ModuleType:
        return _Trainer(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        pass


def import_program(
    folder: Path, name: str = "forerun_numbers", versions: dict[str, str] | None = None
) -> Any:
    """Import an exported program, with stand-ins for everything it imports from trainers.

    Args:
        folder: The export.
        name: The module to import.
        versions: Versions of the trainers that seem to be installed; by default those that the
            export needs.
    """
    path = folder / "forerun.json"
    needs = json.loads(path.read_text())["numbers"].get("needs", {}) if path.exists() else {}
    versions = needs if versions is None else versions
    get_version = importlib.metadata.version

    def list_foreign_modules() -> dict[str, ModuleType]:
        exported_modules = {path.stem for path in folder.glob("*.py")}
        return {
            key: module
            for key, module in sys.modules.items()
            if key.split(".")[0] in {*exported_modules, *TRAINERS}
        }

    saved_modules = list_foreign_modules()
    for key in saved_modules:
        del sys.modules[key]
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    importlib.metadata.version = lambda package: versions.get(package) or get_version(package)
    try:
        return importlib.import_module(name)
    finally:
        importlib.metadata.version = get_version
        sys.path.remove(str(folder))
        sys.meta_path.remove(_Finder)  # type: ignore[arg-type]
        for key in list_foreign_modules():
            del sys.modules[key]
        sys.modules.update(saved_modules)


def read_exported_numbers(folder: Path) -> Any:
    """Return the numbers that the programs of an export read."""
    return import_program(folder).read_numbers()


def edit_numbers(folder: Path, old: str, new: str) -> None:
    """Replace text in `forerun.json` and renew its hash, as if another decision were exported."""
    path = folder / "forerun.json"
    text = path.read_text()
    assert old in text
    body = json.loads(text.replace(old, new))
    del body["sha256"]
    path.write_text(json.dumps({**body, "sha256": canon.compute_content_id(body)}))
