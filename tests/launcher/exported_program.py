"""The programs of an export, imported here without the trainers that they are for; and their
numbers, changed.
"""

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

from proxies.core import canon

TRAINERS = ("torchtitan", "olmo_core", "megatron", "accelerate", "transformers")


class _Trainer(ModuleType):
    """A stand-in for a module of a trainer: every name in it is a class of its own, with an empty
    config.
    """

    __path__: typing.ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        config = dataclasses.make_dataclass("Config", [], kw_only=True, slots=True)
        setattr(self, name, type(name, (), {"Config": config}))
        return getattr(self, name)


class _Finder:
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


def imported(
    folder: Path, name: str = "forerun_numbers", versions: dict[str, str] | None = None
) -> Any:
    """An exported program as a module, all that it says of trainers made of stand-ins.

    `versions`: of the trainers that seem to be installed, if not those that the export needs.
    """
    path = folder / "forerun.json"
    needs = json.loads(path.read_text())["numbers"].get("needs", {}) if path.exists() else {}
    versions, version = needs if versions is None else versions, importlib.metadata.version

    def foreign() -> dict[str, ModuleType]:
        own = {path.stem for path in folder.glob("*.py")}
        return {
            key: module
            for key, module in sys.modules.items()
            if key.split(".")[0] in {*own, *TRAINERS}
        }

    here = foreign()
    for key in here:
        del sys.modules[key]
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    importlib.metadata.version = lambda package: versions.get(package) or version(package)
    try:
        return importlib.import_module(name)
    finally:
        importlib.metadata.version = version
        sys.path.remove(str(folder))
        sys.meta_path.remove(_Finder)  # type: ignore[arg-type]
        for key in foreign():
            del sys.modules[key]
        sys.modules.update(here)


def frozen_in(folder: Path) -> Any:
    """The numbers that the programs of an export read."""
    return imported(folder).read_numbers()


def change(folder: Path, old: str, new: str) -> None:
    """Other numbers in `forerun.json`, with a hash that is theirs: an export of another
    decision.
    """
    path = folder / "forerun.json"
    text = path.read_text()
    assert old in text
    body = json.loads(text.replace(old, new))
    del body["sha256"]
    path.write_text(json.dumps({**body, "sha256": canon.content_id(body)}))
