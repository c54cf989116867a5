"""What a worker runs: an engine of proxies behind the pool's `Host` protocol. Torch is loaded in the worker alone."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from proxies import canon
from proxies.canon import Json
from proxies.spec import Curve, RunResult, RunSpec
from sweeps.pool import Finished

if TYPE_CHECKING:
    from proxies.built import BuiltModel
    from proxies.data.tokens import TokenStore


class Engine(Protocol):
    """What trains: a bank, one trial alone, or the user's own command."""

    def admit(self, index: int, spec: RunSpec) -> None:
        """Start a run in a free slot."""

    def advance(self, num_steps: int) -> list[tuple[int, RunResult, Curve]]:
        """Up to so many steps; (slot, result, curve) of the runs that end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFactory:
    """Makes the host of a worker; travels to it. Folders are absolute, as the workers see them."""

    corpus: str
    """Of the token shards; empty where a command has its own data."""
    weights: dict[str, float] | None = None
    """Shares of the corpus's sources, where the plan changes them."""
    code_dir: str = ""
    """Of the user's own modules."""
    study_dir: str = ""
    timeout_seconds: float | None = None
    """Of one run of a command."""
    python_path: str | None = field(default_factory=lambda: os.environ.get("PYTHONPATH"))
    """A command's, as the user set it: a worker's own serves our code, and could hide the trainer's."""

    def __call__(self) -> Host:
        """A host with no engine yet."""
        return Host(self)


class Host:
    """One engine at a time, rebuilt when the key changes."""

    def __init__(self, where: HostFactory) -> None:
        self._where = where
        self._store: TokenStore | None = None
        self._engine: Engine | None = None
        self._key = ""

    def advance(
        self, bank_key: str, num_slots: int, admit: list[tuple[int, dict[str, Json]]], max_steps: int
    ) -> list[Finished]:
        """See `sweeps.pool.Host`."""
        specs = [(slot, canon.decode(RunSpec, spec)) for slot, spec in admit]
        if bank_key != self._key or self._engine is None:
            if not specs:
                raise ValueError("an empty bank was asked to advance")
            self._engine = self._open(specs[0][1])
            self._key = bank_key
        for slot, spec in specs:
            self._engine.admit(slot, spec)
        return [
            Finished(
                slot=slot,
                result=cast(dict[str, Json], canon.to_json(result)),
                curve=cast(dict[str, Json], canon.to_json(curve)),
            )
            for slot, result, curve in self._engine.advance(max_steps)
        ]

    def _open(self, spec: RunSpec) -> Engine:
        """What trains runs like this one: their own command, we ourselves one at a time, or side by side."""
        where = self._where
        if spec.command is not None:
            from proxies.external.command import CommandEngine, Workplace

            return CommandEngine(
                Workplace(
                    runs_dir=Path(where.study_dir) / "external",
                    code_dir=Path(where.code_dir),
                    corpus=Path(where.corpus) if where.corpus else None,
                    timeout_seconds=where.timeout_seconds or math.inf,
                    python_path=where.python_path,
                )
            )
        from proxies.data.tokens import TokenStore

        self._store = self._store or TokenStore(Path(where.corpus), trusted=True, weights=where.weights)
        if spec.numerics.num_slots == 1:
            from proxies.solo import Solo

            return Solo(self._store, build=self._build)
        from proxies.bank import Bank

        return Bank(spec.shape, spec.batch_tokens, spec.numerics, self._store)

    def _build(self, spec: RunSpec) -> BuiltModel:
        from proxies.external.factory import build_model

        return build_model(spec, Path(self._where.code_dir))
